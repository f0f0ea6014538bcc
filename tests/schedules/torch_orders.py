"""torch.distributed.pipelining's own schedules, written as its CSV, for the tests of the reader."""

from __future__ import annotations

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules as of_torch

SINGLE = (of_torch.ScheduleGPipe, of_torch.Schedule1F1B)


def torch_csv(
    kind: type, num_ranks: int, stages_per_rank: int, num_micro_batches: int, *, lowered: bool = False
) -> str:
    """Return the rows that torch's class makes, one operation a cell, bubbles empty.  lowered: with torch's
    transfers."""
    count = num_ranks * stages_per_rank
    stages: list[Any] = [
        SimpleNamespace(
            group_size=num_ranks, group_rank=0, num_stages=count, stage_index=place * num_ranks, submod=nn.Identity()
        )
        for place in range(stages_per_rank)
    ]
    result = kind(stages[0] if kind in SINGLE else stages, num_micro_batches)
    text = io.StringIO()
    csv.writer(text).writerows((result.pipeline_order_with_comms if lowered else result.pipeline_order).values())
    return text.getvalue()
