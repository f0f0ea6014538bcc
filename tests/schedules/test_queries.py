"""P-RGE: 2q forwards, scalars between ranks, no context."""

from __future__ import annotations

import pytest
from schedule_plans import timed

from workbench.core.errors import ScheduleError
from workbench.core.plan import Share
from workbench.core.schedule import SEND
from workbench.schedules import check, insert_transfers, query_step


@pytest.mark.parametrize("num_queries", [1, 4])
def test_one_device_runs_2q_forwards_and_a_step(num_queries: int) -> None:
    """In 2 q f + step seconds, without communication or context."""
    schedule = check(query_step((Share(rank=0, queries=num_queries),)))
    assert [op.kind for op in schedule.ops[0]] == ["F"] * (2 * num_queries) + ["STEP"]
    assert timed(schedule, F=1.0, STEP=0.5).makespan_s == 2 * num_queries + 0.5
    assert insert_transfers(schedule) == schedule
    assert not any(value.name == "ctx" for op in schedule.ops[0] for value in op.writes)


def test_queries_divided_among_devices() -> None:
    """The slowest device's forwards, and only scalars travel; each ends with the same 2q losses."""
    shares = (Share(rank=0, queries=3), Share(rank=1, queries=1), Share(rank=2, queries=0))
    schedule = check(insert_transfers(query_step(shares)))
    timeline = timed(schedule, {"loss": 4}, F=1.0, STEP=0.5)
    assert timeline.makespan_s == 6.5
    assert {op.reads[0].name for ops in schedule.ops for op in ops if op.kind == SEND} == {"loss"}
    assert [timeline.bytes_sent(rank) for rank in range(3)] == [2 * 6 * 4, 2 * 2 * 4, 0]
    for ops in schedule.ops:
        assert [value.part for value in ops[-1].reads if value.name == "loss"] == list(range(8))


def test_no_query() -> None:
    """Nothing to estimate a gradient from."""
    with pytest.raises(ScheduleError, match="at least one query"):
        query_step((Share(rank=0),))
