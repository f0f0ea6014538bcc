"""Values leave the moment they are present, in their channel's order: what passes through, and sums of a ring, need no
stream."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gloo_pairs import cluster_of_two, on_executors, program

from tests.clusters import cluster_of
from tests.waiting import LIMIT_S
from workbench.core.cluster import Link
from workbench.core.costs import MESSAGE_S, Spec
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import NONE, RING, Op, Schedule, Value, recv, send
from workbench.core.timeline import Span
from workbench.methods.common.session import transfers_of
from workbench.runtime.executor import Contents, Execution, Executor
from workbench.runtime.pacing import RankLinks
from workbench.schedules import check

SIZE = 500


def value(name: str, part: int = NONE) -> Value:
    return Value(name, 0, NONE, part)


def compute(kind: str, reads: tuple[Value, ...], writes: tuple[Value, ...], stream: str = "compute") -> Op:
    return Op(kind, 0, NONE, NONE, reads, writes, (), stream)


def run(
    schedule: Schedule, handlers: dict[str, Callable[..., tuple[Any, ...]]], size: int = SIZE, **settings: Any
) -> list[Execution]:
    check(schedule)

    def work(executor: Executor) -> Execution:
        inputs = {name: torch.full((size,), float(executor.rank + 1)) for name in schedule.inputs[executor.rank]}
        return executor.run(program(schedule, lambda value: Spec((size,))), handlers, inputs)

    return on_executors(schedule.world_size, work, **settings)


def ring_of_three() -> Schedule:
    """Rank 0's tile goes on by rank 1 to rank 2; a sum comes back over rank 1, which adds its own term on the ring's
    stream."""
    tile, total, more, own, last = value("tile"), value("sum", 0), value("sum", 1), value("own"), value("last")
    return Schedule(
        ops=(
            (send(tile, 0, 1), recv(more, 1, 0), compute("LAST", (more,), (last,))),
            (
                compute("TERM", (), (own,)),
                recv(tile, 0, 1),
                send(tile, 1, 2),
                recv(total, 2, 1),
                compute("LONG", (), (value("long"),)),
                compute("ADD", (own, total), (more,), RING),
                send(more, 1, 0),
            ),
            (recv(tile, 1, 2), compute("FIRST", (tile,), (total,)), send(total, 2, 1)),
        ),
        inputs=((tile,), (), ()),
        outputs=((last,), (value("long"),), ()),
    )


def test_a_busy_stream_holds_nothing_up() -> None:
    """Rank 1 computes until rank 0 has what came through rank 1: this ends only if the transport passes it on and adds
    by itself."""
    arrived, busy_until_s = threading.Event(), list[float]()

    def long(op: Op, reads: Contents) -> Contents:
        assert arrived.wait(LIMIT_S), "the sum did not come round while rank 1 computed"
        busy_until_s.append(time.monotonic())
        return (torch.zeros(1),)

    def last(op: Op, reads: Contents) -> Contents:
        arrived.set()
        return reads

    handlers = {
        "TERM": lambda op, reads: (torch.full((SIZE,), 10.0),),
        "FIRST": lambda op, reads: (reads[0] + 100,),
        "ADD": lambda op, reads: (reads[1].add_(reads[0]),),
        "LONG": long,
        "LAST": last,
    }
    first, middle, end = run(ring_of_three(), handlers)
    assert first.outputs[value("last")][0].item() == 1 + 100 + 10
    kinds = [span.op.kind for span in middle.spans]
    assert sorted(kinds) == ["ADD", "LONG", "RECV", "RECV", "SEND", "SEND", "TERM"]
    (added,) = [span for span in middle.spans if span.op.kind == "ADD"]
    (busy,) = [span for span in middle.spans if span.op.kind == "LONG"]
    assert busy.start_s <= added.start_s and added.end_s <= busy_until_s[0]
    assert [span.op.kind for span in end.spans if not span.op.is_communication] == ["FIRST"]


class Recorder:
    """A process group that records what is asked of it, and when messages are sent."""

    def __init__(self, group: Any) -> None:
        self.group, self.calls, self.sent_s = group, list[str](), list[float]()

    def send(self, *arguments: Any) -> Any:
        self.calls.append("send")
        self.sent_s.append(time.monotonic())
        return self.group.send(*arguments)

    def recv(self, *arguments: Any) -> Any:
        self.calls.append("recv")
        return self.group.recv(*arguments)


def test_a_step_posts_its_receives_before_it_sends() -> None:
    """Else what tells the sources so would wait behind this rank's own messages."""
    values = [value("from", rank) for rank in range(2)]
    schedule = Schedule(
        ops=tuple((send(values[rank], rank, 1 - rank), recv(values[1 - rank], 1 - rank, rank)) for rank in range(2)),
        inputs=tuple((values[rank],) for rank in range(2)),
        outputs=tuple((values[1 - rank],) for rank in range(2)),
    )
    check(schedule)

    def work(executor: Executor) -> tuple[list[str], Any]:
        group = executor.transport._group = Recorder(executor.transport._group)  # type: ignore[assignment]
        inputs = {values[executor.rank]: torch.full((SIZE,), float(executor.rank))}
        done = executor.run(program(schedule, lambda value: Spec((SIZE,))), {}, inputs)
        return group.calls, done.outputs[values[1 - executor.rank]][0].item()

    assert on_executors(2, work) == [(["recv", "send"], 1.0), (["recv", "send"], 0.0)]


