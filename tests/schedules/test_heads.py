"""Heads split over processors: a layer's attention lasts as long as its slowest processor."""

from __future__ import annotations

import pytest
from schedule_plans import peaks, timed

from workbench.core.errors import ScheduleError
from workbench.schedules import check, split_heads


@pytest.mark.parametrize("num_layers", [1, 3])
def test_attention_lasts_as_long_as_the_slower_stream(num_layers: int) -> None:
    """Per layer max over processors of heads x seconds per head, plus the rest."""
    heads, per_head = (8, 4), (0.25, 0.375)

    def attention(rank, op):
        return heads[op.part] * per_head[op.part]

    schedule = check(split_heads(heads, num_layers=num_layers))
    forward = max(8 * 0.25, 4 * 0.375) + 1.0
    backward = 2 * max(8 * 0.25, 4 * 0.375) + 2.0
    timeline = timed(schedule, ATTN=attention, MLP=1.0, MLPB=2.0, ATTNB=lambda rank, op: 2 * attention(rank, op))
    assert timeline.makespan_s == num_layers * (forward + backward)
    # Two streams at once are not more than one busy device.
    assert timeline.bubble_fraction == 0.0


def test_one_processor_takes_the_sum() -> None:
    """All heads on one stream: no overlap."""
    alone = timed(split_heads((12, 0), backward=False), ATTN=3.0, MLP=1.0)
    assert alone.makespan_s == 4.0
    assert {span.op.stream for span in alone.spans} == {"compute"}


def test_contexts_live_until_their_backward() -> None:
    """Forward only keeps none."""
    assert peaks(split_heads((1, 1), num_layers=4), "hctx", ATTN=1.0, MLP=1.0, MLPB=1.0, ATTNB=1.0) == (8,)
    assert peaks(split_heads((1, 1), num_layers=4, backward=False), "hctx", ATTN=1.0, MLP=1.0) == (0,)


@pytest.mark.parametrize(("heads", "num_layers"), [((), 1), ((0, 0), 1), ((4, 4), 0), ((4, -1), 1)])
def test_nothing_to_split(heads: tuple[int, ...], num_layers: int) -> None:
    """No head, no layer."""
    with pytest.raises(ScheduleError, match="Give it a layer and a head"):
        split_heads(heads, num_layers=num_layers)
