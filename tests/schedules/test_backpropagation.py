"""Fine-tuning through the backbone in groups of devices, with parameters of which several stages hold copies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import assert_golden, equal_plan, labels, peaks, plan_of, timed

from workbench.core.schedule import RECV, SEND, Schedule
from workbench.schedules import backpropagation, check, insert_transfers, one_f_one_b

SCHEDULES = {
    "backpropagation_2_1": lambda: insert_transfers(backpropagation(plan_of((3, 1), (4,)), (4, 4, 2))),
    "backpropagation_data_parallel": lambda: insert_transfers(backpropagation(plan_of((3, 2, 1)), (6,))),
    "backpropagation_shared_words": lambda: insert_transfers(
        backpropagation(plan_of((1,), (1,), (1, 1)), (2, 2), shared=((0, 2),))
    ),
    "backpropagation_shared_tables": lambda: insert_transfers(
        backpropagation(equal_plan(3), (1, 1), shared=((0, 1), (1, 2), (0, 1, 2)))
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedule(name: str) -> None:
    """The builder still makes the schedule that was read and found right."""
    assert_golden(name, SCHEDULES[name]())


def test_without_shared_parameters_it_is_1f1b() -> None:
    """The paradigms differ in their plans, not in their schedule."""
    plan = plan_of((3, 1), (2, 2))
    assert backpropagation(plan, (4, 4)) == one_f_one_b(plan, (4, 4))
    assert peaks(insert_transfers(backpropagation(equal_plan(3), (1,) * 6)), "ctx", F=1.0, B=2.0) == (3, 2, 1)


def test_every_copy_gets_the_other_stages_gradients() -> None:
    """Stage 2's second rank has its own group's sum; it gets stage 0's from that group's first rank, and hands on
    nothing."""
    schedule = check(insert_transfers(backpropagation(plan_of((2, 2), (4,), (1, 3)), (4,), shared=((0, 2),))))

    def crossing(schedule: Schedule, rank: int, kind: str) -> list[tuple[int, ...]]:
        return [
            op.ranks for op in schedule.ops[rank] if op.kind == kind and (op.reads or op.writes)[0].name == "shared"
        ]

    assert crossing(schedule, 0, SEND) == [(0, 3), (0, 4)]
    assert crossing(schedule, 1, SEND) == [] and crossing(schedule, 1, RECV) == [(3, 1)]
    assert crossing(schedule, 4, SEND) == [] and crossing(schedule, 4, RECV) == [(0, 4)]
    assert "1SHARE.0" not in labels(schedule, 2)
    free = timed(schedule, F=1.0, B=2.0).makespan_s
    assert timed(schedule, F=1.0, B=2.0, SEND=lambda rank, op: 0.5 * (op.reads[0].name == "shared")).makespan_s > free


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_with_any_shared_parameters_can_run(data: st.DataObject) -> None:
    """The dry run finds no deadlock, whoever shares what."""
    groups = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any), min_size=1, max_size=4)
    )
    stages = st.lists(st.sampled_from(range(len(groups))), min_size=2, unique=True).map(sorted)
    shared = data.draw(st.lists(stages, max_size=3)) if len(groups) > 1 else []
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    check(insert_transfers(backpropagation(plan_of(*groups), sizes, shared=shared)))
