"""The simulator against hand-computed times and a slow, obvious reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.core.costs import TableCosts
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import NONE, SEND, Op, Schedule, Value, recv, send
from workbench.core.timeline import Timeline
from workbench.simulator import makespan_s, simulate


def run(text: str, nbytes: dict[str, int] | None = None, **seconds: float) -> Timeline:
    """Simulate a schedule given as text."""
    schedule = Schedule.from_text(text)
    costs = TableCosts(seconds_by_kind=seconds, bytes_by_name=nbytes or {})
    return simulate(
        Program(schedule=schedule, costs=costs, devices=tuple(f"d{rank}" for rank in range(schedule.world_size)))
    )


def when(timeline: Timeline, label: str, rank: int) -> tuple[float, float]:
    """Return start and end of the operation of that label."""
    (span,) = [span for span in timeline.spans if span.op.label == label and span.rank == rank]
    return span.start_s, span.end_s


def test_streams_of_a_rank_run_at_once() -> None:
    """Each in list order, and a join waits for all that it reads."""
    timeline = run(
        """
        rank 0
        0A0 () -> (a)
        0B0 () -> (b) @compute1
        0B1 () -> (c) @compute1
        0C0 (a c) -> ()
        """,
        A=5.0,
        B=2.0,
        C=1.0,
    )
    assert [when(timeline, label, 0) for label in ("0A0", "0B0", "0B1", "0C0")] == [(0, 5), (0, 2), (2, 4), (5, 6)]


FAN_IN = """
    rank 0
    0F () -> (a)
    SEND 0>2 (a) -> () @send
    rank 1
    0G () -> (b)
    SEND 1>2 (b) -> () @send
    rank 2
    RECV 1>2 () -> (b) @recv
    RECV 0>2 () -> (a) @recv
    0H (a b) -> ()
    """


TIE_AT_AN_EGRESS = """
    rank 0
    0A () -> (a)
    0B () -> (b) @other
    SEND 0>{first} ({x}) -> () @one
    SEND 0>{second} ({y}) -> () @two
    rank 1
    RECV 0>1 () -> (a) @recv
    0X (a) -> ()
    rank 2
    RECV 0>2 () -> (b) @recv
    0Y (b) -> ()
    """


@pytest.mark.parametrize(("first", "makespan_s"), [(1, 19.0), (2, 15.0)])
def test_of_transfers_ready_at_the_same_instant_the_one_listed_first_goes_first(first: int, makespan_s: float) -> None:
    """Whichever operation produced its value: a (for the short 0X) and b (for the long 0Y) are both there after 1 s."""
    x, y = ("a", "b") if first == 1 else ("b", "a")
    timeline = run(
        TIE_AT_AN_EGRESS.format(first=first, second=3 - first, x=x, y=y),
        {"a": 1, "b": 1},
        A=1.0,
        B=1.0,
        SEND=4.0,
        X=1.0,
        Y=10.0,
    )
    assert timeline.makespan_s == makespan_s


def test_of_ranks_ready_at_the_same_instant_the_lower_one_goes_first() -> None:
    """Not the one that the receiver lists first."""
    timeline = run(FAN_IN, {"a": 7, "b": 9}, F=1.0, G=1.0, SEND=4.0, H=1.0)
    assert [(span.rank, span.start_s) for span in timeline.spans if span.op.kind == SEND] == [(0, 1.0), (1, 5.0)]


def test_an_ingress_serves_the_first_that_is_ready() -> None:
    """Not the first in the list: channels do not wait for each other, but share the receiver's ingress."""
    timeline = run(FAN_IN, {"a": 7, "b": 9}, F=1.0, G=2.0, SEND=4.0, H=1.0)
    sends = [(span.rank, span.start_s, span.end_s, span.nbytes) for span in timeline.spans if span.op.kind == SEND]
    assert sends == [(0, 1.0, 5.0, 7), (1, 5.0, 9.0, 9)]
    assert timeline.makespan_s == 10.0
    assert (timeline.bytes_sent(0), timeline.bytes_sent(1)) == (7, 9)


def test_a_received_value_can_be_sent_on() -> None:
    """A relay: two hops."""
    timeline = run(
        """
        rank 0
        in a
        SEND 0>1 (a) -> () @send
        rank 1
        RECV 0>1 () -> (a) @recv
        SEND 1>2 (a) -> () @send
        rank 2
        RECV 1>2 () -> (a) @recv
        """,
        SEND=1.5,
    )
    assert timeline.makespan_s == 3.0


