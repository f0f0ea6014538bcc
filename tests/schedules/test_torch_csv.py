"""torch's own pipeline schedules, read from its CSV: makespans against a longest path that is found here, from the
cells alone."""

from __future__ import annotations

import re

import pytest
from schedule_plans import equal_plan, peaks, timed
from torch_orders import of_torch, torch_csv

from workbench.core.errors import ScheduleError
from workbench.core.schedule import SEND, Op, Schedule, Value
from workbench.schedules import backpropagation, check, gpipe_order, insert_transfers
from workbench.schedules.torch_csv import read_torch_csv

SECONDS = {"F": 1.0, "B": 2.25, "I": 1.125, "W": 0.875}
MULTI = (
    of_torch.ScheduleInterleaved1F1B,
    of_torch.ScheduleInterleavedZeroBubble,
    of_torch.ScheduleLoopedBFS,
    of_torch.ScheduleZBVZeroBubble,
    of_torch.ScheduleDualPipeV,
)
OVERLAPS = (of_torch.ScheduleDualPipeV,)
"""Schedules with two operations in a cell, which torch's simulator cannot read."""
CASES = [(of_torch.ScheduleGPipe, p, 1, m) for p, m in ((1, 3), (2, 2), (3, 5), (4, 8))]
CASES += [
    (kind, p, v, m)
    for kind in MULTI
    for p, v, m in ((2, 2, 4), (2, 2, 8), (4, 2, 8), (4, 2, 16), (2, 3, 4), (4, 3, 8), (4, 1, 8))
    if v == 2 or kind in MULTI[:3]
]


