"""P-RGE: 2q forwards, scalars between ranks, no context."""

from __future__ import annotations

import pytest
from schedule_plans import timed

from tests.plans import query_plan
from workbench.core.errors import ScheduleError
from workbench.core.schedule import SEND, Schedule
from workbench.methods.p_rge.schedule import query_groups, query_step
from workbench.schedules import check, insert_transfers


def one_by_one(*queries: int) -> Schedule:
    """Return a step in which every part is a group.  queries: of each rank."""
    shared = query_plan((1, dict(enumerate(queries))))
    return query_step(shared.stages, [(part,) for part in range(2 * sum(queries))])


@pytest.mark.parametrize("num_queries", [1, 4])
def test_one_device_runs_2q_forwards_and_a_step(num_queries: int) -> None:
    """In 2 q f + step seconds, without communication or context."""
    schedule = check(one_by_one(num_queries))
    assert [op.kind for op in schedule.ops[0]] == ["F"] * (2 * num_queries) + ["STEP"]
    assert timed(schedule, F=1.0, STEP=0.5).makespan_s == 2 * num_queries + 0.5
    assert insert_transfers(schedule) == schedule
    assert not any(value.name == "ctx" for op in schedule.ops[0] for value in op.writes)


def test_queries_divided_among_devices() -> None:
    """The slowest device's forwards, and only scalars travel; each ends with the same 2q losses."""
    schedule = check(insert_transfers(one_by_one(3, 1, 0)))
    timeline = timed(schedule, {"loss": 4}, F=1.0, STEP=0.5)
    assert timeline.makespan_s == 6.5
    assert {op.reads[0].name for ops in schedule.ops for op in ops if op.kind == SEND} == {"loss"}
    assert [timeline.bytes_sent(rank) for rank in range(3)] == [2 * 6 * 4, 2 * 2 * 4, 0]
    for ops in schedule.ops:
        assert [value.part for value in ops[-1].reads if value.name == "loss"] == list(range(8))


def test_no_query() -> None:
    """Nothing to estimate a gradient from."""
    with pytest.raises(ScheduleError, match="at least one query"):
        one_by_one(0)


def test_parts_that_share_a_pass() -> None:
    """As many losses travel as one by one, in fewer messages."""
    groups = (*query_groups(0, 3, 2), *query_groups(3, 2, 2))
    assert groups == ((0, 1, 2, 3), (4, 5), (6, 7, 8, 9))
    schedule = check(insert_transfers(query_step(query_plan((6, {0: 3, 1: 2})).stages, groups)))
    assert [[op.label for op in ops if op.kind == "F"] for ops in schedule.ops] == [["F0.0", "F0.4"], ["F0.6"]]
    assert sum(op.kind == SEND for ops in schedule.ops for op in ops) == 3


def test_chain_of_stages() -> None:
    """Groups follow each other through the stages; every device gets all losses and makes the step, activations go one
    way only."""
    plan = query_plan((2, {2: 4}), (3, {0: 4}), (1, {1: 4}))
    schedule = check(insert_transfers(query_step(plan.stages, query_groups(0, 4, 1))))
    timeline = timed(schedule, F=1.0, STEP=0.5)
    assert timeline.makespan_s == 3 + (4 - 1) * 1.0 + 0.5  # filled once, never emptied for a backward pass
    sent = [(op.ranks, op.reads[0].name) for ops in schedule.ops for op in ops if op.kind == SEND]
    assert set(sent) == {((2, 0), "act"), ((0, 1), "act"), ((1, 0), "loss"), ((1, 2), "loss")}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, 1), (2, 3)], "hold every part once"),
        ([(0, 1, 2, 3), (4, 5), (4, 5)], "hold every part once"),
        ([(0, 1), (2, 3, 4, 5)], "Cut the"),
    ],
)
def test_groups_that_do_not_fit(groups: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        query_step(query_plan((6, {0: 2, 1: 1})).stages, groups)
