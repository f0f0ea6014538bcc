"""How far to trust an emulation: late time against deviation, and what ships."""

from __future__ import annotations

from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.trust import COLUMNS, DILATIONS, compared
from workbench_studies.papers.result import shipped_result


def point(ratio: float, late: float, dilation: float = 1.0) -> dict[str, object]:
    return {
        "program": "GPipe",
        "devices": 4,
        "dilation": dilation,
        "simulated_ms": 100.0,
        "measured_ms": 100.0 * ratio,
        "ratio": ratio,
        "late": late,
    }


def test_a_late_run_is_judged_apart_and_one_in_pace_that_is_off_breaks_the_claim():
    item = find_item(COMPARE, "trust")
    good = [point(1.01, 0.01, 16.0), point(1.02, 0.02, 4.0), point(1.5, 0.3), point(1.8, 0.4)]
    holds = [check.holds for check in compared(item, good, 3).checks]
    assert holds == [True, True]
    result = compared(item, [*good, point(1.2, 0.03, 16.0)], 3)
    assert [check.holds for check in result.checks] == [False, True]
    assert [row[0] for row in result.tables[0].rows] == [1.0, 4.0, 16.0]


def test_the_shipped_points_are_drawn_by_dilation_and_their_host_is_named():
    result = shipped_result(COMPARE, "trust")
    [drawn] = find_item(COMPARE, "trust").draw(result)
    assert len(drawn.figure.data) == len(DILATIONS) and "busy host" in drawn.figure.layout.title.text
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in result.tables[1].rows]
    assert {row["dilation"] for row in rows} == set(DILATIONS) and result.environment["cores"]
    assert all(row["measured, ms"] > 0 and row["late share"] >= 0 for row in rows)