COLLECTIVE = """
    rank 0
    0F () -> (g)
    0ALLREDUCE 0+1 (g) -> (s) @collective
    0G () -> ()
    0STEP (s) -> ()
    rank 1
    0ALLREDUCE 0+1 () -> (s) @collective
    0STEP (s) -> ()
    """


def test_a_collective_waits_for_all_and_overlaps_with_compute() -> None:
    """It starts when the last member is there; other compute of a member goes on."""
    timeline = run(COLLECTIVE, {"s": 100}, F=2.0, ALLREDUCE=4.0, G=3.0, STEP=1.0)
    assert when(timeline, "0ALLREDUCE", 0) == when(timeline, "0ALLREDUCE", 1) == (2.0, 6.0)
    assert when(timeline, "0G", 0) == (2.0, 5.0)
    assert when(timeline, "0STEP", 0) == when(timeline, "0STEP", 1) == (6.0, 7.0)


def test_a_collective_on_the_compute_stream_blocks_it() -> None:
    """The stream is the operation's own choice."""
    timeline = run(COLLECTIVE.replace(" @collective", ""), F=2.0, ALLREDUCE=4.0, G=3.0, STEP=1.0)
    assert when(timeline, "0G", 0) == (6.0, 9.0)


def test_a_collective_is_priced_by_its_first_member() -> None:
    """ranks[0] need not be the lowest: a broadcast names its root first."""
    schedule = Schedule.from_text("rank 0\n0BROADCAST 1+0 () -> (w)\nrank 1\nin w\n0BROADCAST 1+0 (w) -> ()\n")
    costs = TableCosts(seconds_by_kind={"BROADCAST": lambda rank, op: 1.0 + rank + len(op.reads)})
    assert simulate(Program(schedule=schedule, costs=costs, devices=("a", "b"))).makespan_s == 3.0


@pytest.mark.parametrize(
    ("kind", "reads", "writes", "sent"),
    [("ALLREDUCE", 90, 90, 120), ("ALLGATHER", 30, 90, 60), ("REDUCESCATTER", 90, 30, 60)],
)
def test_bytes_of_ring_collectives(kind: str, reads: int, writes: int, sent: int) -> None:
    """Per rank of n = 3: 2 (n - 1) / n, (n - 1) / n and (n - 1) / n of the whole tensor."""
    text = "".join(f"rank {rank}\nin x\n0{kind} 0+1+2 (x) -> (y)\n" for rank in range(3))
    timeline = run(text, {"x": reads, "y": writes})
    assert [timeline.bytes_sent(rank) for rank in range(3)] == [sent] * 3


def test_free_operations_take_no_time() -> None:
    """A schedule in which everything is free ends at 0, with all its spans."""
    timeline = run(FAN_IN)
    assert (timeline.makespan_s, len(timeline.spans)) == (0.0, 7)
    assert run("rank 0\n").makespan_s == 0.0


def test_the_timeline_says_what_it_is() -> None:
    """Simulated, with names, title and budgets."""
    schedule = Schedule.from_text("rank 0\n0F () -> ()\n")
    timeline = simulate(
        Program(schedule=schedule, costs=TableCosts(seconds_by_kind={}), devices=("pi",), budget_bytes=(5,)),
        title="One",
        memory=False,
    )
    assert (timeline.label, timeline.title, timeline.device_names, timeline.budget_bytes) == (
        "simulated",
        "One",
        ("pi",),
        (5,),
    )
    assert timeline.memory == ()


def test_what_cannot_be_simulated() -> None:
    """The wrong number of devices; a cost that is none."""
    with pytest.raises(ScheduleError, match="2 devices"):
        simulate(Program(schedule=Schedule(ops=((),)), costs=TableCosts(seconds_by_kind={}), devices=("a", "b")))
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ScheduleError, match="Rank 0 was asked to run 0F"):
            run("rank 0\n0F () -> ()\n", F=seconds)


