"""How far to trust an emulation: late time against deviation, the drawn programs, and what ships."""

from __future__ import annotations

from workbench.schedules import check
from workbench.simulator import simulate
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.trust import (
    COLUMNS,
    DILATIONS,
    MESSAGE_BYTES,
    OTHERS,
    compared,
    computing_beside,
    drawn_programs,
)
from workbench_studies.papers.result import shipped_result


def point(ratio: float, late: float, dilation: float = 1.0, others: int = 0) -> dict[str, object]:
    return {
        "program": "GPipe, 7",
        "devices": 4,
        "others": others,
        "dilation": dilation,
        "simulated_ms": 100.0,
        "measured_ms": 100.0 * ratio,
        "ratio": ratio,
        "late": late,
    }


def test_a_late_run_is_judged_apart_and_one_in_pace_that_is_off_breaks_the_claim():
    item = find_item(COMPARE, "trust")
    good = [point(1.01, 0.01, 16.0), point(1.02, 0.02, 4.0), point(1.5, 0.3, 4.0, 2), point(1.8, 0.4, 4.0, 2)]
    assert [check.holds for check in compared(item, good).checks] == [True, True]
    result = compared(item, [*good, point(1.2, 0.03, 16.0)])
    assert [check.holds for check in result.checks] == [False, True]
    assert [row[:3] for row in result.tables[1].rows][3:] == [
        ("100 to 200 ms", 3.0, 2.0),
        ("200 ms and more", 0.0, 0.0),
    ]
    marks = [(0.0, "valid", 2.0, 1.0), (0.0, "invalid", 0.0, 0.0), (2.0, "valid", 0.0, 0.0), (2.0, "invalid", 0.0, 2.0)]
    assert [*result.tables[2].rows] == marks
    conditions = [row[:5] for row in result.tables[0].rows]
    assert conditions == [(0.0, 4.0, 1.0, 1.0, 1.0), (0.0, 16.0, 2.0, 2.0, 1.0), (2.0, 4.0, 2.0, 0.0, 0.0)]


def test_drawn_programs_can_run_and_are_the_same_for_the_same_numbers():
    programs = drawn_programs(3, range(20))
    assert len({name.split(",")[0] for name in programs}) >= 5
    for case in programs.values():
        check(case.program.schedule)
        sent = [span.nbytes for span in simulate(case.program, memory=False).spans if span.op.kind == "SEND"]
        assert all(MESSAGE_BYTES[0] - 4 <= nbytes <= MESSAGE_BYTES[1] for nbytes in sent)
    [again] = drawn_programs(3, [7]).values()
    assert again.program.digest == list(programs.values())[7].program.digest


def test_processes_beside_an_emulation_end_with_it():
    with computing_beside(2) as processes:
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


def test_the_shipped_points_are_drawn_by_what_the_host_did():
    result = shipped_result(COMPARE, "trust")
    [drawn] = find_item(COMPARE, "trust").draw(result)
    assert len(drawn.figure.data) == len(OTHERS)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in result.tables[-1].rows]
    assert {row["dilation"] for row in rows} == set(DILATIONS) and result.environment["cores"]
    assert len(rows) >= 1000
    assert all(row["measured, ms"] > 0 and row["late share"] >= 0 for row in rows)
