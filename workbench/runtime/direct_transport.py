"""Move many small values between ranks: a value leaves the moment it is there, from the thread that has it, without a queue between.

Where `transport.Transport` waits for each message on a thread of its own, this one hands it to gloo and looks later whether it has left;
a value that only passes through (a tile on its way round a ring) is sent on by the thread that received it, whatever the compute thread
does meanwhile.  Of two messages to one rank the one that is there first goes first: each has a number, by which the receiver knows it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from workbench.core.costs import Spec
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import RECV, RING, SEND, Op, Value
from workbench.core.timeline import Span
from workbench.runtime.transport import Mailbox, PacedLinks, empty, reduce

WINDOW = 16
"""Receives posted ahead per source: a message whose receive is posted late waits for one more round trip."""
_TAGS = 1 << 30


class _Leaving(NamedTuple):
    """A message that gloo has: its tensor must live until it has left."""

    work: Any
    op: Op
    content: torch.Tensor
    start_s: float


class _Join:
    """An operation that runs on the thread that brings the last of what it reads."""

    def __init__(self, op: Op, run: Callable[[tuple[Any, ...]], None]) -> None:
        self.op, self.run = op, run
        self.contents: dict[Value, Any] = {}


class DirectTransport:
    """Sends, receives and reduces for one rank over a gloo process group.  Close it, or use it as a context manager.

    group, subgroup, paced_links, timeout_s: see Transport.  peers: the group's number of each rank that ops name (None: the same
    numbers), which differ where the devices that are left of a cluster have made a group of their own.
    """

    sends_by_itself = True

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        rank: int,
        *,
        subgroup: Callable[[tuple[int, ...]], torch.distributed.ProcessGroup],
        paced_links: PacedLinks | None = None,
        timeout_s: float = 30.0,
        window: int = WINDOW,
        peers: Mapping[int, int] | None = None,
    ) -> None:
        self._group, self._rank, self._subgroup, self._peers = group, rank, subgroup, peers
        self._paced_links, self._window, self._timeout_s = paced_links, window, timeout_s
        self.mailbox = Mailbox(timeout_s)
        self._spans: list[Span] = []
        self._outgoing: dict[Value, list[tuple[Op, int]]] = {}
        self._wanted: set[Value] = set()
        self._joins: dict[Value, _Join] = {}
        self._joining = threading.Lock()
        self._next_sent: dict[int, int] = {}
        self._next_received: dict[int, int] = {}
        self._leaving: deque[_Leaving] = deque()
        self._paced: queue.SimpleQueue = queue.SimpleQueue()
        self._receives: dict[int, queue.SimpleQueue] = {}
        if paced_links is not None:
            threading.Thread(target=self._paced_loop, name="send", daemon=True).start()

    def __enter__(self) -> DirectTransport:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def expect(self, ops: Iterable[Op], spec: Callable[[Value], Spec], outputs: Iterable[Value] = ()) -> None:
        """Announce the transfers of a step, in order: what is received appears in the mailbox, what is to be sent waits for its value.

        outputs: are kept, too; what nobody reads here and only passes through is not.
        """
        batches: dict[int, list[tuple[Op, Spec, int]]] = {}
        wanted = set(outputs)
        for op in ops:
            if op.kind == SEND:
                destination = op.ranks[1]
                number = self._next_sent.get(destination, 0)
                self._next_sent[destination] = (number + 1) % _TAGS
                self._outgoing.setdefault(op.reads[0], []).append((op, number))
            elif op.kind == RECV:
                source = op.ranks[0]
                self.mailbox.expect(op.writes[0], source)
                number = self._next_received.get(source, 0)
                self._next_received[source] = (number + 1) % _TAGS
                batches.setdefault(source, []).append((op, spec(op.writes[0]), number))
            elif op.stream != RING:
                wanted.update(op.reads)
        self._wanted = wanted
        for source, batch in batches.items():
            if source not in self._receives:
                self._receives[source] = queue.SimpleQueue()
                threading.Thread(target=self._receive_loop, args=(source,), name=f"receive-{source}", daemon=True).start()
            self._receives[source].put(batch)

    def join(self, op: Op, run: Callable[[tuple[Any, ...]], None]) -> None:
        """Call run(contents of op.reads) once all of them are present, on whichever thread brings the last."""
        join = _Join(op, run)
        for value in op.reads:
            self._joins[value] = join

    def present(self, value: Value, content: Any) -> None:
        """Take a value that is there now: send it to all that wait for it, and run what it completes.

        Raises DeviceLostError if a peer has gone.
        """
        if value in self._outgoing:
            self._send_out(value, content)
        join = self._joins.pop(value, None)
        if join is not None:
            with self._joining:
                join.contents[value] = content
                is_complete = len(join.contents) == len(join.op.reads)
            if is_complete:
                join.run(tuple(join.contents[read] for read in join.op.reads))

    def _send_out(self, value: Value, content: Any) -> None:
        for op, number in self._outgoing[value]:
            if self._paced_links is not None:
                self._paced.put((op, content, number))
                continue
            try:
                self._issue(op, content, number, time.monotonic())
            except RuntimeError as error:
                self.mailbox.fail(error)
                self.mailbox.raise_failure()
        del self._outgoing[value]  # last: what is not in here any more is gloo's

    def tidy(self) -> None:
        """Let go of what has left by now (on the compute thread)."""
        while self._leaving and self._leaving[0].work.is_completed():
            self._left(self._leaving.popleft())

    def collective(self, op: Op, content: torch.Tensor) -> None:
        """Sum a tensor over op.ranks (ALLREDUCE), or copy op.ranks[0]'s to the others (BROADCAST), in place."""
        self._spans.append(reduce(op, content, self._subgroup(op.ranks), self._rank, self._paced_links))

    def take_spans(self) -> list[Span]:
        """Return the communication spans since the last call, monotonic seconds.

        A SEND ends when it was seen to have left, which may be a little later than it did.
        """
        spans, self._spans = self._spans, []
        return spans

    def flush(self) -> None:
        """Wait until everything has left, also what only passes through.  Raises DeviceLostError if something could not."""
        deadline_s = time.monotonic() + self._timeout_s
        while self._outgoing:
            self.mailbox.raise_failure()
            if time.monotonic() > deadline_s:
                value = next(iter(self._outgoing), None)
                raise DeviceLostError(
                    f"Value {value} was to be passed on.", f"It did not come within {self._timeout_s:g} s.", "Check that every device runs."
                )
            time.sleep(2e-4)
        if self._paced_links is not None:
            left = threading.Event()
            self._paced.put(left)
            while not left.wait(0.5):
                self.mailbox.raise_failure()
        while self._leaving:
            self._left(self._leaving.popleft())
        self.mailbox.raise_failure()

    def close(self) -> None:
        """End the threads; transfers under way are abandoned."""
        self._paced.put(None)
        for receives in self._receives.values():
            receives.put(None)

    def _peer(self, rank: int) -> int:
        return rank if self._peers is None else self._peers[rank]

    def _issue(self, op: Op, content: torch.Tensor, number: int, start_s: float) -> None:
        content = content.contiguous()
        work = self._group.send([content], self._peer(op.ranks[1]), number)
        self._leaving.append(_Leaving(work, op, content, start_s))

    def _left(self, leaving: _Leaving) -> None:
        try:
            leaving.work.wait()
        except RuntimeError as error:
            self.mailbox.fail(error)
            return
        self._spans.append(Span(self._rank, leaving.op, leaving.start_s, time.monotonic(), _nbytes(leaving.content)))

    def _paced_loop(self) -> None:
        assert self._paced_links is not None
        try:
            while (item := self._paced.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                op, content, number = item
                start = time.monotonic()
                time.sleep(self._paced_links.transfer_s(op.ranks[1], _nbytes(content)))
                self._issue(op, content, number, start)
        except BaseException as error:  # handed to the compute thread, which raises it
            self.mailbox.fail(error)

    def _receive_loop(self, source: int) -> None:
        batches, peer = self._receives[source], self._peer(source)
        coming: deque[tuple[Op, Spec, int]] = deque()
        posted: deque[tuple[Op, torch.Tensor, Any]] = deque()
        try:
            while True:
                while not (coming or posted) or not batches.empty():
                    batch = batches.get()
                    if batch is None:
                        return
                    coming.extend(batch)
                while coming and len(posted) < self._window:
                    op, spec, number = coming.popleft()
                    buffer = empty(spec)
                    posted.append((op, buffer, self._group.recv([buffer], peer, number)))
                op, buffer, work = posted.popleft()
                start = time.monotonic()
                work.wait()
                end = time.monotonic()
                value = op.writes[0]
                self.present(value, buffer)
                if value in self._wanted:
                    self.mailbox.put(value, buffer, end)
                self._spans.append(Span(self._rank, op, start, end, _nbytes(buffer)))
        except DeviceLostError:
            pass  # told already
        except BaseException as error:  # handed to the compute thread, which raises it
            self.mailbox.fail(error)


def _nbytes(content: torch.Tensor) -> int:
    return content.numel() * content.element_size()
