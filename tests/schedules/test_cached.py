"""Cached epochs: the step's closed form, redistribution that keeps every link busy, adapters everywhere."""

from __future__ import annotations

import pytest
from schedule_plans import labels, plan_of, timed

from workbench.core.errors import ScheduleError
from workbench.core.schedule import BROADCAST, SEND, Op, Value
from workbench.schedules import adapter_broadcast, cached_step, check, redistribution


def test_step_lasts_as_long_as_its_slowest_device() -> None:
    """max over ranks of n_r (load + forward + backward) / speed_r, then all-reduce and step."""
    sizes, speeds = (8, 4, 0, 2), (2.0, 1.0, 1.0, 0.25)
    schedule = check(cached_step(plan_of(sizes).stages[0], sizes))

    def seconds(per_sample: float):
        return lambda rank, op: per_sample * sizes[rank] / speeds[rank]

    timeline = timed(schedule, LOAD=seconds(0.25), SF=seconds(0.5), SB=seconds(1.0), ALLREDUCE=0.125, STEP=0.25)
    assert timeline.makespan_s == max(1.75 * n / speed for n, speed in zip(sizes, speeds, strict=True)) + 0.375


def test_epoch_is_its_steps_in_a_row() -> None:
    """Every rank is in the all-reduce, so steps do not overlap and n of them last n times as long."""
    stage = plan_of((2, 2)).stages[0]
    step_s = timed(cached_step(stage, (2, 2)), LOAD=0.5, SF=1.0, SB=2.0, ALLREDUCE=0.25, STEP=0.25).makespan_s
    last_s = timed(cached_step(stage, (1, 0)), LOAD=0.25, SF=0.5, SB=1.0, ALLREDUCE=0.25, STEP=0.25).makespan_s
    assert 3 * step_s + last_s == 3 * 4.0 + 2.25


def test_one_device_needs_no_all_reduce() -> None:
    """And a device without samples takes part in nothing else."""
    assert labels(cached_step(plan_of((4,)).stages[0], (4,)), 0) == ["0LOAD0", "0SF0", "0SB0", "0STEP"]
    assert labels(cached_step(plan_of((4, 4)).stages[0], (4, 0), world_size=3), 1) == ["0ALLREDUCE", "0STEP"]


@pytest.mark.parametrize("sizes", [(1,), (0, 0), (2, -1)])
def test_impossible_batches_are_refused(sizes: tuple[int, ...]) -> None:
    """Each rank of the stage has a size, and there is a sample."""
    with pytest.raises(ScheduleError, match="0 or more samples"):
        cached_step(plan_of((1, 1)).stages[0], sizes)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("each", [1, 3])
def test_all_to_all_keeps_every_link_busy(world_size: int, each: int) -> None:
    """n - 1 times `each` items leave every rank: that many sends long, nobody waits."""
    transfers, index = [], 0
    for source in range(world_size):
        for destination in range(world_size):
            for _ in range(each):
                transfers.append((source, destination, index))
                index += 1
    schedule = check(redistribution(transfers, world_size))
    timeline = timed(schedule, {"cache": 10}, SEND=1.0)
    assert timeline.makespan_s == each * (world_size - 1)
    assert timeline.bytes_sent(0) == 10 * each * (world_size - 1)


def test_one_source_is_bound_by_its_own_link() -> None:
    """Everything from rank 0 takes as many sends as there are items, and reaches who asked for it."""
    schedule = check(redistribution([(0, 1 + i % 3, i) for i in range(7)], 4))
    assert timed(schedule, SEND=1.0).makespan_s == 7.0
    assert set(schedule.outputs[2]) == {Value("cache", -1, 1), Value("cache", -1, 4)}
    assert check(redistribution([], 3)).ops == ((), (), ())
    assert check(redistribution([(1, 1, 0)], 2)).ops == ((), ())


def test_ranks_outside_of_the_world_are_refused() -> None:
    """Too large and negative ones."""
    for transfer in ((0, 2, 0), (2, 0, 0), (-1, 0, 0)):
        with pytest.raises(ScheduleError, match="is to take part"):
            redistribution([transfer], 2)
    with pytest.raises(ScheduleError, match="Rank 1 is to take part"):
        cached_step(plan_of((1, 1)).stages[0], (1, 1), world_size=1)
    with pytest.raises(ScheduleError, match="is written twice on rank 1"):
        check(redistribution([(0, 1, 0), (2, 1, 0)], 3))


def test_every_rank_gets_every_stage() -> None:
    """From the first rank of each group, to those outside of it."""
    schedule = check(adapter_broadcast(plan_of((2, 1), (3,)).stages, range(5)))
    for rank in range(5):
        assert schedule.outputs[rank] == (Value("adapter", 0, -1, rank), Value("adapter", 1, -1, rank))
    assert [op.ranks for op in schedule.ops[3]] == [(0, 2, 3, 4), (2, 0, 1, 3, 4)]
    assert check(adapter_broadcast(plan_of((2, 1)).stages, range(2))).ops == ((), ())


def test_broadcast_bytes_leave_the_root() -> None:
    """The root sends a copy to each of the others."""
    timeline = timed(adapter_broadcast(plan_of((1,), (1,), (1,)).stages[:1], range(3)), {"adapter": 100}, BROADCAST=1.0)
    assert [timeline.bytes_sent(rank) for rank in range(3)] == [200, 0, 0]
    assert all(span.op.kind == BROADCAST and isinstance(span.op, Op) and span.op.kind != SEND for span in timeline.spans)
