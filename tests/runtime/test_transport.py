from __future__ import annotations

import itertools
import threading

import pytest
import torch
from gloo_pairs import cluster_of_two, on_two_ranks

from workbench.core.collective_times import broadcast_s, ring_allreduce_s
from workbench.core.costs import Spec
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import ALLREDUCE, BROADCAST, RECV, SEND, Op, Value, recv, send
from workbench.core.timeline import Span
from workbench.runtime.transport import Mailbox, PacedLinks, Transport

SIZE = 1000  # floats


def act(microbatch: int) -> Value:
    return Value("act", 0, microbatch)


def spec(value: Value) -> Spec:
    return Spec((SIZE,))


def exchange(count: int, *, reverse: bool = False):
    """Rank 0 sends `count` tensors, rank 1 returns what it got, in the order in which it asks for them."""

    def work(rank: int, transport: Transport) -> tuple[list[float], list[Span]]:
        values = [act(m) for m in range(count)]
        got = []
        if rank == 0:
            for m, value in enumerate(values):
                transport.send(send(value, 0, 1), torch.full((SIZE,), float(m)), lambda: None)
            transport.flush()
        else:
            transport.expect([recv(value, 0, 1) for value in values], spec)
            for value in reversed(values) if reverse else values:
                got.append(transport.mailbox.get(value).content[0].item())
        return got, transport.take_spans()

    return work


@pytest.mark.parametrize("reverse", [False, True])
def test_values_arrive_whole_and_may_be_awaited_in_any_order(reverse: bool) -> None:
    (_, sent), (got, received) = on_two_ranks(exchange(12, reverse=reverse))  # more than the window of posted receives
    assert got == [float(m) for m in (range(11, -1, -1) if reverse else range(12))]
    assert [span.op.reads[0] for span in sent] == [act(m) for m in range(12)]
    assert [span.op.writes[0] for span in received] == [act(m) for m in range(12)]
    assert {span.op.kind for span in sent + received} == {SEND, RECV}
    assert all(span.nbytes == 4 * SIZE for span in sent + received)


def test_paced_links_take_as_long_as_the_link() -> None:
    cluster = cluster_of_two(bytes_per_s=4 * SIZE / 0.02, latency_s=0.005)  # 20 ms a tensor, and both ends' latency
    (_, sent), (_, received) = on_two_ranks(exchange(3), paced_links=lambda rank: PacedLinks(cluster=cluster, rank=rank))
    assert all(span.end_s - span.start_s >= 0.03 for span in sent)
    assert all(earlier.end_s <= later.start_s for earlier, later in itertools.pairwise(sent))  # one after the other
    assert all(
        received_span.end_s >= sent_span.start_s + 0.03 for sent_span, received_span in zip(sent, received, strict=True)
    )  # both in this process: one clock


@pytest.mark.parametrize(("kind", "expected"), [(ALLREDUCE, [3.0, 3.0]), (BROADCAST, [1.0, 1.0])])
def test_collectives(kind: str, expected: list[float]) -> None:
    cluster = cluster_of_two(bytes_per_s=4 * SIZE / 0.02)

    def work(rank: int, transport: Transport) -> tuple[float, list[Span]]:
        tensor = torch.full((SIZE,), float(rank + 1))
        transport.collective(Op(kind, 0, -1, -1, (), (Value("gsum", 0, -1, rank),), (0, 1), "collective"), tensor)
        return tensor[0].item(), transport.take_spans()

    results = on_two_ranks(work, paced_links=lambda rank: PacedLinks(cluster=cluster, rank=rank))
    assert [value for value, _ in results] == expected
    lasts = (ring_allreduce_s if kind == ALLREDUCE else broadcast_s)(cluster, (0, 1), 4 * SIZE)
    assert lasts == pytest.approx(0.02)
    assert all(span.end_s - span.start_s >= lasts for _, [span] in results)


def test_paced_times_are_the_links() -> None:
    links = PacedLinks(cluster=cluster_of_two(bytes_per_s=1e6, latency_s=0.001), rank=0)
    assert links.transfer_s(1, 500_000) == pytest.approx(0.502)
    assert links.collective_s(ALLREDUCE, (0, 1), 500_000) == pytest.approx(2 * (0.002 + 0.25))
    assert links.collective_s(BROADCAST, (0, 1), 500_000) == pytest.approx(0.502)
    assert links.collective_s(ALLREDUCE, (0,), 500_000) == 0


def test_a_silent_peer_is_an_error() -> None:
    def work(rank: int, transport: Transport) -> None:
        if rank == 1:
            transport.expect([recv(act(0), 0, 1)], spec)
            with pytest.raises(DeviceLostError, match=r"act:0\.0"):
                transport.mailbox.get(act(0))

    on_two_ranks(work, timeout_s=0.3)


def test_a_failed_transfer_wakes_whoever_waits() -> None:
    mailbox = Mailbox(timeout_s=30)
    threading.Timer(0.05, mailbox.fail, args=(ConnectionError("gone"),)).start()
    with pytest.raises(DeviceLostError, match="gone"):
        mailbox.get(act(0))
    with pytest.raises(DeviceLostError, match="gone"):
        mailbox.raise_failure()
    mailbox.put(act(1), "there", 1.0)
    assert mailbox.get(act(1)) == ("there", 1.0)  # what has come stays readable
    mailbox.drop(act(1))
    assert mailbox.take_all() == {}
