"""The simulator against hand-computed times and a slow, obvious reference."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated import program_of, simulated
from workbench.core.costs import TableCosts
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import NONE, RECV, SEND, Op, Schedule, Value, recv, send
from workbench.core.timeline import Timeline
from workbench.simulator import makespan_s, simulate


def run(text: str, nbytes: dict[str, int] | None = None, **seconds: float) -> Timeline:
    """Simulate a schedule given as text."""
    return simulated(text, TableCosts(seconds_by_kind=seconds, bytes_by_name=nbytes or {}))


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


def sends(timeline: Timeline) -> list[tuple[str, float, float]]:
    """Return the value, the start and the end of each transfer, by value."""
    return sorted((str(s.op.reads[0]), s.start_s, s.end_s) for s in timeline.spans if s.op.kind == SEND)


def test_messages_to_one_rank_at_once_share_its_ingress() -> None:
    """Both get half of the rate: each takes twice its 4 s, whichever sender is the lower rank."""
    timeline = run(FAN_IN, {"a": 7, "b": 9}, F=1.0, G=1.0, SEND=4.0, H=1.0)
    assert sends(timeline) == [("a", 1.0, 9.0), ("b", 1.0, 9.0)]
    assert timeline.makespan_s == 10.0
    assert (timeline.bytes_sent(0), timeline.bytes_sent(1)) == (7, 9)


def test_a_message_has_the_whole_ingress_until_another_one_comes_and_after_it_has_ended() -> None:
    """a alone for 1 s, then both at half the rate: the other 3 s of a take 6.  b has 3 of its 4 s then, and the last
    one alone.  The wire carried 8 s of messages without a pause.
    """
    timeline = run(FAN_IN, {"a": 7, "b": 9}, F=1.0, G=2.0, SEND=4.0, H=1.0)
    assert sends(timeline) == [("a", 1.0, 8.0), ("b", 2.0, 9.0)]
    assert [span.nbytes for span in timeline.spans if span.op.kind == SEND] == [7, 9]
    assert timeline.makespan_s == 10.0


SEVERAL_TO_SEVERAL = """
    rank 0
    in a b
    SEND 0>2 (a) -> () @send
    SEND 0>3 (b) -> () @send
    rank 1
    in c d
    SEND 1>2 (c) -> () @send
    SEND 1>3 (d) -> () @send
    rank 2
    RECV 0>2 () -> (a) @recv
    RECV 1>2 () -> (c) @recv
    rank 3
    RECV 0>3 () -> (b) @recv
    RECV 1>3 () -> (d) @recv
    """


def test_a_sender_does_not_know_that_its_receiver_has_other_messages() -> None:
    """Both send to rank 2 first.  Their wires are free after 4 s, while the switch still has half of each message; then
    they both send to rank 3.  If one of them began with rank 3, nobody would wait.
    """
    timeline = run(SEVERAL_TO_SEVERAL, SEND=4.0)
    assert sends(timeline) == [("a", 0.0, 8.0), ("b", 4.0, 12.0), ("c", 0.0, 8.0), ("d", 4.0, 12.0)]
    first, second = "SEND 1>2 (c) -> () @send", "SEND 1>3 (d) -> () @send"
    staggered = SEVERAL_TO_SEVERAL.replace(first, "-").replace(second, first).replace("-\n", f"{second}\n")
    assert run(staggered, SEND=4.0).makespan_s == 8.0


def test_messages_of_one_channel_arrive_in_order() -> None:
    """b leaves after a and waits behind it in the switch, so c shares the ingress with one message at a time.  Rank 0's
    wire is free for d after 8 s.
    """
    timeline = run(
        """
        rank 0
        in a b
        0D () -> (d)
        SEND 0>2 (a) -> () @send
        SEND 0>2 (b) -> () @send
        SEND 0>3 (d) -> () @send
        rank 1
        in c
        SEND 1>2 (c) -> () @send
        rank 2
        RECV 0>2 () -> (a) @recv
        RECV 0>2 () -> (b) @recv
        RECV 1>2 () -> (c) @recv
        rank 3
        RECV 0>3 () -> (d) @recv
        """,
        D=5.0,
        SEND=4.0,
    )
    assert sends(timeline) == [("a", 0.0, 8.0), ("b", 4.0, 12.0), ("c", 0.0, 8.0), ("d", 8.0, 12.0)]


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
    text = "rank 0\n0BROADCAST 1+0 () -> (w)\nrank 1\nin w\n0BROADCAST 1+0 (w) -> ()\n"
    costs = TableCosts(seconds_by_kind={"BROADCAST": lambda rank, op: 1.0 + rank + len(op.reads)})
    assert simulated(text, costs).makespan_s == 3.0


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


Place = tuple[int, int]


def reference(schedule: Schedule, seconds: dict[str, int]) -> tuple[dict[Place, tuple[float, float]], list[Fraction]]:
    """Return (start, end) of every operation, and when transfers were ready, by trying everything at every event, in
    exact numbers; costs are at least 1.
    """
    begun: dict[Place, Fraction] = {}
    over: dict[Place, Fraction] = {}
    left: dict[Place, Fraction] = {}  # seconds of transfers that their receivers have not got yet
    ready: dict[Place, Fraction] = {}
    wire_free = [Fraction(0)] * schedule.world_size
    present = [set(inputs) for inputs in schedule.inputs]
    ops = {(rank, index): op for rank, row in enumerate(schedule.ops) for index, op in enumerate(row)}
    work = {
        place: seconds[SEND + op.reads[0].name if op.kind == SEND else op.kind]
        for place, op in ops.items()
        if op.kind != RECV
    }
    now = Fraction(0)
    while len(over) < len(work):
        for place, end in over.items():
            if end <= now:
                present[ops[place].ranks[1] if ops[place].kind == SEND else place[0]].update(
                    ops[place].writes or ops[place].reads
                )
        for place, op in ops.items():
            before = [(place[0], index) for index in range(place[1])]
            if place in begun or op.kind == RECV or not present[place[0]].issuperset(op.reads):
                continue
            if op.kind == SEND:
                same = [p for p in before if ops[p].ranks == op.ranks and ops[p].kind == SEND]
                if all(p in begun and begun[p] + work[p] <= now for p in same):
                    ready.setdefault(place, now)
            elif all(p in over and over[p] <= now for p in before if ops[p].kind not in (SEND, RECV)):
                begun[place], over[place] = now, now + work[place]
        for place in sorted(set(ready) - set(begun), key=lambda p: (ready[p], p)):
            if wire_free[place[0]] <= now:
                begun[place], left[place], wire_free[place[0]] = now, Fraction(work[place]), now + work[place]
        flows = [p for p in left if not any(ops[q].ranks == ops[p].ranks and q < p for q in left)]
        slowness = {p: sum(ops[q].ranks[1] == ops[p].ranks[1] for q in flows) for p in flows}
        events = [now + left[p] * slowness[p] for p in flows]
        events += [time for time in (*over.values(), *wire_free) if time > now]
        if not events:
            break
        for p in flows:
            left[p] -= (min(events) - now) / slowness[p]
        now = min(events)
        for p in flows:
            if not left[p]:
                del left[p]
                over[p] = now
    spans = {place: (float(begun[place]), float(over[place])) for place in work}
    for place, op in ops.items():
        if op.kind == RECV:
            twin = next(p for p in work if ops[p].kind == SEND and ops[p].reads == op.writes)
            spans[place] = spans[twin]
    return spans, sorted(ready.values())


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_contention_as_in_the_reference(data: st.DataObject) -> None:
    """Random producers and transfers over few links: every span starts and ends when the reference says.

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

    expected, ready = reference(schedule, seconds)
    costs = TableCosts(seconds_by_kind=dict.fromkeys((op.kind for row in ops for op in row), price))
    program = program_of(schedule, costs)
    timeline = simulate(program)
    assert makespan_s(program) == timeline.makespan_s
    got = {(span.rank, str(span.op)): (span.start_s, span.end_s) for span in timeline.spans}
    if all(later - earlier > 1e-6 for earlier, later in pairwise(ready)):
        assert got == {
            (rank, str(schedule.ops[rank][index])): pytest.approx(span, rel=1e-9)
            for (rank, index), span in expected.items()
        }
    # Whatever the ties: a sender's messages leave one after another, and a receiver's wire is never idle while one is
    # in flight.
    for rank in range(num_ranks):
        sent = [(s.start_s, price(rank, s.op)) for s in timeline.spans if s.op.kind == SEND and s.rank == rank]
        assert all(a[0] + a[1] <= b[0] + 1e-9 for a, b in pairwise(sorted(sent)))
        end_s = 0.0
        arrivals = [s for s in timeline.spans if s.op.kind == SEND and s.op.ranks[1] == rank]
        for span in sorted(arrivals, key=lambda s: s.start_s):
            end_s = max(end_s, span.start_s) + price(span.rank, span.op)
        assert max((span.end_s for span in arrivals), default=0.0) == pytest.approx(end_s)
