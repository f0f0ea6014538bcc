"""RingAda's schedule by name, built from a few integers (see schedules.published)."""

from __future__ import annotations

from workbench.core.errors import ScheduleError
from workbench.core.schedule import Schedule
from workbench.methods.ringada.schedule import Iteration, ring_round
from workbench.schedules.published import SECONDS, Published, equal_pipeline


def _ring(ranks: int = 4, micro_batches: int = 4, unfrozen_layers: int = 2, initiators: int = 1) -> Schedule:
    if initiators > ranks:
        raise ScheduleError(
            f"{initiators} initiators were asked for.",
            f"The ring has {ranks} ranks.",
            "Lower initiators, or raise ranks.",
        )
    if unfrozen_layers > ranks:
        request = f"An unfreezing depth of {unfrozen_layers} was asked for."
        raise ScheduleError(request, f"The ring has {ranks} layers, one a rank.", "Unfreeze 1 to all of them.")
    turns = [rank for rank in range(initiators) for _ in range(micro_batches)]
    mini_batches = [Iteration(rank, ranks - unfrozen_layers, 1) for rank in turns]
    return ring_round(
        equal_pipeline(ranks), mini_batches, lambda rank, op: SECONDS.get(op.kind, 0.0), in_flight=len(mini_batches)
    )


SCHEDULES = {"ring": Published("RingAda: adapters on a ring, the upper layers unfrozen (sections III and IV)", _ring)}
