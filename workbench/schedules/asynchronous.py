"""Confidant: asynchronous 1F1B with weight stashing (section 2.3, Fig. 2; PipeDream, Narayanan et al., 2019).

Every batch updates the weights as soon as its backward is done, and nobody waits for a flush.  F reads weight:s._.v, the newest
version v then; B of the same batch reads the same version, however many updates came between.  STEP makes version v + 1 of stage s
from the newest.  How many versions a stage stashes is stated nowhere: it follows from the values' lifetimes (N - i - 1 extra ones on
stage i of N, as in the paper's M_pipe).
Other values: act:s.m and grad:s.m (gradient with respect to stage s's input), ctx:s.m, gacc:s.m, loss:s.m, tokens:_.m.
"""

from __future__ import annotations

from workbench.core.errors import ScheduleError
from workbench.core.plan import Plan
from workbench.core.schedule import NONE, Op, Schedule, Value
from workbench.schedules.pieces import world_size_of
from workbench.schedules.pipeline import FORWARD, one_f_one_b_order


def asynchronous_1f1b(plan: Plan, num_batches: int, *, world_size: int | None = None) -> Schedule:
    """Return `num_batches` optimizer steps, without their transfers.  Raises ScheduleError if a stage has several ranks."""
    for stage in plan.stages:
        if len(stage.shares) != 1:
            raise ScheduleError("Asynchronous 1F1B was asked for.", f"A stage has {len(stage.shares)} ranks.", "Give each stage one.")
    size = world_size_of(plan, world_size, (1,) * num_batches)
    ops: list[tuple[Op, ...]] = [()] * size
    inputs: list[tuple[Value, ...]] = [()] * size
    outputs: list[tuple[Value, ...]] = [()] * size
    num_stages = len(plan.stages)
    for number, stage in enumerate(plan.stages):
        is_last = number == num_stages - 1
        version, version_of, listed = 0, {}, []
        for phase, m in one_f_one_b_order(num_stages, number, num_batches):
            if phase == FORWARD:
                version_of[m] = version
                source = (Value("act", number - 1, m),) if number else ()
                reads = (Value("tokens", NONE, m), *source, Value("weight", number, NONE, version))
                listed.append(Op("F", number, m, NONE, reads, (Value("loss" if is_last else "act", number, m), Value("ctx", number, m))))
            else:
                gradient = () if is_last else (Value("grad", number + 1, m),)
                onward = (Value("grad", number, m),) if number else ()
                reads = (Value("ctx", number, m), Value("weight", number, NONE, version_of[m]), *gradient)
                listed.append(Op("B", number, m, NONE, reads, (*onward, Value("gacc", number, m))))
                read = (Value("gacc", number, m), Value("weight", number, NONE, version))
                version += 1
                listed.append(Op("STEP", number, m, NONE, read, (Value("weight", number, NONE, version),)))
        rank = stage.ranks[0]
        ops[rank] = tuple(listed)
        inputs[rank] = (Value("weight", number, NONE, 0), *(Value("tokens", NONE, m) for m in range(num_batches)))
        losses = tuple(Value("loss", number, m) for m in range(num_batches)) if is_last else ()
        outputs[rank] = (*losses, Value("weight", number, NONE, version))
    return Schedule(ops=tuple(ops), inputs=tuple(inputs), outputs=tuple(outputs))
