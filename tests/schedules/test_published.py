"""Every published schedule by name: it is complete, it can run, and its sizes are checked."""

from __future__ import annotations

import pytest
from schedule_plans import timed

from workbench.core.errors import ScheduleError
from workbench.core.schedule import Schedule
from workbench.schedules import check
from workbench.schedules.published import SECONDS, build_published, published_schedules


@pytest.mark.parametrize("name", published_schedules())
@pytest.mark.parametrize("ranks", [None, 2, 8])
def test_each_is_built_checked_and_simulated(name: str, ranks: int | None) -> None:
    sizes = {} if ranks is None or "ranks" not in published_schedules()[name].sizes else {"ranks": ranks}
    schedule = check(build_published(name, sizes))
    assert Schedule.from_text(schedule.to_text()) == schedule
    assert schedule.world_size == (sizes or published_schedules()[name].sizes).get("ranks", 1)
    assert timed(schedule, **SECONDS, SEND=0.01).makespan_s > 0


def test_sizes_and_switches_reach_the_builders() -> None:
    """In tiles: N g overlapped, (N - 1) s + N g not."""
    assert timed(build_published("ring_allgather_gemm", {}), GEMM=1.0, SEND=0.5).makespan_s == 4.0
    assert timed(build_published("ring_allgather_gemm", {"overlapped": 0}), GEMM=1.0, SEND=0.5).makespan_s == 5.5


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("1f2b", {}, "Did you mean '1f1b'"),
        ("1f1b", {"rank": 3}, "Did you mean 'ranks'"),
        ("1f1b", {"ranks": 0}, "ranks is a whole number from 1 to 4096"),
        ("1f1b", {"ranks": "four"}, "ranks = 'four'"),
        ("1f1b", {"ranks": True}, "ranks = True"),
        ("1f1b", {"ranks": 4000, "micro_batches": 4000}, "At most 200,000"),
        ("hetpipe", {"ranks": 5}, "1 are left over"),
        ("hybrid_1f1b", {"ranks_per_stage": 3}, "1 are left over"),
        ("ring", {"initiators": 5}, "The ring has 4 ranks"),
        ("ring", {"unfrozen_layers": 5}, "4 layers"),
        ("ring_allgather_gemm", {"ranks": 1}, "neighbours"),
    ],
)
def test_bad_names_and_sizes_are_named(name: str, sizes: dict, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        build_published(name, sizes)
