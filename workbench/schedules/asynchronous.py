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
from workbench.core.schedule import Schedule
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules.hetpipe import mini_batches
from workbench.schedules.pieces import world_size_of


def asynchronous_1f1b(plan: Plan, num_batches: int, *, world_size: int | None = None) -> Schedule:
    """Return `num_batches` optimizer steps, without their transfers: HetPipe with one virtual worker.

    Raises ScheduleError if a stage has several ranks.
    """
    for stage in plan.stages:
        if len(stage.shares) != 1:
            raise ScheduleError("Asynchronous 1F1B was asked for.", f"A stage has {len(stage.shares)} ranks.", "Give each stage one.")
    size = world_size_of(plan, world_size, (1,) * num_batches)
    return mini_batches(VirtualWorkers(pipelines=(plan,), in_flight=len(plan.stages)), num_batches, world_size=size)