def swap(count: int) -> Schedule:
    """Two ranks send each other `count` values; each sums what came, in the reverse of the order in which it was
    sent."""
    ops = []
    for rank in range(2):
        mine, theirs = ([value(f"from-{one}", part) for part in range(count)] for one in (rank, 1 - rank))
        result = compute("MAKE", (), tuple(mine))
        sums = compute("SUM", tuple(reversed(theirs)), (value("total"),))
        ops.append(
            (result, *(send(one, rank, 1 - rank) for one in mine), *(recv(one, 1 - rank, rank) for one in theirs), sums)
        )
    return Schedule(ops=tuple(ops), outputs=((value("total"),),) * 2)


def makers(size: int) -> dict[str, Any]:
    return {
        "MAKE": lambda op, reads: tuple(torch.full((size,), float(value.part)) for value in op.writes),
        "SUM": lambda op, reads: (torch.stack(reads)[:, 0].clone(),),
    }


@pytest.mark.parametrize("size", [SIZE, 100_000])
def test_more_messages_than_are_posted_ahead_or_leave_at_once(size: int) -> None:
    count = 40
    for done in run(swap(count), makers(size), size):
        assert done.outputs[value("total")].tolist() == [float(part) for part in reversed(range(count))]
        sent = [span for span in done.spans if span.op.kind == "SEND"]
        assert [span.op.part for span in sent] == list(range(count)) and all(span.nbytes == 4 * size for span in sent)
        assert [span.op.part for span in done.spans if span.op.kind == "RECV"] == list(range(count))


def test_a_channel_keeps_its_order() -> None:
    """What is present first waits for what the list names before it, as in the simulator."""
    early, late, end = value("early"), value("late"), value("end")
    schedule = Schedule(
        ops=(
            (compute("EARLY", (), (early,)), compute("LATE", (early,), (late,)), send(late, 0, 1), send(early, 0, 1)),
            (recv(late, 0, 1), recv(early, 0, 1), compute("END", (early, late), (end,))),
        ),
        outputs=((), (end,)),
    )
    handlers = {
        "EARLY": lambda op, reads: (torch.ones(SIZE),),
        "LATE": lambda op, reads: (2 * reads[0],),
        "END": lambda op, reads: (reads[0] - reads[1],),
    }
    first, second = run(schedule, handlers)
    assert second.outputs[end][0].item() == -1
    assert [span.op.reads[0] for span in first.spans if span.op.kind == "SEND"] == [late, early]


LINK_S = 0.014
"""Both latencies, and 10 ms for the bytes."""


def emulated(fidelity: Any, count: int) -> Callable[[int], RankLinks]:
    """Return the links of each of some ranks, over which a message of SIZE takes LINK_S."""
    cluster = cluster_of("abcdef"[:count], bytes_per_s=4 * SIZE / 0.01, latency_s=0.002, host_share=1.0)
    return lambda rank: RankLinks(cluster=cluster, rank=rank, fidelity=fidelity)


def transfers(done: list[Execution], kind: str, rank: int) -> list[Span]:
    return sorted((span for span in done[rank].spans if span.op.kind == kind), key=lambda span: span.start_s)


def one_after_the_other(spans: list[Span]) -> bool:
    return all(earlier.start_s + LINK_S <= later.start_s + 1e-9 for earlier, later in itertools.pairwise(spans))


@pytest.mark.parametrize("fidelity", ["kernel", "paced"])
def test_a_message_over_an_emulated_link_takes_its_latency_and_its_bytes(fidelity: str) -> None:
    """Both ends agree on when a message begins, because it carries that time; the next one begins when it has ended."""
    done = run(swap(3), makers(SIZE), links=emulated(fidelity, 2))
    for rank in range(2):
        sent, received = transfers(done, "SEND", rank), transfers(done, "RECV", 1 - rank)
        assert len(sent) == 3 and one_after_the_other(sent)
        assert [span.start_s for span in received] == [span.start_s for span in sent]
        assert all(span.end_s - span.start_s >= LINK_S for span in (*sent, *received))
        assert done[rank].outputs[value("total")].tolist() == [2.0, 1.0, 0.0]


