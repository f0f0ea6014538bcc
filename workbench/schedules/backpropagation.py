"""Fine-tuning that goes back through the backbone: full, LoRA, Adapters, as 1F1B over device groups (PAC+, section VI-A).

The operations of pipeline.one_f_one_b, whose stages may be groups of unequal devices.  Where stages hold copies of one parameter
(an encoder-decoder's word embedding, T5's position tables) there is SHARE besides: the first rank of each such stage hands the
gradient that its group has summed to every other rank that holds a copy, and their STEP adds them up.
Values: as in pipeline, and shared:s._.p, stage s's gradient of the shared parameter p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.plan import Plan
from workbench.core.schedule import NONE, STEP, Op, Schedule, Value
from workbench.schedules.pipeline import one_f_one_b

SHARE = "SHARE"


def backpropagation(
    plan: Plan, micro_batch_sizes: Sequence[int], *, shared: Sequence[Sequence[int]] = (), world_size: int | None = None
) -> Schedule:
    """Return one mini-batch without its transfers.  shared[p]: the stages, two or more, that hold copies of parameter p.

    Raises ScheduleError for a plan without stages, a rank with two shares, or an empty micro-batch.
    """
    schedule = one_f_one_b(plan, micro_batch_sizes, world_size=world_size)
    if not shared:
        return schedule
    complete = list(schedule.ops)
    for number, stage in enumerate(plan.stages):
        held = [(parameter, stages) for parameter, stages in enumerate(shared) if number in stages]
        given = [Value("shared", number, NONE, parameter) for parameter, _ in held]
        taken = tuple(Value("shared", other, NONE, parameter) for parameter, stages in held for other in stages if other != number)
        for rank in stage.ranks:
            *before, step = complete[rank]
            assert step.kind == STEP, f"{step.label} ends rank {rank}"
            shares = [Op(SHARE, number, NONE, value.part, step.reads, (value,)) for value in given] if rank == stage.ranks[0] else []
            complete[rank] = (*before, *shares, step._replace(reads=(*step.reads, *taken)))
    return replace(schedule, ops=tuple(complete))