def reference(schedule: Schedule, seconds: dict[str, int]) -> dict[tuple[int, int], tuple[int, int]]:
    """Return (start, end) of every operation, by trying everything at every tick of an integer clock; costs are at
    least 1."""
    begun: dict[tuple[int, int], tuple[int, int]] = {}
    ready_since: dict[tuple[int, int], int] = {}
    present = [{value: 0 for value in inputs} for inputs in schedule.inputs]
    number = sum(map(len, schedule.ops))
    now = 0
    while len(begun) < number:

        def over(place: tuple[int, int], now: int = now) -> bool:
            return place in begun and begun[place][1] <= now

        for rank, ops in enumerate(schedule.ops):
            for index, op in enumerate(ops):
                if over((rank, index)):
                    for value in op.writes:
                        present[rank].setdefault(value, now)
        waiting = []
        for rank, ops in enumerate(schedule.ops):
            for index, op in enumerate(ops):
                place = (rank, index)
                if place in begun or op.kind == "RECV" or any(value not in present[rank] for value in op.reads):
                    continue
                if op.kind == SEND:
                    if all(over((rank, i)) for i in range(index) if ops[i].kind == SEND and ops[i].ranks == op.ranks):
                        ready_since.setdefault(place, now)
                        waiting.append((ready_since[place], place))
                elif all(over((rank, i)) for i in range(index) if ops[i].kind not in (SEND, "RECV")):
                    begun[place] = (now, now + seconds[op.kind])
        busy = {
            end
            for (rank, index), (_, until) in begun.items()
            if until > now and schedule.ops[rank][index].kind == SEND
            for end in (("out", schedule.ops[rank][index].ranks[0]), ("in", schedule.ops[rank][index].ranks[1]))
        }
        for _, (rank, index) in sorted(waiting):
            op = schedule.ops[rank][index]
            ends = {("out", op.ranks[0]), ("in", op.ranks[1])}
            if not ends & busy:
                busy |= ends
                begun[rank, index] = (now, now + seconds[SEND + op.reads[0].name])
                twin = next(
                    i for i, o in enumerate(schedule.ops[op.ranks[1]]) if o.kind == "RECV" and o.writes == op.reads
                )
                begun[op.ranks[1], twin] = begun[rank, index]
        now += 1
    return begun


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_contention_as_in_the_reference(data: st.DataObject) -> None:
    """Random producers and transfers over few links: every span starts when the tick-by-tick reference says.

    Ready times are made distinct (transfers that become ready at one instant have no order by the rules), by a producer
    per rank with its own residue.
    """
    num_ranks = data.draw(st.integers(2, 4))
    ops: list[list[Op]] = [[] for _ in range(num_ranks)]
    seconds: dict[str, int] = {}
    unit = 64
    for number in range(data.draw(st.integers(1, 10))):
        source = data.draw(st.integers(0, num_ranks - 1))
        destination = data.draw(st.integers(0, num_ranks - 1).filter(lambda rank, source=source: rank != source))
        kind, name = f"P{'ABCDEFGHIJ'[number]}", f"v{number}"
        seconds[kind] = 1 + data.draw(st.integers(0, 3)) * unit + 2**number % unit
        seconds[SEND + name] = (1 + data.draw(st.integers(0, 5))) * unit + number
        ops[source] += [Op(kind, 0, NONE, NONE, (), (Value(name),)), send(Value(name), source, destination)]
        ops[destination].append(recv(Value(name), source, destination))
    schedule = Schedule(ops=tuple(map(tuple, ops)))

    def price(rank: int, op: Op) -> float:
        return float(seconds[SEND + op.reads[0].name if op.kind == SEND else op.kind])

    expected = reference(schedule, seconds)
    ready = [expected[rank, i - 1][1] for rank, row in enumerate(ops) for i, op in enumerate(row) if op.kind == SEND]
    costs = TableCosts(seconds_by_kind=dict.fromkeys((op.kind for row in ops for op in row), price))
    program = Program(schedule=schedule, costs=costs, devices=tuple("abcd"[:num_ranks]))
    timeline = simulate(program)
    assert makespan_s(program) == timeline.makespan_s
    got = {(span.rank, str(span.op)): (span.start_s, span.end_s) for span in timeline.spans}
    if len(set(ready)) == len(ready):
        assert got == {(rank, str(schedule.ops[rank][index])): span for (rank, index), span in expected.items()}
    # Whatever the ties: an interface never carries two transfers at once.
    for side, kind in ((0, SEND), (1, "RECV")):
        for rank in range(num_ranks):
            spans = sorted(
                (s.start_s, s.end_s) for s in timeline.spans if s.op.kind == kind and s.op.ranks[side] == rank
            )
            assert all(a[1] <= b[0] for a, b in pairwise(spans))