def test_a_message_that_has_passed_shared_air_is_held_back_for_latency_jitter_and_a_frame() -> None:
    """Each message from when it arrives.  A later one that may go earlier, by its jitter, still comes after it."""
    cluster = replace(emulated("kernel", 2)(0).cluster, medium="wifi", jitter_s=0.01)

    def links(rank: int) -> RankLinks:
        return RankLinks(cluster=cluster, rank=rank, fidelity="kernel", dilation=2.0)

    one, air = links(0), cluster.air
    assert air is not None and one.is_shared and not replace(one, fidelity="real").is_shared
    frame_s = 2 * 4 * SIZE / air.bytes_per_s[0]
    for number in (0, 1, 7):
        extra_s = 0.004 + air.delay_s(0, 1, number) + frame_s
        assert one.delay_s(0, 1, 4 * SIZE, number) == pytest.approx(2 * extra_s + MESSAGE_S)
    slow = replace(one, cluster=replace(cluster, pairs={"a>b": Link(bytes_per_s=1e3, latency_s=0.004)}))
    assert slow.delay_s(0, 1, 4 * SIZE, 0) == one.delay_s(0, 1, 4 * SIZE, 0), "the kernel counts the frame's copies"
    done = run(swap(3), makers(SIZE), links=links)
    for rank in range(2):
        sent, received = transfers(done, "SEND", rank), transfers(done, "RECV", 1 - rank)
        assert [str(span.op.writes[0]) for span in received] == [str(span.op.reads[0]) for span in sent]
        assert [span.end_s for span in received] == sorted(span.end_s for span in received)
        for number, span in enumerate(received):
            assert span.end_s - span.start_s >= one.delay_s(rank, 1 - rank, 4 * SIZE, number)
        assert done[rank].outputs[value("total")].tolist() == [2.0, 1.0, 0.0]


def two_messages(kind: str) -> Schedule:
    """Two messages leave rank 0 for the others, or arrive there from them."""
    first, second = value("first"), value("second")
    pairs = {first: (0, 1), second: (0, 2)} if kind == "SEND" else {first: (1, 0), second: (2, 0)}
    return Schedule(
        ops=tuple(
            tuple((send if rank == pair[0] else recv)(one, *pair) for one, pair in pairs.items() if rank in pair)
            for rank in range(3)
        ),
        inputs=tuple(tuple(one for one, pair in pairs.items() if rank == pair[0]) for rank in range(3)),
        outputs=tuple(tuple(one for one, pair in pairs.items() if rank == pair[1]) for rank in range(3)),
    )


@pytest.mark.parametrize("fidelity", ["kernel", "paced"])
def test_messages_of_one_device_leave_one_after_the_other(fidelity: str) -> None:
    """To two others: as in the simulator, for the latency too."""
    spans = transfers(run(two_messages("SEND"), {}, links=emulated(fidelity, 3)), "SEND", 0)
    assert len(spans) == 2 and one_after_the_other(spans)


@pytest.mark.parametrize("fidelity", ["kernel", "paced"])
def test_messages_to_one_device_share_its_ingress(fidelity: str) -> None:
    """From two others: both begin when they are sent, and the last one has come when the ingress has carried both, for
    the latency too.
    """
    done = run(two_messages("RECV"), {}, links=emulated(fidelity, 3))
    first, second = transfers(done, "RECV", 0)
    sent = sorted(span.start_s for rank in (1, 2) for span in transfers(done, "SEND", rank))
    assert [first.start_s, second.start_s] == sent
    both_s = max(first.start_s + 2 * LINK_S, second.start_s + LINK_S)
    assert max(first.end_s, second.end_s) >= both_s - 1e-9


@pytest.mark.parametrize("fidelity", ["kernel", "paced"])
def test_a_message_is_not_under_way_before_the_one_before_it_has_left(fidelity: str) -> None:
    """Else TCP would let them take turns, and the first would arrive later than in the simulator."""
    schedule = two_messages("SEND")

    def work(executor: Executor) -> tuple[list[float], list[Span]]:
        group = executor.transport._group = Recorder(executor.transport._group)  # type: ignore[assignment]
        inputs = {name: torch.zeros(SIZE) for name in schedule.inputs[executor.rank]}
        return group.sent_s, executor.run(program(schedule, lambda value: Spec((SIZE,))), {}, inputs).spans

    sent_s, spans = on_executors(3, work, links=emulated(fidelity, 3))[0]
    assert len(sent_s) == len(spans) == 2
    assert sent_s[1] >= min(span.start_s for span in spans) + LINK_S


