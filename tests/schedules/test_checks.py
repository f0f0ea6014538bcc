"""Every fault is named, the grid shows it, and the simulator says the same instead of hanging."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_plans import equal_plan, plan_of, timed

from workbench.core.errors import ScheduleError
from workbench.core.schedule import Schedule
from workbench.schedules import backpropagation, check, hybrid_1f1b, insert_transfers

FAULTS = {
    "unmatched send": (
        """
        rank 0
        0F0 () -> (act:0.0)
        0SEND0 0>1 (act:0.0) -> () @send
        rank 1
        1F0 () -> ()
        """,
        "Rank 0 was asked to run SEND of act:0.0 0>1 (operation 1). "
        "The send of act:0.0 is unmatched: rank 1 has no RECV of it from rank 0. Add the RECV.",
        ">0SEND0<",
    ),
    "unmatched receive": (
        """
        rank 0
        0F0 () -> (act:0.0)
        rank 1
        0RECV0 0>1 () -> (act:0.0) @recv
        1F0 (act:0.0) -> ()
        """,
        "Rank 1 was asked to run RECV of act:0.0 0>1 (operation 0). "
        "The receive of act:0.0 is unmatched: rank 0 has no SEND of it to rank 1. Add the SEND.",
        ">0RECV0<",
    ),
    "sent twice": (
        """
        rank 0
        0F0 () -> (act:0.0)
        0SEND0 0>1 (act:0.0) -> () @send
        0SEND0 0>1 (act:0.0) -> () @send
        rank 1
        0RECV0 0>1 () -> (act:0.0) @recv
        """,
        "The send of act:0.0 is unmatched",
        ">0SEND0<",
    ),
    "wrong order": (
        """
        rank 0
        0F0 () -> (act:0.0 act:0.1)
        0SEND0 0>1 (act:0.0) -> () @send
        0SEND1 0>1 (act:0.1) -> () @send
        rank 1
        0RECV1 0>1 () -> (act:0.1) @recv
        0RECV0 0>1 () -> (act:0.0) @recv
        """,
        "Rank 1 was asked to run RECV of act:0.1 0>1 (operation 0). "
        "Wrong order in channel 0>1: its transfer 0 is sent as act:0.0 and received as act:0.1. Use one order on "
        "both sides.",
        ">0RECV1<",
    ),
    "transfer to a rank that does not exist": (
        "rank 0\nin x\nSEND 0>1 (x) -> () @send\n",
        "Rank 0 was asked to run SEND of x 0>1 (operation 0). It is malformed. "
        "Write it with one value read, from this rank to another (two different ranks below 1).",
        ">SEND<",
    ),
    "receive on the wrong rank": ("rank 0\nRECV 0>1 () -> (x) @recv\nrank 1\n", "It is malformed.", ">RECV<"),
    "transfer of two values": ("rank 0\nin x y\nSEND 0>1 (x y) -> () @send\nrank 1\n", "It is malformed.", ">SEND<"),
    "missing member": (
        """
        rank 0
        0ALLREDUCE 0+1 () -> (gsum:0._.0) @collective
        rank 1
        0F0 () -> ()
        """,
        "Rank 0 was asked to run 0ALLREDUCE 0+1 (operation 0). Its members disagree: rank 1 has no such ALLREDUCE. "
        "Give every member the same operation with the same ranks.",
        ">0ALLREDUCE<",
    ),
    "members that disagree": (
        """
        rank 0
        0ALLREDUCE 0+1+2 () -> (gsum:0._.0) @collective
        rank 1
        0ALLREDUCE 0+1 () -> (gsum:0._.1) @collective
        rank 2
        0ALLREDUCE 0+1+2 () -> (gsum:0._.2) @collective
        """,
        "Its members disagree: rank 1 has 0ALLREDUCE 0+1 instead.",
        ">0ALLREDUCE<",
    ),
    "a collective that its rank is not in": (
        "rank 0\n0ALLREDUCE 1+2 () -> () @collective\n",
        "Its members are (1, 2). Name rank 0 and every other member once.",
        ">0ALLREDUCE<",
    ),
    "never written here": (
        """
        rank 0
        0F0 () -> (act:0.0)
        rank 1
        1F0 (act:0.0) -> ()
        """,
        "Rank 1 was asked to run 1F0 (operation 0). act:0.0 is never written on rank 1, but rank 0's 0F0 writes it. "
        "Send it; insert_transfers does that.",
        ">1F0<",
    ),
    "never written anywhere": (
        "rank 0\n0F0 () -> ()\n0F1 (x:0) -> ()\n",
        "Rank 0 was asked to run 0F1 (operation 1). x:0 is never written, on no rank. Write it, or name it among "
        "the inputs.",
        ">0F1<",
    ),
    "an output never written": (
        "rank 0\n0F0 () -> ()\nout x\n",
        "The output x was asked for on rank 0. x is never written, on no rank.",
        ">0F0<",
    ),
    "an output of an empty rank": ("rank 0\nout x\n", "The output x was asked for on rank 0.", "rank 0"),
    "written twice": (
        "rank 0\n0F0 () -> (x)\n0F1 () -> (x)\n",
        "Rank 0 was asked to run 0F1 (operation 1). x is written twice on rank 0: 0F0 has it already. Write it once.",
        ">0F1<",
    ),
    "an input written": (
        "rank 0\nin x\n0F0 () -> (x)\n",
        "x is written twice on rank 0: an input has it already.",
        ">0F0<",
    ),
    "written twice by one operation": (
        "rank 0\n0F0 () -> (x x)\n",
        "x is written twice on rank 0: 0F0 has it already.",
        ">0F0<",
    ),
    "cycle on one stream": (
        "rank 0\n0F0 (b) -> (a)\n0B0 (a) -> (b)\n",
        "It is a cycle within one rank: rank 0's 0F0 waits for b, which rank 0's 0B0 writes; rank 0's 0B0 waits for",
        ">0F0<",
    ),
    "reads what it writes": (
        "rank 0\n0F0 (a) -> (a)\n",
        "It is a cycle within one rank: rank 0's 0F0 waits for a, which rank 0's 0F0 writes.",
        ">0F0<",
    ),
    "deadlock of two ranks": (
        """
        rank 0
        1RECV0 1>0 () -> (b) @recv
        0F0 (b) -> (a)
        0SEND0 0>1 (a) -> () @send
        rank 1
        0RECV0 0>1 () -> (a) @recv
        1F0 (a) -> (b)
        1SEND0 1>0 (b) -> () @send
        """,
        "A schedule of 2 ranks was asked to run. It deadlocks: rank 0's 0F0 waits for b from rank 1; "
        "the transfer of b from rank 1 to rank 0 waits for b, which rank 1's 1F0 writes; rank 1's 1F0 waits for "
        "a from rank 0; "
        "the transfer of a from rank 0 to rank 1 waits for a, which rank 0's 0F0 writes. Reorder one of them "
        "(the first is marked).",
        ">0F0<",
    ),
    "backward before the forward that feeds it": (
        """
        rank 0
        1RECV0 1>0 () -> (grad:1.0) @recv
        0B0 (grad:1.0) -> ()
        0F0 () -> (act:0.0)
        0SEND0 0>1 (act:0.0) -> () @send
        rank 1
        0RECV0 0>1 () -> (act:0.0) @recv
        1F0 (act:0.0) -> (grad:1.0)
        1SEND0 1>0 (grad:1.0) -> () @send
        """,
        "rank 0's 0F0 waits for rank 0's 0B0, which comes before it on rank 0's stream compute",
        "rank 1",
    ),
    "a channel that must not wait": (
        """
        rank 0
        0SEND 0>1 (b) -> () @send
        0SEND 0>1 (a) -> () @send
        0F0 () -> (a)
        1RECV 1>0 () -> (c) @recv
        0F1 (c) -> (b)
        rank 1
        0RECV 0>1 () -> (b) @recv
        0RECV 0>1 () -> (a) @recv
        1F0 (a) -> (c)
        1SEND 1>0 (c) -> () @send
        """,
        "the transfer of a from rank 0 to rank 1 waits for the transfer of b from rank 0 to rank 1, "
        "which comes before it in the channel 0>1",
        "rank 1",
    ),
    "collectives in two orders": (
        """
        rank 0
        0ALLREDUCE 0+1 () -> () @collective
        1ALLREDUCE 0+1 () -> () @collective
        rank 1
        1ALLREDUCE 0+1 () -> () @collective
        0ALLREDUCE 0+1 () -> () @collective
        """,
        "It deadlocks: the 0ALLREDUCE of ranks 0, 1 waits for the 1ALLREDUCE of ranks 0, 1, "
        "which comes before it on rank 1's stream collective",
        ">0ALLREDUCE<",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_named_and_shown(name: str) -> None:
    """By the check, and in the same words by the simulator."""
    text, message, shown = FAULTS[name]
    schedule = Schedule.from_text(text)
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    assert message in str(caught.value)
    sentence, _, grid = str(caught.value).partition("\n")
    assert shown in grid
    assert sentence.count("  ") == 0
    with pytest.raises(ScheduleError) as simulated:
        timed(schedule)
    assert str(simulated.value) == str(caught.value)


def test_a_symmetric_exchange_does_not_deadlock() -> None:
    """Both send first and receive then: sends and receives are separate streams."""
    schedule = check(
        Schedule.from_text("""
        rank 0
        0F0 () -> (a)
        0SEND 0>1 (a) -> () @send
        1RECV 1>0 () -> (b) @recv
        0F1 (b) -> ()
        rank 1
        1F0 () -> (b)
        1SEND 1>0 (b) -> () @send
        0RECV 0>1 () -> (a) @recv
        1F1 (a) -> ()
    """)
    )
    # Full duplex: both transfers at once.
    assert timed(schedule, F=1.0, SEND=2.0).makespan_s == 4.0


def test_a_long_circle_is_cut_short() -> None:
    """Twenty ranks that wait for each other all round: the message stays readable."""
    num_ranks = 20
    text = "".join(f"rank {rank}\n0F0 (x:{(rank + 1) % num_ranks}) -> (x:{rank})\n" for rank in range(num_ranks))
    with pytest.raises(ScheduleError, match="and so on, 40 in all") as caught:
        check(insert_transfers(Schedule.from_text(text)))
    assert len(str(caught.value)) < 4000


def test_grid_of_a_big_schedule_shows_the_neighbourhood() -> None:
    """Only a window round the fault, with dots where the rest was left out."""
    schedule = insert_transfers(backpropagation(equal_plan(40), (1,) * 30))
    ops = list(schedule.ops)
    index = next(i for i, op in enumerate(ops[20]) if op.kind == "SEND" and i > 40)
    ops[20] = ops[20][:index] + ops[20][index + 1 :]
    with pytest.raises(ScheduleError, match="is unmatched") as caught:
        check(Schedule(ops=tuple(ops), inputs=schedule.inputs, outputs=schedule.outputs))
    grid = str(caught.value).partition("\n")[2].splitlines()
    assert len(grid) == 17
    assert all(len(line) < 300 for line in grid)
    assert sum(">" in line for line in grid) == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_check_and_simulator_agree_on_damaged_schedules(data: st.DataObject) -> None:
    """Swap or drop operations anywhere: either both refuse in the same words, or every operation runs."""
    shape = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=3))
    schedule = insert_transfers(hybrid_1f1b(plan_of(*shape), (3,) * data.draw(st.integers(1, 3))))
    rows = [list(ops) for ops in schedule.ops]
    for _ in range(data.draw(st.integers(1, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        if not row:
            continue
        i, j = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, len(row) - 1))
        if data.draw(st.booleans()):
            row[i], row[j] = row[j], row[i]
        else:
            del row[i]
    damaged = Schedule(ops=tuple(map(tuple, rows)), inputs=schedule.inputs, outputs=schedule.outputs)
    try:
        check(damaged)
    except ScheduleError as error:
        with pytest.raises(ScheduleError) as simulated:
            timed(damaged, F=1.0, SF=1.0, SB=1.0)
        assert str(simulated.value) == str(error)
    else:
        timeline = timed(damaged, F=1.0, SF=1.0, SB=1.0)
        assert sorted((span.rank, str(span.op)) for span in timeline.spans) == sorted(
            (rank, str(op)) for rank, ops in enumerate(damaged.ops) for op in ops
        )
