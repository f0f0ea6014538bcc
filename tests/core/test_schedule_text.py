"""Schedules as text: whatever can be said is read back unchanged; what cannot be read is answered with its line."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.errors import ScheduleError
from workbench.core.schedule import COLLECTIVES, NONE, RECV, SEND, Op, Schedule, Value

indices = st.integers(-1, 999).map(lambda index: NONE if index < 0 else index)
values = st.builds(Value, st.sampled_from(["act", "side_in", "w2"]), indices, indices, indices)
value_tuples = st.lists(values, max_size=3).map(tuple)
ranks = st.integers(0, 2000)
kinds = st.sampled_from(["F", "SB", "OWN_KIND"])
plain = st.builds(
    Op,
    kinds,
    indices,
    indices,
    indices,
    value_tuples,
    value_tuples,
    st.just(()),
    st.sampled_from(["compute", "compute1"]),
)
transfer_kinds, pairs = st.sampled_from([SEND, RECV]), st.tuples(ranks, ranks)
transfers = st.builds(Op, transfer_kinds, indices, indices, indices, value_tuples, value_tuples, pairs, st.just("send"))
groups = st.lists(ranks, min_size=1, max_size=4).map(tuple)
collectives = st.builds(
    Op,
    st.sampled_from(sorted(COLLECTIVES)),
    indices,
    indices,
    indices,
    value_tuples,
    value_tuples,
    groups,
    st.just("collective"),
)
rows = st.tuples(st.lists(plain | transfers | collectives, max_size=4).map(tuple), value_tuples, value_tuples)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4))
def test_round_trip(drawn: list[tuple]) -> None:
    """Any schedule of the vocabulary, also one that could not run."""
    ops, inputs, outputs = zip(*drawn, strict=True)
    schedule = Schedule(ops=ops, inputs=inputs, outputs=outputs)
    assert Schedule.from_text(schedule.to_text()) == schedule


@settings(deadline=None)
@given(st.text(alphabet="rank 01inout(){}->SENDFx:._+@#\n", max_size=80))
def test_no_text_breaks_the_reader(text: str) -> None:
    """It is read, or answered with a ScheduleError."""
    try:
        Schedule.from_text(text)
    except ScheduleError as error:
        assert "Line" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 () -> ()", "Line 1 of the schedule was read: '0F0 () -> ()'. It is malformed: it comes before 'rank 0'."),
        ("rank 1", "rank 0 comes next"),
        ("rank 0\n\nforward", "Line 3"),
        ("rank 0\n0F0 (a:x) -> ()", "a value is written name:stage.microbatch.part"),
        ("rank 0\n0SEND0 0> (a) -> ()", "an operation is written"),
        ("rank 0\n0f0 () -> ()", "an operation is written"),
    ],
)
def test_unreadable(text: str, message: str) -> None:
    """The message names the line and the form."""
    with pytest.raises(ScheduleError, match="Line") as caught:
        Schedule.from_text(text)
    assert message in str(caught.value)


def test_grid_marks_a_cell() -> None:
    """Rows of labels, columns aligned, dots where the window ends."""
    text = "rank 0\n" + "".join(f"0F{i} () -> ()\n" for i in range(6)) + "rank 1\n1SF10 () -> ()\n"
    schedule = Schedule.from_text(text)
    assert schedule.grid() == "rank 0   0F0   0F1 0F2 0F3 0F4 0F5\nrank 1   1SF10"
    assert schedule.grid((0, 3), window=1) == "rank 0   ... 0F2 >0F3< 0F4 ...\nrank 1   ..."


def test_one_tuple_of_inputs_per_rank() -> None:
    """A schedule of one rank has one row of inputs."""
    with pytest.raises(ScheduleError, match="inputs name 2"):
        Schedule(ops=((),), inputs=((), ()))