@pytest.mark.parametrize(
    ("kind", "rounds"), [("ALLREDUCE", 4), ("ALLGATHER", 2), ("REDUCESCATTER", 2), ("BROADCAST", 2)]
)
def test_collectives_over_kernel_links_take_their_latency(kind: str, rounds: int) -> None:
    """The kernel emulates their bytes.  rounds: of messages among three devices."""

    def work(executor: Executor) -> float:
        op, rows = Op(kind, ranks=(0, 1, 2)), (1, 1, 1) if kind != "ALLGATHER" else (3, 3, 3)
        result, span = executor.transport.collective(op, torch.ones(3), rows, time.monotonic())
        assert result.sum() > 0
        return span.end_s - span.start_s

    assert min(on_executors(3, work, links=emulated("kernel", 3))) >= rounds * 0.004


def test_a_slow_link_delays_what_is_sent_over_it() -> None:
    """An injected fault, whether the kernel shapes the links or not; the receiver's end tells how long a message
    took."""
    links = RankLinks(cluster=cluster_of_two(bytes_per_s=4 * SIZE / 0.02, latency_s=0.0), rank=0, fidelity="real")

    def work(executor: Executor) -> Execution:
        if executor.rank == 0:
            executor.transport.slow_links = {links.cluster.devices[1].name: 4.0}
        return executor.run(program(swap(1), lambda value: Spec((SIZE,))), makers(SIZE), {})

    done = on_executors(2, work, links=links)
    begun, ended = (next(one for one in transfers_of(links.cluster, rank.spans) if one.pair == "a>b") for rank in done)
    assert begun.value == ended.value and begun.expected_s == ended.expected_s == pytest.approx(0.02)
    assert ended.time_s - begun.time_s >= 0.06


@pytest.mark.parametrize("passes", [False, True])
def test_a_silent_peer_is_an_error(passes: bool) -> None:
    """Whether a value is awaited or only to be passed on."""
    tile, over = value("tile"), threading.Event()
    schedule = Schedule(
        ops=(
            (send(tile, 0, 1),),
            (recv(tile, 0, 1), *((send(tile, 1, 2),) if passes else ())),
            ((recv(tile, 1, 2),) if passes else ()),
        ),
        inputs=((tile,), (), ()),
        outputs=((), () if passes else (tile,), ()),
    )

    def work(executor: Executor) -> None:
        if executor.rank != 1:
            assert over.wait(LIMIT_S)  # silent, but there
            return
        with pytest.raises(DeviceLostError, match="tile:0"):
            executor.run(program(schedule, lambda value: Spec((SIZE,))), {}, {})
        over.set()

    on_executors(3, work, timeout_s=0.3)


def test_paced_times_are_the_links() -> None:
    links = RankLinks(cluster=cluster_of_two(bytes_per_s=1e6, latency_s=0.001), rank=0, fidelity="paced")
    assert links.transfer_s(0, 1, 500_000) == links.added_s(0, 1, 500_000) == pytest.approx(0.502)
    assert links.collective_s("ALLREDUCE", (0, 1), 500_000) == pytest.approx(2 * (0.002 + 0.25 + MESSAGE_S))
    assert links.collective_s("ALLGATHER", (0, 1), 500_000) == pytest.approx(0.002 + 0.25 + MESSAGE_S)
    assert links.collective_s("REDUCESCATTER", (0, 1), 500_000) == pytest.approx(0.002 + 0.25 + MESSAGE_S)
    assert links.collective_s("BROADCAST", (0, 1), 500_000) == pytest.approx(0.502 + MESSAGE_S)
    assert links.collective_s("ALLREDUCE", (0,), 500_000) == 0
    slowly = replace(links, dilation=4.0)
    assert slowly.transfer_s(0, 1, 500_000) == pytest.approx(4 * 0.502)
    assert slowly.occupied_s(0, 1, 500_000) == pytest.approx(4 * (0.502 + MESSAGE_S))
    assert slowly.added_s(0, 1, 500_000) == pytest.approx(4 * 0.502 + 3 * MESSAGE_S), (
        "this machine takes MESSAGE_S once by itself"
    )
    assert slowly.collective_s("ALLREDUCE", (0, 1), 500_000) == pytest.approx(4 * (0.504 + 2 * MESSAGE_S))
    assert slowly.collective_delay_s("ALLREDUCE", (0, 1)) == pytest.approx(4 * 0.004 + 2 * 3 * MESSAGE_S), (
        "so does each round of a collective on shared air"
    )
    kernel, real = replace(links, fidelity="kernel"), replace(links, fidelity="real")
    assert kernel.added_s(0, 1, 500_000) == pytest.approx(0.002) and real.added_s(0, 1, 500_000) == 0
    assert kernel.collective_s("ALLREDUCE", (0, 1), 500_000) == links.collective_s("ALLREDUCE", (0, 1), 500_000), (
        "the kernel's part of it is over by then"
    )
    assert kernel.collective_delay_s("BROADCAST", (0, 1)) == pytest.approx(0.002)
