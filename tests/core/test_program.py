"""A program's text, digest and comparison."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.costs import Spec, TableCosts, opaque
from workbench.core.errors import ScheduleError
from workbench.core.medium import Air
from workbench.core.program import Program, require_same
from workbench.core.schedule import Schedule, Value
from workbench.simulator import simulate

TEXT = """\
device {"name": "a, the first", "resident_bytes": 7, "budget_bytes": 100}
device {"name": "b", "resident_bytes": 0, "budget_bytes": 50}
rank 0
in x
0F0 (x) -> (act:0.0 ctx:0.0) = 0.1
0SEND0 0>1 (act:0.0) -> () @send = 0.30000000000000004
ALLREDUCE 0+1 (ctx:0.0) -> (g:_._.0) @collective = 2.0
out g:_._.0
rank 1
0RECV0 0>1 () -> (act:0.0) @recv
1F0 (act:0.0) -> (c) = 1e-07
ALLREDUCE 0+1 (c) -> (g:_._.1) @collective
value act:0.0 = float32[2,3]
value ctx:0.0 = bytes[40]
value g:_._.0 = bfloat16[5]
"""


def test_text_is_read_back_unchanged() -> None:
    program = Program.from_text(TEXT)
    assert program.to_text() == TEXT
    assert program.devices == ("a, the first", "b") and program.budget_bytes == (100, 50)
    assert program.costs.spec(Value("act", 0, 0)) == Spec((2, 3)) and Spec((2, 3)).nbytes == 24
    assert program.costs.spec(Value("ctx", 0, 0)) == opaque(40) and program.costs.spec(Value("x")).nbytes == 0
    assert program.seconds(0, 1) == 0.30000000000000004 and program.costs.resident_bytes(0) == 7


def test_shared_air_is_part_of_the_text() -> None:
    line = 'air {"bytes_per_s":[4.0,0.25],"pairs":{"0>1":2.0},"jitter_s":0.5}'
    text = TEXT.replace("rank 0", f"{line}\nrank 0", 1)
    program = Program.from_text(text)
    assert program.to_text() == text and program.digest != Program.from_text(TEXT).digest
    assert program.air is not None and (program.air.transfer_s(0, 1, 6), program.air.transfer_s(1, 0, 6)) == (3, 25.5)
    with pytest.raises(ScheduleError, match="In the devices"):
        require_same(text, text.replace("4.0", "5.0"))


def test_what_is_read_back_is_simulated_alike() -> None:
    """The same spans and memory, from any costs."""
    schedule = Program.from_text(TEXT).schedule
    costs = TableCosts(
        seconds_by_kind={"F": lambda rank, op: 0.1 + rank, "SEND": 1 / 3, "ALLREDUCE": 2.0},
        bytes_by_name={"act": 3, "ctx": 5, "g": 70},
        resident_by_rank={1: 9},
    )
    program = Program(schedule=schedule, costs=costs, devices=("a", "b"))
    read = Program.from_text(program.to_text())
    assert simulate(read) == simulate(program)
    assert read.digest == program.digest != Program.from_text(TEXT).digest


def test_one_device_for_each_rank() -> None:
    with pytest.raises(ScheduleError, match="2 devices"):
        Program(schedule=Schedule(ops=((),)), costs=TableCosts(seconds_by_kind={}), devices=("a", "b"))
    with pytest.raises(ScheduleError, match="1 have a rate"):
        replace(Program.from_text(TEXT), air=Air(bytes_per_s=(1.0,)))
    with pytest.raises(ScheduleError, match="1 have a memory budget"):
        Program.from_text(TEXT.replace(', "budget_bytes": 50', ""))


def test_comments_and_indents_are_passed_over() -> None:
    """A line of nothing but a comment is no operation, so the seconds stay with theirs."""
    written = (
        TEXT.replace("rank 1\n", "# the second device\n\n  rank 1  # here\n")
        .replace("1F0 ", "  1F0 ")
        .replace('"b"', '"b #2"')
    )
    read = Program.from_text(written)
    assert read.to_text() == TEXT.replace('"b"', '"b #2"')


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("device []", 3),
        ("device {", 3),
        ('device {"name": "c"}', 3),
        ('air {"bytes_per_s": [-1, 2]}', 3),
        ('air {"rates": [1, 2]}', 3),
        ("value act:0.0 = float33[2]", 3),
        ("value act:0.0.0.0.0 = float32[2]", 3),
        ("0F0 (x) -> (y) = soon", 5),
        ("0F0 (x) -> = 0.1", 5),
    ],
)
def test_malformed_text_names_its_line(line: str, number: int) -> None:
    lines = TEXT.splitlines()
    lines[number - 1] = line
    with pytest.raises(ScheduleError, match=f"Line {number} of the"):
        Program.from_text("\n".join(lines))


def test_a_difference_names_rank_operation_and_both_sides() -> None:
    program = Program.from_text(TEXT)
    require_same(TEXT, program.to_text())
    for old, new, place in (
        ("1e-07", "2e-07", "rank 1, operation 1"),
        ("0SEND0 0>1", "0SEND1 0>1", "rank 0, operation 1"),
        ("out g:_._.0", "out act:0.0", "rank 0, operation 3"),
        ("float32[2,3]", "float32[2,4]", "In the values"),
        ('"b"', '"c"', "In the devices"),
    ):
        with pytest.raises(ScheduleError, match=place) as caught:
            require_same(TEXT, TEXT.replace(old, new), ranks=(0, 3))
        assert old in str(caught.value) and new in str(caught.value) and "rank 3 has" in str(caught.value)
    ops = (program.schedule.ops[0], program.schedule.ops[1][:-1])
    shorter = replace(program, schedule=replace(program.schedule, ops=ops))
    with pytest.raises(ScheduleError, match="rank 1, operation 2"):
        require_same(TEXT, shorter.to_text())
