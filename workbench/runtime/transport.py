"""Move values between ranks: one thread sends in order, one thread per source receives, the compute thread only waits.

The threads keep transfers going while the rank computes (gloo makes progress in the background) and take the
times that the timeline shows. `PacedLinks` stands in for the network where the kernel cannot shape it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from workbench.core.cluster import Cluster
from workbench.core.collective_times import broadcast_s, ring_allreduce_s
from workbench.core.costs import Spec
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import ALLREDUCE, BROADCAST, RECV, Op, Value
from workbench.core.timeline import Span

_SEE_FIRST = "See the first device that failed."


class Arrival(NamedTuple):
    """A value and the moment at which it was there, in seconds of the monotonic clock."""

    content: Any
    time_s: float


class Mailbox:
    """The values present on this rank: written by the compute thread and the receivers, awaited by the compute thread.

    One thread waits at a time.  A value that is there costs no lock: dict operations are atomic.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._values: dict[Value, Arrival] = {}
        self._sources: dict[Value, int] = {}
        self._awaited: Value | None = None
        self._arrived = threading.Event()
        self._failure: BaseException | None = None

    def expect(self, value: Value, source: int) -> None:
        """Note from which rank a value will come."""
        self._sources[value] = source

    def put(self, value: Value, content: Any, time_s: float) -> None:
        """Store a value and wake who waits for it."""
        self._values[value] = Arrival(content, time_s)
        if self._awaited == value:
            self._arrived.set()

    def get(self, value: Value) -> Arrival:
        """Wait for a value.  Raises DeviceLostError if its sender failed or fell silent."""
        found = self._values.get(value)
        if found is not None:
            return found
        deadline_s = time.monotonic() + self._timeout_s
        self._awaited = value
        try:
            while True:
                # Cleared first and looked for then: what is stored in between wakes us.
                self._arrived.clear()
                found = self._values.get(value)
                if found is not None:
                    return found
                if self._failure is not None:
                    raise DeviceLostError(self._asked(value), f"A transfer failed: {self._failure}.", _SEE_FIRST)
                if not self._arrived.wait(deadline_s - time.monotonic()):
                    raise DeviceLostError(
                        self._asked(value),
                        f"It did not come within {self._timeout_s:g} s.",
                        "Check that every device still runs.",
                    )
        finally:
            self._awaited = None

    def _asked(self, value: Value) -> str:
        return f"Value {value} was awaited from {f'rank {self._sources[value]}' if value in self._sources else 'this rank itself'}."

    def drop(self, value: Value) -> None:
        """Forget a value after its last read."""
        self._values.pop(value, None)
        self._sources.pop(value, None)

    def take_all(self) -> dict[Value, Any]:
        """Return what is left, and empty the box."""
        left, self._values = self._values, {}
        return {value: arrival.content for value, arrival in left.items()}

    def fail(self, error: BaseException) -> None:
        """Tell the compute thread that a communication thread failed."""
        self._failure = self._failure or error
        self._arrived.set()

    def raise_failure(self) -> None:
        """Raise DeviceLostError if a communication thread has failed."""
        if self._failure is not None:
            raise DeviceLostError("A transfer was under way.", f"It failed: {self._failure}.", _SEE_FIRST)


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedLinks:
    """Makes messages take as long as the cluster's links would: for fidelity 'paced', where the kernel does not shape them."""

    cluster: Cluster
    rank: int

    def transfer_s(self, destination: int, nbytes: int) -> float:
        """Return latency plus bytes over the link's rate, in seconds."""
        return self.cluster.link(self.rank, destination).transfer_s(nbytes)

    def collective_s(self, kind: str, ranks: tuple[int, ...], nbytes: int) -> float:
        """Return the seconds of an all-reduce or a broadcast."""
        return (ring_allreduce_s if kind == ALLREDUCE else broadcast_s)(self.cluster, ranks, nbytes)


