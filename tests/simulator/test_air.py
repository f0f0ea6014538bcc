"""Transfers that share the air: closed forms, and a reference that divides the air anew at every small step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.clusters import cluster_of
from workbench.core.cluster import Cluster, Link
from workbench.core.costs import TableCosts, busiest_s, collective_s
from workbench.core.program import Program, chained
from workbench.core.schedule import NONE, SEND, Op, Schedule, Value, recv, send
from workbench.core.timeline import Timeline
from workbench.simulator import simulate

Transfers = Sequence[tuple[int, int, int]]  # source, destination, bytes


def stations(*rates: float, latency_s: float = 0.0, jitter_s: float = 0.0) -> Cluster:
    """Return a Wi-Fi cluster with these rates in bytes/s."""
    cluster = cluster_of(len(rates), bytes_per_s=list(rates), latency_s=latency_s)
    return replace(cluster, medium="wifi", jitter_s=jitter_s)


def at_once(cluster: Cluster, transfers: Transfers) -> Timeline:
    """Simulate transfers that are all ready at 0."""
    ops: list[list[Op]] = [[] for _ in cluster.devices]
    inputs: list[list[Value]] = [[] for _ in cluster.devices]
    for number, (source, destination, _) in enumerate(transfers):
        value = Value(f"v{number}")
        inputs[source].append(value)
        ops[source].append(send(value, source, destination))
        ops[destination].append(recv(value, source, destination))
    schedule = Schedule(ops=tuple(map(tuple, ops)), inputs=tuple(map(tuple, inputs)))
    sizes = {f"v{number}": nbytes for number, (_, _, nbytes) in enumerate(transfers)}
    return simulate(Program.on(cluster, schedule, TableCosts(seconds_by_kind={}, bytes_by_name=sizes, cluster=cluster)))


def ends(timeline: Timeline) -> list[float]:
    """Return when each transfer ended, in their order."""
    spans = sorted((int(span.op.reads[0].name[1:]), span.end_s) for span in timeline.spans if span.op.kind == SEND)
    return [end_s for _, end_s in spans]


@pytest.mark.parametrize(
    ("cluster", "transfers", "expected"),
    [
        # An access point repeats each frame: at 100 bytes/s 100 bytes take 2 s, and those of n senders n times that.
        (stations(100, 100), [(0, 1, 100)], [2]),
        (stations(*[100] * 6), [(0, 1, 100), (2, 3, 100)], [4, 4]),
        (stations(*[100] * 6), [(0, 1, 100), (2, 3, 100), (4, 5, 100)], [6, 6, 6]),
        # Half duplex: both directions of a pair, too.
        (stations(100, 100), [(0, 1, 100), (1, 0, 100)], [4, 4]),
        # Time on air by each station's rate: 100 bytes at 100 and 25 bytes/s take 1 + 4 s.  The short one ends after
        # twice its own 2 s, the other when both have been on air.
        (stations(100, 25), [(0, 1, 100)], [5]),
        (stations(100, 100, 100, 25), [(0, 1, 100), (2, 3, 100)], [4, 7]),
        # Stations that talk directly need the air once.
        (replace(stations(100, 100), pairs={"d0>d1": Link(bytes_per_s=50)}), [(0, 1, 100)], [2]),
        (replace(stations(100, 100), pairs={"d0>d1": Link(bytes_per_s=50)}), [(0, 1, 100), (1, 0, 100)], [4, 4]),
        # Who receives does not matter: those that send to one station share the air, too.  A station sends to one at a
        # time.
        (stations(*[100] * 4), [(1, 0, 100), (2, 0, 100), (3, 0, 100)], [6, 6, 6]),
        (stations(*[100] * 3), [(1, 0, 100), (2, 0, 50)], [3, 2]),
        (stations(*[100] * 3), [(0, 1, 100), (0, 2, 100)], [2, 4]),
        # Latency is not time on air: the next message of a station may be on air meanwhile.
        (stations(*[100] * 3, latency_s=1.5), [(0, 1, 100), (0, 1, 100), (0, 2, 100)], [5, 9, 7]),
        (stations(*[100] * 4, latency_s=1.5), [(0, 1, 100), (2, 3, 100)], [7, 7]),
        (stations(*[100] * 4, latency_s=1.5), [(0, 1, 100), (2, 3, 0)], [5, 3]),
    ],
)
def test_transfers_at_once(cluster: Cluster, transfers: Transfers, expected: list[float]) -> None:
    assert ends(at_once(cluster, transfers)) == pytest.approx(expected)
    assert busiest_s(cluster, transfers) <= max(expected) + 1e-9


def test_times_on_air_are_those_of_a_byte_between_the_two_that_need_the_least() -> None:
    """Two stations at 100 bytes/s, one at 25, and a direct path; a single station sends nothing."""
    cluster = replace(stations(100, 100, 25), pairs={"d2>d0": Link(bytes_per_s=80)})
    air, alone = cluster.air, stations(100).air
    assert air is not None and air.most_bytes_per_s == pytest.approx(80)
    pairs = [(0, 1), (0, 2), (2, 1), (2, 0)]
    assert [air.times_on_air(*pair) for pair in pairs] == pytest.approx([1.6, 4, 4, 1])
    assert alone is not None and alone.most_bytes_per_s > 0


@pytest.mark.parametrize("kind", ["ALLREDUCE", "ALLGATHER", "REDUCESCATTER", "BROADCAST"])
@pytest.mark.parametrize("rates", [(100, 100, 100), (100, 50, 25)])
def test_collectives_are_on_air_with_all_their_messages(kind: str, rates: tuple[float, ...]) -> None:
    """Alone they take collective_s.  A transfer next to them gets the share of one sender."""
    cluster = stations(*rates, 100, 100, latency_s=0.5)
    nbytes, air = 300, cluster.air
    assert air is not None
    ring = sum(air.transfer_s(a, b, 100) for a, b in ((0, 1), (1, 2), (2, 0)))
    messages_s, senders, rounds = {
        "ALLREDUCE": (4 * ring, 3, 4),
        "ALLGATHER": (2 * ring, 3, 2),
        "REDUCESCATTER": (2 * ring, 3, 2),
        "BROADCAST": (air.transfer_s(0, 1, 300) + air.transfer_s(0, 2, 300), 1, 2),
    }[kind]
    alone_s = messages_s + rounds * 1.0
    assert collective_s(cluster, kind, (0, 1, 2), nbytes) == pytest.approx(alone_s)

    def program(with_transfer: bool) -> Program:
        text = "".join(f"rank {rank}\nin x\n0{kind} 0+1+2 (x) -> (y)\n" for rank in range(3))
        text += (
            "rank 3\nin v\nSEND 3>4 (v) -> ()\nrank 4\nRECV 3>4 () -> (v)\n" if with_transfer else "rank 3\nrank 4\n"
        )
        costs = TableCosts(seconds_by_kind={}, bytes_by_name={"x": nbytes, "y": nbytes, "v": 100}, cluster=cluster)
        return Program.on(cluster, Schedule.from_text(text), costs)

    assert simulate(program(False)).makespan_s == pytest.approx(alone_s)
    timeline = simulate(program(True))
    assert ends_of(timeline, "SEND") == pytest.approx(2 * (1 + senders) + 1)
    assert ends_of(timeline, kind) == pytest.approx(alone_s + 2)


def test_the_result_of_a_collective_can_be_sent_between_its_members() -> None:
    """The collective has the same two ranks, but is no message before it in the channel."""
    cluster = stations(100, 100)
    text = """
        rank 0
        in x
        0ALLREDUCE 0+1 (x) -> (y)
        SEND 0>1 (y) -> ()
        rank 1
        in x
        0ALLREDUCE 0+1 (x) -> (z)
        RECV 0>1 () -> (y)
        """
    costs = TableCosts(seconds_by_kind={}, bytes_by_name=dict.fromkeys("xyz", 100), cluster=cluster)
    timeline = simulate(Program.on(cluster, Schedule.from_text(text), costs))
    assert timeline.makespan_s == pytest.approx(collective_s(cluster, "ALLREDUCE", (0, 1), 100) + 2)


def ends_of(timeline: Timeline, kind: str) -> float:
    return max(span.end_s for span in timeline.spans if span.op.kind == kind)


def test_jitter_is_drawn_by_message_and_its_mean_is_in_the_price() -> None:
    cluster = stations(1e6, 1e6, latency_s=0.5, jitter_s=0.25)
    assert cluster.air is not None
    draws = [cluster.air.delay_s(0, 1, number) for number in range(4000)]
    assert sum(draws) / len(draws) == pytest.approx(0.25, rel=0.05) and min(draws) >= 0
    assert sum(draw > 0.25 for draw in draws) / len(draws) == pytest.approx(0.368, abs=0.03)  # exp(-1)
    assert cluster.link(0, 1).transfer_s(0) == 1.25 and cluster.air.delay_s(1, 0, 0) != draws[0]
    timeline = at_once(cluster, [(0, 1, 0)] * 3)
    assert ends(timeline) == pytest.approx([1 + max(draws[: number + 1]) for number in range(3)])  # in order
    schedule = Schedule.from_text("rank 0\nin v\nSEND 0>1 (v) -> ()\nrank 1\nRECV 0>1 () -> (v)\n")
    one = Program.on(cluster, schedule, TableCosts(seconds_by_kind={}, cluster=cluster))
    assert simulate(chained([one] * 3)).makespan_s == pytest.approx(1 + max(draws[:3]))


def test_lost_frames_take_the_air_again() -> None:
    """A fifth of the frames is lost, so each needs the air 1.25 times in the mean, with the access point and directly,
    in messages, collectives and prices, on slowed links, too."""
    plain = replace(stations(100, 50, 100), pairs={"d0>d2": Link(bytes_per_s=50)})
    losing = replace(plain, frame_loss=0.2)
    for transfers in ([(0, 1, 100)], [(0, 2, 100)], [(0, 1, 100), (2, 1, 100)]):
        assert ends(at_once(losing, transfers)) == pytest.approx(
            [1.25 * end for end in ends(at_once(plain, transfers))]
        )
    for way in ((0, 1), (0, 2)):
        assert losing.link(*way).transfer_s(80) == pytest.approx(plain.link(*way).transfer_s(100))
    assert collective_s(losing, "ALLREDUCE", (0, 1, 2), 240) == pytest.approx(
        collective_s(plain, "ALLREDUCE", (0, 1, 2), 300)
    )
    slow = losing.with_slow_links({"d0>d1": 3.0})
    assert slow.link(0, 1).transfer_s(100) == pytest.approx(3 * losing.link(0, 1).transfer_s(100))


TICK_S = 1 / 512


def reference(cluster: Cluster, producers: Sequence[float], transfers: Transfers) -> list[tuple[float, float]]:
    """Return (start, end) of transfers whose values are ready at given times, by small steps of the clock."""
    air = cluster.air
    assert air is not None
    left_s = [air.transfer_s(*transfer) for transfer in transfers]
    starts: dict[int, float] = {}
    off_air: dict[int, float] = {}
    over: dict[int, float] = {}
    since: dict[int, float] = {}
    now_s = 0.0
    while len(over) < len(transfers):
        for number, end_s in off_air.items():
            if number not in over and end_s <= now_s:
                over[number] = end_s
        for number, (source, destination, _) in enumerate(transfers):
            earlier = [n for n in range(number) if transfers[n][:2] == (source, destination)]
            if number not in since and producers[number] <= now_s and all(n in off_air for n in earlier):
                since[number] = now_s
        running = [number for number in starts if number not in off_air]
        busy = {transfers[n][0] for n in running}
        for number in sorted(set(since) - set(starts), key=lambda n: (since[n], transfers[n][0], n)):
            if transfers[number][0] not in busy:
                busy.add(transfers[number][0])
                starts[number] = now_s
        sending = [number for number in starts if number not in off_air]
        for number in sending:
            left_s[number] -= TICK_S / len(sending)
            if left_s[number] <= 0:
                off_air[number] = now_s + TICK_S + cluster.link(*transfers[number][:2]).latency_s
        now_s += TICK_S
    return [(starts[number], over[number]) for number in range(len(transfers))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sharing_as_in_the_time_stepped_reference(data: st.DataObject) -> None:
    """Random values at random times over stations of random rates."""
    size = data.draw(st.integers(2, 5))
    cluster = stations(*(data.draw(st.sampled_from([20, 50, 100])) for _ in range(size)), latency_s=0.25)
    ops: list[list[Op]] = [[] for _ in range(size)]
    transfers, ready, seconds, clocks = [], [], {}, [0.0] * size
    for number in range(data.draw(st.integers(1, 7))):
        source = data.draw(st.integers(0, size - 1))
        destination = data.draw(st.integers(0, size - 1).filter(lambda rank, source=source: rank != source))
        transfers.append((source, destination, data.draw(st.integers(10, 120))))
        kind, value = f"P{'ABCDEFG'[number]}", Value(f"v{number}")
        seconds[kind] = data.draw(st.floats(0.1, 3))
        clocks[source] += seconds[kind]
        ready.append(clocks[source])
        ops[source] += [Op(kind, 0, NONE, NONE, (), (value,)), send(value, source, destination)]
        ops[destination].append(recv(value, source, destination))
    sizes = {f"v{number}": nbytes for number, (_, _, nbytes) in enumerate(transfers)}
    costs = TableCosts(seconds_by_kind=seconds, bytes_by_name=sizes, cluster=cluster)
    timeline = simulate(Program.on(cluster, Schedule(ops=tuple(map(tuple, ops))), costs))
    # Where two events are closer than the reference's steps, their order is chance.
    times = sorted({*(span.start_s for span in timeline.spans), *(span.end_s for span in timeline.spans), *ready})
    near = 8 * TICK_S * len(transfers)
    assume(all(b - a > near or b - a < 1e-9 for a, b in pairwise(times)))
    spans = {span.op.reads[0].name: span for span in timeline.spans if span.op.kind == SEND}
    for number, (start_s, end_s) in enumerate(reference(cluster, ready, transfers)):
        span = spans[f"v{number}"]
        assert (span.start_s, span.end_s) == (pytest.approx(start_s, abs=near), pytest.approx(end_s, abs=near))
