"""Confidant's asynchronous 1F1B: versions, stashed copies, steady state."""

from __future__ import annotations

from typing import get_args

import pytest
from schedule_plans import equal_plan, peaks, plan_of, timed

from workbench.core.errors import ScheduleError
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.schedules import asynchronous_1f1b, check, insert_transfers


@pytest.mark.parametrize(("num_stages", "num_batches"), [(1, 3), (3, 8), (4, 12)])
def test_steady_state_is_one_batch_per_forward_and_backward(num_stages: int, num_batches: int) -> None:
    """(n + p - 1)(f + b): every batch is an optimizer step, yet nobody waits for a flush."""
    schedule = check(insert_transfers(asynchronous_1f1b(equal_plan(num_stages), num_batches)))
    assert timed(schedule, F=1.0, B=2.0).makespan_s == (num_batches + num_stages - 1) * 3.0
    steps = [op for op in schedule.ops[0] if op.kind == "STEP"]
    assert len(steps) == num_batches
    # After the warm-up the last stage is never idle.
    last = [
        span
        for span in timed(schedule, F=1.0, B=2.0).spans
        if span.rank == num_stages - 1 and span.op.kind in ("F", "B")
    ]
    assert sum(span.end_s - span.start_s for span in last) == last[-1].end_s - last[0].start_s


def test_the_slowest_stage_sets_the_pace() -> None:
    """With unequal stages, one more batch costs the slowest stage's forward and backward."""

    def speed(rank, op):
        return {0: 1.0, 1: 2.5, 2: 1.0}[rank] * (1.0 if op.kind == "F" else 2.0)

    spans = [
        timed(insert_transfers(asynchronous_1f1b(equal_plan(3), n)), F=speed, B=speed).makespan_s for n in (10, 11, 12)
    ]
    assert spans[2] - spans[1] == spans[1] - spans[0] == 7.5


@pytest.mark.parametrize(("num_stages", "num_batches"), [(1, 4), (3, 9), (5, 12)])
def test_stashed_versions_follow_from_liveness(num_stages: int, num_batches: int) -> None:
    """N - i - 1 extra versions on stage i of N (the paper's M_pipe), as many contexts in flight."""
    schedule = insert_transfers(asynchronous_1f1b(equal_plan(num_stages), num_batches))
    expected = tuple(num_stages - stage for stage in range(num_stages))
    assert peaks(schedule, "weight", F=1.0, B=2.0) == expected
    assert peaks(schedule, "weight", F=1.0, B=2.0, STEP=0.5) == expected
    assert peaks(schedule, "ctx", F=1.0, B=2.0) == expected


def test_groups_are_refused() -> None:
    """Confidant has one device per stage."""
    with pytest.raises(ScheduleError, match="2 ranks"):
        asynchronous_1f1b(plan_of((1, 1)), 2)


@pytest.mark.parametrize("versions", get_args(VersionRule))
def test_every_rule_keeps_as_many_versions_as_its_delay(versions: VersionRule) -> None:
    """By the lifetimes of the weights, in a window that begins and ends in the middle of the training."""
    num_stages = 4
    schedule = check(
        insert_transfers(asynchronous_1f1b(equal_plan(num_stages), 32, num_begun=3, ahead=3, versions=versions))
    )
    for rank, ops in enumerate(schedule.ops):
        last_read = {value: index for index, op in enumerate(ops) for value in op.reads if value.name == "weight"}
        last_read |= {value: len(ops) for value in schedule.outputs[rank] if value.name == "weight"}
        present, most = {value for value in schedule.inputs[rank] if value.name == "weight"}, 0
        for index, op in enumerate(ops):
            present = {value for value in present if last_read[value] > index} | {
                value for value in op.writes if value.name == "weight"
            }
            most = max(most, len(present))
        assert most - 1 == delay_of(versions, num_stages - 1 - rank, num_stages)
