"""Cached epochs: the step's closed form."""

from __future__ import annotations

import pytest
from schedule_plans import labels, plan_of, timed

from workbench.core.errors import ScheduleError
from workbench.schedules import cached_step, check


def test_step_lasts_as_long_as_its_slowest_device() -> None:
    """max over ranks of n_r (load + forward + backward) / speed_r, then all-reduce and step."""
    sizes, speeds = (8, 4, 0, 2), (2.0, 1.0, 1.0, 0.25)
    schedule = check(cached_step(plan_of(sizes).stages[0], sizes))

    def seconds(per_sample: float):
        return lambda rank, op: per_sample * sizes[rank] / speeds[rank]

    timeline = timed(schedule, LOAD=seconds(0.25), SF=seconds(0.5), SB=seconds(1.0), ALLREDUCE=0.125, STEP=0.25)
    assert timeline.makespan_s == max(1.75 * n / speed for n, speed in zip(sizes, speeds, strict=True)) + 0.375


def test_one_device_needs_no_all_reduce() -> None:
    """And a device without samples takes part in nothing else."""
    assert labels(cached_step(plan_of((4,)).stages[0], (4,)), 0) == ["0LOAD0", "0SF0", "0SB0", "0STEP"]
    assert labels(cached_step(plan_of((4, 4)).stages[0], (4, 0), world_size=3), 1) == ["0ALLREDUCE", "0STEP"]


@pytest.mark.parametrize("sizes", [(1,), (0, 0), (2, -1)])
def test_impossible_batches_are_refused(sizes: tuple[int, ...]) -> None:
    """Each rank of the stage has a size, and there is a sample."""
    with pytest.raises(ScheduleError, match="0 or more samples"):
        cached_step(plan_of((1, 1)).stages[0], sizes)


def test_ranks_outside_of_the_world_are_refused() -> None:
    """The step has the cluster's ranks, whatever the stage asks for."""
    with pytest.raises(ScheduleError, match="Rank 1 is to take part"):
        cached_step(plan_of((1, 1)).stages[0], (1, 1), world_size=1)