def longest_path(text: str, transfer_s: float) -> float:
    """Return the makespan of the rows if every transfer between ranks takes as long and none waits for another.

    A dynamic programme over the cells, which knows nothing of values, operations or the simulator.
    """
    rows = [re.findall(r"(\d+)([FBIW])(\d+)", line) for line in text.splitlines()]
    cells = {cell: rank for rank, row in enumerate(rows) for cell in row}
    last = max(int(stage) for stage, _, _ in cells)
    ends: dict[tuple[str, str, str], float] = {}
    at = [0] * len(rows)
    free = [0.0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                stage, kind, m = row[at[rank]]
                number = int(stage)
                if kind == "W":
                    needs = [(stage, "I", m)]
                elif kind == "F":
                    needs = [(str(number - 1), "F", m)] if number else []
                else:
                    following = str(number + 1)
                    onward = [(following, "B" if (following, "B", m) in cells else "I", m)] if number < last else []
                    needs = [(stage, "F", m), *onward]
                if any(need not in ends for need in needs):
                    break
                arrivals = (ends[need] + transfer_s * (cells[need] != rank) for need in needs)
                free[rank] = max([free[rank], *arrivals]) + SECONDS[kind]
                ends[stage, kind, m] = free[rank]
                at[rank] += 1
                moved = True
        assert moved, "torch's rows deadlock"
    return max(free)


def repaired_1f1b(num_ranks: int, num_micro_batches: int) -> str:
    """Return Schedule1F1B's rows with the last rank's forwards numbered from 0 (torch 2.13 numbers them from 1)."""
    *rows, last = torch_csv(of_torch.Schedule1F1B, num_ranks, 1, num_micro_batches).splitlines()
    first = min(map(int, re.findall(r"\dF(\d+)", last)))
    renumbered = re.sub(r"(\d)F(\d+)", lambda match: f"{match[1]}F{int(match[2]) - first}", last)
    return "\n".join([*rows, renumbered])


@pytest.mark.parametrize(("kind", "p", "v", "m"), CASES)
def test_makespan_is_the_longest_path(kind: type, p: int, v: int, m: int) -> None:
    text = torch_csv(kind, p, v, m)
    schedule = check(read_torch_csv(text))
    assert timed(schedule, **SECONDS).makespan_s == pytest.approx(longest_path(text, 0.0))


def test_makespan_with_transfers_is_the_longest_path_where_none_queues() -> None:
    """Where two transfers meet at an interface, one waits: then the simulation takes longer, by no more than those
    waits."""
    num_exact = 0
    for kind, p, v, m in CASES:
        text = torch_csv(kind, p, v, m)
        timeline = timed(read_torch_csv(text), **SECONDS, SEND=0.03)
        written = {(span.rank, value): span.end_s for span in timeline.spans for value in span.op.writes}
        queued_s = sum(
            span.start_s - written[span.rank, span.op.reads[0]] for span in timeline.spans if span.op.kind == SEND
        )
        bound = longest_path(text, 0.03)
        assert bound - 1e-9 <= timeline.makespan_s <= bound + queued_s + 1e-9
        num_exact += queued_s < 1e-9
    assert num_exact >= 10


@pytest.mark.parametrize(("kind", "p", "v", "m"), [case for case in CASES if case[0] not in OVERLAPS])
def test_everything_comes_at_the_step_of_torchs_own_simulator(kind: type, p: int, v: int, m: int) -> None:
    """In torch's simulator everything takes one step of its rank, a transfer one of both sides, in the same step or
    the receiver's later.  Here these are operations of a second, and what follows a transfer is free.
    """
    rows = [re.findall(r"\d+[FBIW]\d+", line) for line in torch_csv(kind, p, v, m).splitlines()]
    actions = {rank: [of_torch._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    rank_of = {action.stage_index: rank for rank, row in actions.items() for action in row}
    both = of_torch._add_send_recv(actions, rank_of.__getitem__, len(rank_of))
    steps = of_torch._simulate_comms_compute(both, rank_of.__getitem__, len(rank_of))

    before = {}  # what a sender has done when a transfer begins
    for row in both.values():
        before |= {str(action): str(row[place - 1]) for place, action in enumerate(row)}
    ops = []
    for row in both.values():
        of_rank = []
        for action in map(str, row):
            number, recv, sent = re.fullmatch(r"(\d+)(RECV_[FB])?(.+)", action).groups()
            peer = int(number) + (1 if recv == "RECV_B" else -1)
            reads = (Value(before[f"{peer}{recv.replace('RECV', 'SEND')}{sent}"]),) if recv else ()
            of_rank.append(Op("F", reads=reads, writes=(Value(action),)))
        ops.append(tuple(of_rank))
    timeline = timed(insert_transfers(Schedule(ops=tuple(ops))), F=1.0)
    ours = {span.op.writes[0].name: span.start_s for span in timeline.spans if span.op.kind == "F"}
    theirs = {str(action): step for row in steps.values() for step, action in enumerate(row) if action is not None}
    assert ours == theirs and len(ours) >= sum(map(len, rows))


@pytest.mark.parametrize(("kind", "p", "v", "m"), [case for case in CASES if case[0] in MULTI])
def test_the_lowered_form_is_the_same_schedule(kind: type, p: int, v: int, m: int) -> None:
    assert read_torch_csv(torch_csv(kind, p, v, m, lowered=True)) == read_torch_csv(torch_csv(kind, p, v, m))


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (3, 7), (4, 8), (8, 16)])
def test_1f1b_and_gpipe_are_our_own_builders(p: int, m: int) -> None:
    """Written by torch, built by us: equal, operation by operation and value by value; (p + m - 1) (F + B) long."""
    assert read_torch_csv(torch_csv(of_torch.ScheduleGPipe, p, 1, m)) == insert_transfers(
        backpropagation(equal_plan(p), (1,) * m, order=gpipe_order)
    )
    schedule = read_torch_csv(repaired_1f1b(p, m))
    assert schedule == insert_transfers(backpropagation(equal_plan(p), (1,) * m))
    assert timed(schedule, F=1.0, B=2.0).makespan_s == 3 * (p + m - 1)
    assert peaks(schedule, "ctx", F=1.0, B=2.0) == tuple(min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_known_closed_forms(p: int, m: int) -> None:
    """Two stages a rank: interleaved 1F1B has 1/2 of 1F1B's bubble (Narayanan et al., 2021), ZBV only its first p - 1
    forwards."""
    interleaved = read_torch_csv(torch_csv(of_torch.ScheduleInterleaved1F1B, p, 2, m))
    assert timed(interleaved, F=1.0, B=2.0).makespan_s == 2 * m * 3 + (p - 1) * 3
    zbv = read_torch_csv(torch_csv(of_torch.ScheduleZBVZeroBubble, p, 2, m))
    assert timed(zbv, F=1.0, I=1.0, W=1.0).makespan_s == 2 * m * 3 + (p - 1)
    assert max(peaks(zbv, "ctx", F=1.0, I=1.0, W=1.0)) <= 2 * p


def test_a_v_placement_sends_nothing_at_its_turn() -> None:
    """Stages 1 and 2 of a V on two ranks are on rank 1; interleaved, every boundary is crossed."""
    boundaries = []
    for kind in (of_torch.ScheduleZBVZeroBubble, of_torch.ScheduleInterleavedZeroBubble):
        ops = (op for ops in read_torch_csv(torch_csv(kind, 2, 2, 4)).ops for op in ops)
        boundaries.append({op.stage for op in ops if op.kind == SEND and op.reads[0].name == "act"})
    assert boundaries == [{0, 2}, {0, 1, 2}]


def test_forwards_alone_keep_no_context() -> None:
    schedule = check(read_torch_csv("0F0,0F1\n,1F0,1F1\n"))
    assert timed(schedule, F=1.0, SEND=0.5).makespan_s == 3.5
    assert peaks(schedule, "ctx") == (0, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0,0X1", "The cell '0X1' was read in row 1, column 2. It is malformed."),
        ("0F0,(0F1;0Q0)OVERLAP_F_B", "'0Q0' was read in row 1, column 2"),
        ("0F0,F1", "'F1' was read in row 1, column 2"),
        ("0F0,0F9999999999", "row 1, column 2"),
        ("0F0,,0F0", "'0F0' was read in row 1, column 3. It is also in row 1, column 1."),
        ("0F0,1F0\n0F1", "'0F1' was read in row 2, column 1. Stage 0 is in row 1 too."),
        ("1F0", "'1F0' was read in row 1, column 1. 0F0 is in no row."),
        ("0F0,,0B0\n1F0", "'0B0' was read in row 1, column 3. 1B0 or 1I0 is in no row."),
        ("0F0,0F1,0B0", "'0F1' was read in row 1, column 2. 0B1 or 0I1 is in no row."),
        ("0F0,0B0,0B1", "'0B1' was read in row 1, column 3. 0F1 is in no row."),
        ("0F0,0I0", "'0I0' was read in row 1, column 2. 0W0 is in no row."),
        ("0F0,0B0,0W0", "'0W0' was read in row 1, column 3. 0I0 is in no row."),
        ("0F0,0B0,0I0,0W0", "0I0 computes the same gradient"),
        (" \n", "It has no operation."),
        ("0F0," + '"' + "0" * 200_000, "It is not CSV"),
    ],
)
def test_bad_rows_name_row_and_column(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        read_torch_csv(text)


@pytest.mark.parametrize(
    ("text", "said"), [("0B0,0F0", "cycle within one rank"), ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", "deadlocks")]
)
def test_an_order_that_cannot_run_is_named_by_the_check(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        check(read_torch_csv(text))


def test_torchs_own_slip_is_found() -> None:
    """Schedule1F1B of torch 2.13 numbers the last rank's forwards from 1; a torch that mends it is read."""
    text = torch_csv(of_torch.Schedule1F1B, 3, 1, 4)
    if "2F0" in text:
        assert read_torch_csv(text) == read_torch_csv(repaired_1f1b(3, 4))
    else:
        with pytest.raises(ScheduleError, match=r"2F0|1F4"):
            read_torch_csv(text)
