"""PAC+'s first epoch: what each operation reads and writes, with equal and unequal groups."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import labels, peaks, plan_of, timed

from workbench.core.schedule import SEND, Op, Schedule
from workbench.schedules import check, hybrid_1f1b, insert_transfers
from workbench.schedules.pieces import boundary_pieces

SECONDS = {"F": 2.0, "SF": 1.0, "SB": 2.0}


@pytest.mark.parametrize(("num_stages", "m"), [(1, 3), (2, 2), (4, 4), (4, 10)])
def test_makespan_of_equal_stages(num_stages: int, m: int) -> None:
    """With free links (m + p - 1)(F + SF + SB): the backbone has no backward."""
    # F hands its activations on before SF begins, so a warm-up of p - 1 stages costs F each, and the side network's
    # forward only once.
    schedule = insert_transfers(hybrid_1f1b(plan_of(*[(1,)] * num_stages), (1,) * m))
    reference = timed(schedule, **SECONDS).makespan_s
    assert m * 5.0 + (num_stages - 1) * (2.0 + 2.0) <= reference <= (m + num_stages - 1) * 5.0
    assert timed(schedule, F=0.0, SF=1.0, SB=2.0).makespan_s == (m + num_stages - 1) * 3.0


def test_a_group_of_unequal_devices() -> None:
    """[2-1]: rank 1 is three times slower and has a third of the samples, so the stage takes as long as one equal
    device."""

    def forward(rank: int, op: Op) -> float:
        return {0: 3 / 3, 1: 1 / 1, 2: 1.0}[rank]

    schedule = insert_transfers(hybrid_1f1b(plan_of((3, 1), (4,)), (4,) * 4))
    timeline = timed(schedule, F=forward, SB=2.0, ALLREDUCE=0.25, STEP=0.5)
    # (m + p - 1)(f + b), then the first stage's all-reduce and step.
    assert timeline.makespan_s == 5 * 3.0 + 0.25 + 0.5
    # A straggler in the group sets the pace of the whole pipeline.
    slow = timed(schedule, F=lambda rank, op: 2.0 if rank == 1 else 1.0, SB=2.0, ALLREDUCE=0.25, STEP=0.5)
    assert slow.makespan_s > timeline.makespan_s


def test_contexts_and_taps_follow_1f1b() -> None:
    """At most min(p - stage, m) contexts, and as many taps, because SB still needs them."""
    schedule = insert_transfers(hybrid_1f1b(plan_of((1,), (1,), (1,)), (1,) * 6))
    assert peaks(schedule, "ctx", **SECONDS) == (3, 2, 1)
    assert peaks(schedule, "tap", **SECONDS) == (3, 2, 1)


def test_a_rank_without_samples_joins_only_the_all_reduce() -> None:
    """A last micro-batch of one sample leaves rank 1 out; a mini-batch of one sample leaves it nothing but the sum."""
    schedule = check(insert_transfers(hybrid_1f1b(plan_of((3, 1), (4,)), (4, 1))))
    assert [op.microbatch for op in schedule.ops[1] if op.kind == "F"] == [0]
    schedule = check(insert_transfers(hybrid_1f1b(plan_of((3, 1), (4,)), (1,))))
    assert labels(schedule, 1) == ["0ALLREDUCE", "0STEP"]


def test_idle_devices_have_empty_rows() -> None:
    """A plan may leave devices of the cluster out."""
    schedule = check(insert_transfers(hybrid_1f1b(plan_of((2,), (2,), first_rank=1), (2,), world_size=4)))
    assert [len(ops) > 0 for ops in schedule.ops] == [False, True, True, False]


groups = st.lists(
    st.lists(st.integers(0, 4), min_size=1, max_size=3).filter(lambda shares: sum(shares) > 0), min_size=1, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(groups, st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_every_plan_makes_a_schedule_that_runs(shape: list[list[int]], sizes: list[int]) -> None:
    """It passes the check, reads back from text unchanged, simulates, and crosses each boundary in exactly its
    pieces."""
    plan = plan_of(*shape)
    schedule = check(insert_transfers(hybrid_1f1b(plan, sizes)))
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert insert_transfers(schedule) == schedule
    timeline = timed(schedule, SEND=0.1, ALLREDUCE=0.2, **SECONDS)
    assert len(timeline.spans) == sum(map(len, schedule.ops))
    for name, kind in (("act", "F"), ("side", "SF")):
        sent = [op.ranks for ops in schedule.ops for op in ops if op.kind == SEND and op.reads[0].name == name]
        pieces = [
            (piece.source, piece.destination)
            for size in sizes
            for a, b in zip(plan.stages, plan.stages[1:], strict=False)
            for piece in boundary_pieces(a, b, size)
        ]
        assert sorted(sent) == sorted(pieces)
        for number, stage in enumerate(plan.stages):
            ran = sum(op.kind == kind for rank in stage.ranks for op in schedule.ops[rank])
            assert ran == sum(end > first for size in sizes for first, end in plan.stages[number].split(size))
