"""What waiting costs: the closed form against simulated ways, and what ships."""

from __future__ import annotations

import pytest

from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.boards import NEVER_DRAINED
from workbench_studies.papers.compare.waiting import COUNTS, idle_share, times_of, ways
from workbench_studies.papers.compare.waiting_executed import MODEL, compared
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
    executed = [trace for trace in drawn.figure.data if "emulated" in (trace.name or "")]
    assert len(drawn.figure.data) == 1 + 2 * len(COUNTS) + len(executed)
    assert "0.42" in drawn.figure.data[0].name
    rows = shipped_result(COMPARE, "waiting-executed").tables[0].records
    assert sum(len(trace.x) for trace in executed) == sum(row["in pace"] == "yes" for row in rows) > 0


def test_executed_points_are_the_fastest_ways_with_the_joules_of_their_seconds():
    result = shipped_result(COMPARE, "waiting-executed")
    shares = {(row["boards"], row["Mbit/s"]): row for row in result.tables[0].records}
    fastest = {(row["boards"], row["Mbit/s"]): row for row in shipped_result(COMPARE, "waiting").tables[0].records}
    for place, row in shares.items():
        assert row["way"] == fastest[place]["way"]
        assert row["share waiting, simulated"] == pytest.approx(fastest[place]["share of joules used waiting"])
    seconds = shares[4.0, 100.0]["s, simulated"]
    point = {
        "program": "stages",
        "measured_ms": 2e3 * seconds,
        "simulated_ms": 1e3 * seconds,
        "ratio": 2.0,
        "late": 0.0,
    }
    [row] = compared(find_item(COMPARE, "waiting-executed"), {(4, 100): point}, MODEL, 1.0).tables[0].records
    assert row["J, executed"] - row["J, simulated"] == pytest.approx(
        4 * 2.7 * seconds
    )  # four boards wait as long again