class Transport:
    """Sends, receives and reduces for one rank over a gloo process group.  Close it, or use it as a context manager.

    group: a torch ProcessGroup of all ranks.  subgroup: returns the group of some ranks (called on its members only).
    paced_links: None where the kernel shapes the links.  window: receives posted ahead per source.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        rank: int,
        *,
        subgroup: Callable[[tuple[int, ...]], torch.distributed.ProcessGroup],
        paced_links: PacedLinks | None = None,
        timeout_s: float = 30.0,
        window: int = 4,
    ) -> None:
        self._group, self._rank, self._subgroup = group, rank, subgroup
        self._paced_links, self._window = paced_links, window
        self.mailbox = Mailbox(timeout_s)
        self._spans: list[Span] = []
        self._sends: queue.SimpleQueue = queue.SimpleQueue()
        self._receives: dict[int, queue.SimpleQueue] = {}
        self._sent: dict[int, int] = {}
        self._threads = [threading.Thread(target=self._send_loop, name="send", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, ops: Iterable[Op], spec: Callable[[Value], Spec]) -> None:
        """Announce the RECVs of a step, in order; their values appear in the mailbox."""
        for op in ops:
            if op.kind != RECV:
                continue
            source = op.ranks[0]
            if source not in self._receives:
                self._receives[source] = queue.SimpleQueue()
                thread = threading.Thread(target=self._receive_loop, args=(source,), name=f"receive-{source}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self.mailbox.expect(op.writes[0], source)
            self._receives[source].put((op, spec(op.writes[0])))

    def send(self, op: Op, content: torch.Tensor, done: Callable[[], None]) -> None:
        """Queue a tensor for op.ranks[1]; `done` is called when it has left."""
        self._sends.put((op, content, done))

    def collective(self, op: Op, content: torch.Tensor) -> None:
        """Sum a tensor over op.ranks (ALLREDUCE), or copy op.ranks[0]'s to the others (BROADCAST), in place."""
        self._spans.append(reduce(op, content, self._subgroup(op.ranks), self._rank, self._paced_links))

    def take_spans(self) -> list[Span]:
        """Return the communication spans since the last call, monotonic seconds."""
        spans, self._spans = self._spans, []
        return spans

    def flush(self) -> None:
        """Wait until every queued send has left.  Raises DeviceLostError if one failed."""
        left = threading.Event()
        self._sends.put((None, None, left.set))
        while not left.wait(0.5):
            self.mailbox.raise_failure()
        self.mailbox.raise_failure()

    def close(self) -> None:
        """End the threads; queued transfers are abandoned."""
        self._sends.put(None)
        for receives in self._receives.values():
            receives.put(None)

    def _send_loop(self) -> None:
        try:
            while (item := self._sends.get()) is not None:
                op, content, done = item
                if op is not None:
                    destination = op.ranks[1]
                    content = content.contiguous()
                    nbytes = content.numel() * content.element_size()
                    start = time.monotonic()
                    if self._paced_links is not None:
                        time.sleep(self._paced_links.transfer_s(destination, nbytes))
                    tag = self._sent.get(destination, 0)
                    self._sent[destination] = tag + 1
                    self._group.send([content], destination, tag).wait()
                    self._spans.append(Span(self._rank, op, start, time.monotonic(), nbytes))
                done()
        except BaseException as error:  # handed to the compute thread, which raises it
            self.mailbox.fail(error)

    def _receive_loop(self, source: int) -> None:
        posted: list[tuple[Op, torch.Tensor, Any]] = []
        tag = 0
        waiting = self._receives[source]
        try:
            while True:
                while len(posted) < self._window:
                    try:
                        item = waiting.get(block=not posted)
                    except queue.Empty:
                        break
                    if item is None:
                        return
                    op, spec = item
                    buffer = empty(spec)
                    posted.append((op, buffer, self._group.recv([buffer], source, tag)))
                    tag += 1
                op, buffer, work = posted.pop(0)
                start = time.monotonic()
                work.wait()
                end = time.monotonic()
                nbytes = buffer.numel() * buffer.element_size()
                self.mailbox.put(op.writes[0], buffer, end)
                self._spans.append(Span(self._rank, op, start, end, nbytes))
        except BaseException as error:  # handed to the compute thread, which raises it
            self.mailbox.fail(error)


def empty(spec: Spec) -> torch.Tensor:
    """Return an uninitialized tensor of a spec."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def reduce(op: Op, content: torch.Tensor, group: torch.distributed.ProcessGroup, rank: int, paced_links: PacedLinks | None) -> Span:
    """Sum a tensor over op.ranks (ALLREDUCE), or copy op.ranks[0]'s to the others (BROADCAST), in place; return what it took.

    group: of op.ranks.  rank: this one.
    """
    start = time.monotonic()
    if op.kind == ALLREDUCE:
        _wait(group.allreduce([content]), op)
        share = 2 * (len(op.ranks) - 1) / len(op.ranks)
    else:
        assert op.kind == BROADCAST, f"{op.kind} is not a collective of this transport"
        _wait(group.broadcast([content], _broadcast_options(op.ranks)), op)
        share = float(op.ranks[0] == rank)
    nbytes = content.numel() * content.element_size()
    if paced_links is not None:
        # All members leave a collective at once, so each can wait out the links' time by itself.
        time.sleep(paced_links.collective_s(op.kind, op.ranks, nbytes))
    return Span(rank, op, start, time.monotonic(), round(share * nbytes))


def _wait(work: Any, op: Op) -> None:
    """Wait for a collective until the group's timeout.  Raises DeviceLostError."""
    try:
        work.wait()
    except RuntimeError as error:
        raise DeviceLostError(
            f"{op.kind} of ranks {', '.join(map(str, op.ranks))} was under way.", f"It failed: {str(error).splitlines()[0]}.", _SEE_FIRST
        ) from error


def _broadcast_options(ranks: tuple[int, ...]) -> torch.distributed.BroadcastOptions:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = sorted(ranks).index(ranks[0])  # a subgroup numbers its members in ascending order
    options.rootTensor = 0
    return options
