"""What waiting costs: the closed form against simulated ways, and what ships."""

from __future__ import annotations

import pytest

from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.boards import NEVER_DRAINED
from workbench_studies.papers.compare.waiting import COUNTS, idle_share, times_of, ways
from workbench_studies.papers.result import shipped_result


def test_half_the_efficiency_costs_the_power_of_an_idle_board_again():
    assert times_of(1.0, 0.4) == 1.0
    assert times_of(0.5, 0.4) == pytest.approx(1.4)


def test_simulated_ways_follow_the_closed_form_and_ship_as_they_are_simulated():
    results = list(ways(lambda model: None, ("all-MiniLM-L6-v2",)))
    assert {one.boards for one in results} == set(COUNTS) and any(one.way == NEVER_DRAINED for one in results)
    for one in results:
        assert one.times == pytest.approx(times_of(one.efficiency, idle_share()), rel=0.01), one
        assert 0 <= one.waited_j < one.joules and one.times > 1
    slow, fast = (
        min((one for one in results if (one.boards, one.mbit_per_s) == (4, rate)), key=lambda one: one.seconds)
        for rate in (20, 1000)
    )
    assert slow.waited_j / slow.joules > 5 * fast.waited_j / fast.joules
    shipped = shipped_result(COMPARE, "waiting").tables[1].records
    own = [row for row in shipped if row["model"] == "all-MiniLM-L6-v2"]
    assert [row["J"] for row in own] == pytest.approx([one.joules for one in results])


def test_the_picture_has_the_closed_form_and_two_traces_for_each_number_of_boards():
    [drawn] = find_item(COMPARE, "waiting").draw(shipped_result(COMPARE, "waiting"))
    assert len(drawn.figure.data) == 1 + 2 * len(COUNTS)
    assert "0.42" in drawn.figure.data[0].name
