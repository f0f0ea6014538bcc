"""Values leave the moment they are present, in their channel's order: what passes through, and sums of a ring, need no stream."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_pairs import cluster_of_two, on_executors, program

from workbench.core.costs import Spec
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import NONE, RING, Op, Schedule, Value, recv, send
from workbench.core.timeline import Span
from workbench.methods.common.session import transfers_of
from workbench.runtime.executor import Execution, Executor
from workbench.runtime.pacing import PacedLinks
from workbench.schedules import check

SIZE = 500


def value(name: str, part: int = NONE) -> Value:
    return Value(name, 0, NONE, part)


def compute(kind: str, reads: tuple[Value, ...], writes: tuple[Value, ...], stream: str = "compute") -> Op:
    return Op(kind, 0, NONE, NONE, reads, writes, (), stream)


def run(schedule: Schedule, handlers: dict[str, Callable[..., tuple[Any, ...]]], size: int = SIZE, **settings: Any) -> list[Execution]:
    check(schedule)

    def work(executor: Executor) -> Execution:
        inputs = {name: torch.full((size,), float(executor.rank + 1)) for name in schedule.inputs[executor.rank]}
        return executor.run(program(schedule, lambda value: Spec((size,))), handlers, inputs)

    return on_executors(schedule.world_size, work, **settings)


def ring_of_three() -> Schedule:
    """Rank 0's tile goes on by rank 1 to rank 2; a sum comes back over rank 1, which adds its own term on the ring's stream."""
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
    """Rank 1 computes until rank 0 has what came through rank 1: this ends only if the transport passes it on and adds by itself."""
    arrived = threading.Event()

    def long(op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        assert arrived.wait(10), "the sum did not come round while rank 1 computed"
        return (torch.zeros(1),)

    def last(op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
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
    assert busy.start_s <= added.start_s and added.end_s <= busy.end_s
    assert [span.op.kind for span in end.spans if not span.op.is_communication] == ["FIRST"]


def swap(count: int) -> Schedule:
    """Two ranks send each other `count` values; each sums what came, in the reverse of the order in which it was sent."""
    ops = []
    for rank in range(2):
        mine, theirs = ([value(f"from-{one}", part) for part in range(count)] for one in (rank, 1 - rank))
        made = compute("MAKE", (), tuple(mine))
        sums = compute("SUM", tuple(reversed(theirs)), (value("total"),))
        ops.append((made, *(send(one, rank, 1 - rank) for one in mine), *(recv(one, 1 - rank, rank) for one in theirs), sums))
    return Schedule(ops=tuple(ops), outputs=((value("total"),),) * 2)


def makers(size: int) -> dict[str, Any]:
    return {
        "MAKE": lambda op, reads: tuple(torch.full((size,), float(one.part)) for one in op.writes),
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


def test_paced_messages_take_as_long_as_the_link() -> None:
    cluster = cluster_of_two(bytes_per_s=4 * SIZE / 0.01, latency_s=0.002)
    done = run(swap(3), makers(SIZE), paced_links=lambda rank: PacedLinks(cluster=cluster, rank=rank))
    for execution in done:
        sent: list[Span] = [span for span in execution.spans if span.op.kind == "SEND"]
        assert len(sent) == 3 and all(span.end_s - span.start_s >= 0.014 for span in sent)
        assert all(earlier.end_s <= later.start_s for earlier, later in itertools.pairwise(sent)), "one after the other"


def test_a_slow_link_delays_what_is_sent_over_it() -> None:
    """An injected fault, whether the kernel shapes the links or not; the receiver's end tells how long a message took."""
    links = PacedLinks(cluster=cluster_of_two(bytes_per_s=4 * SIZE / 0.02, latency_s=0.0), rank=0)

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
            assert over.wait(20)  # silent, but there
            return
        with pytest.raises(DeviceLostError, match="tile:0"):
            executor.run(program(schedule, lambda value: Spec((SIZE,))), {}, {})
        over.set()

    on_executors(3, work, timeout_s=0.3)


def test_paced_times_are_the_links() -> None:
    links = PacedLinks(cluster=cluster_of_two(bytes_per_s=1e6, latency_s=0.001), rank=0)
    assert links.transfer_s(1, 500_000) == pytest.approx(0.502)
    assert links.collective_s("ALLREDUCE", (0, 1), 500_000) == pytest.approx(2 * (0.002 + 0.25))
    assert links.collective_s("ALLGATHER", (0, 1), 500_000) == pytest.approx(0.002 + 0.25)
    assert links.collective_s("REDUCESCATTER", (0, 1), 500_000) == pytest.approx(0.002 + 0.25)
    assert links.collective_s("BROADCAST", (0, 1), 500_000) == pytest.approx(0.502)
    assert links.collective_s("ALLREDUCE", (0,), 500_000) == 0
