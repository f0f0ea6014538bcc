"""Transfers and all-reduces are inserted by one rule each."""

from __future__ import annotations

import pytest
from schedule_plans import labels

from workbench.core.errors import ScheduleError
from workbench.core.schedule import Schedule
from workbench.schedules import check, insert_allreduce, insert_transfers


def lowered(text: str) -> Schedule:
    """Return the text's schedule with its transfers, checked."""
    return check(insert_transfers(Schedule.from_text(text)))


def test_send_after_the_write_and_receive_before_the_read() -> None:
    """The reader does other work first."""
    schedule = lowered("""
        rank 0
        0F0 () -> (act:0.0)
        0F1 () -> (act:0.1)
        rank 1
        1G0 () -> (x)
        1F0 (act:0.0 x) -> ()
    """)
    assert [str(op) for op in schedule.ops[0]] == [
        "0F0 () -> (act:0.0)",
        "0SEND0 0>1 (act:0.0) -> () @send",
        "0F1 () -> (act:0.1)",
    ]
    assert labels(schedule, 1) == ["1G0", "0RECV0", "1F0"]


def test_receives_keep_the_order_of_the_sends() -> None:
    """The reader wants b first, but a is written first: both are received before b is read."""
    schedule = lowered("""
        rank 0
        0A0 () -> (a:0)
        0B0 () -> (b:0)
        rank 1
        1B0 (b:0) -> ()
        1A0 (a:0) -> ()
    """)
    assert [str(op).split(" @")[0] for op in schedule.ops[1]][:2] == ["0RECV 0>1 () -> (a:0)", "0RECV 0>1 () -> (b:0)"]


def test_several_readers_and_reads() -> None:
    """One transfer per reader, however often it reads."""
    schedule = lowered("""
        rank 0
        0A0 () -> (a)
        rank 1
        0B0 (a) -> ()
        0B1 (a) -> ()
        rank 2
        0B0 (a) -> ()
    """)
    assert labels(schedule, 0) == ["0A0", "SEND", "SEND"]
    assert [op.ranks for op in schedule.ops[0][1:]] == [(0, 1), (0, 2)]
    assert labels(schedule, 1) == ["RECV", "0B0", "0B1"]


def test_inputs_and_outputs_travel() -> None:
    """An input of another rank is sent at the start; an output that another rank has is received at the end."""
    schedule = lowered("""
        rank 0
        in x
        0A0 () -> (a)
        rank 1
        0B0 (x) -> (b)
        out a
    """)
    assert [str(op) for op in schedule.ops[0]] == [
        "SEND 0>1 (x) -> () @send",
        "0A0 () -> (a)",
        "SEND 0>1 (a) -> () @send",
    ]
    assert labels(schedule, 1) == ["RECV", "0B0", "RECV"]


def test_what_is_already_there_is_not_sent() -> None:
    """Complete schedules stay as they are, and so do forwarded values: the pass can run twice."""
    text = """
        rank 0
        0A0 () -> (a)
        SEND 0>1 (a) -> () @send
        rank 1
        RECV 0>1 () -> (a) @recv
        0B0 (a) -> ()
        rank 2
        0C0 (a) -> ()
    """
    schedule = lowered(text)
    assert [op.ranks for op in schedule.ops[2] if op.kind == "RECV"] == [(0, 2)]
    assert insert_transfers(schedule) == schedule


def test_nobody_has_it() -> None:
    """The pass leaves it to the check to say so."""
    schedule = insert_transfers(Schedule.from_text("rank 0\n0F0 (x) -> ()\nrank 1\n"))
    with pytest.raises(ScheduleError, match="x is never written, on no rank"):
        check(schedule)


def test_all_reduce_before_equal_steps() -> None:
    """Ranks with the same STEP are replicas; a STEP of one rank, or without gradients, stays alone."""
    schedule = check(
        insert_allreduce(
            Schedule.from_text("""
        rank 0
        0B0 () -> (gacc:0.0.0)
        0STEP (gacc:0.0.0) -> (w:0._.0)
        1STEP () -> (w:1._.0)
        rank 1
        in w:0
        0STEP (w:0) -> (w:0._.1)
        1STEP () -> (w:1._.1)
        rank 2
        2B0 () -> (gacc:2.0.2)
        2STEP (gacc:2.0.2) -> (w:2._.2)
    """)
        )
    )
    assert [str(op) for op in schedule.ops[0]][1:3] == [
        "0ALLREDUCE 0+1 (gacc:0.0.0) -> (gsum:0._.0) @collective",
        "0STEP (gsum:0._.0) -> (w:0._.0)",
    ]
    assert [str(op) for op in schedule.ops[1]] == [
        "0ALLREDUCE 0+1 () -> (gsum:0._.1) @collective",
        "0STEP (gsum:0._.1 w:0) -> (w:0._.1)",
        "1STEP () -> (w:1._.1)",
    ]
    assert labels(schedule, 2) == ["2B0", "2STEP"]
