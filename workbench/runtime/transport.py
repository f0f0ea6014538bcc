"""Send values between ranks while streams compute: a value is sent once it is present and next in its channel.

The thread that has the value passes the message to gloo.  If an earlier message still occupies the egress, the sending
thread does.  So TCP never interleaves two messages of one emulated device.
A forwarded value is sent by the thread that received it, whatever the streams are doing.

Latency of emulated links: as in the simulator, a message occupies the sender's egress for latency + bytes / rate +
MESSAGE_S, and takes as much of the receiver's ingress, which the messages in flight share equally.  It carries the time
at which it begins to occupy the egress (all clocks are this machine's), and the receiver holds it back until it has had
its share.  So what the host needs to deliver a message is hidden in its latency.
On shared air only the kernel knows how long a message takes.  It is held back for its latency and jitter from when it
arrives.
All these times are the emulated devices', behind which this machine may be (see pacing.GRAIN_S).  What the kernel takes
for a message begins when this machine sends it.  So the message also carries by how much that was too late, and counts
as come as much earlier.
The members of a collective tell each other when each began, so that all know when it is due.  On shared air it is not
known.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from workbench.core.costs import MESSAGE_S, Spec, sent_bytes
from workbench.core.errors import DeviceLostError
from workbench.core.schedule import ALLGATHER, Op, Value
from workbench.core.threads import in_background
from workbench.core.timeline import Span
from workbench.runtime.collectives import LatestBegin, end_on_links, run_collective
from workbench.runtime.ingress import Due, SharedIngress
from workbench.runtime.pacing import GRAIN_S, RankLinks, wait_until
from workbench.runtime.stamps import Stamp, empty_with_stamp, stamped, without_stamp
from workbench.runtime.step_values import StepValues, empty, nbytes, never_late

WINDOW = 16
"""Number of receives posted ahead per source.  A message whose receive is posted late waits for one more round trip."""
WINDOW_BYTES = 1 << 20
"""Beyond the first LEAST_WINDOW receives, more are posted only while their buffers take less memory than this."""
LEAST_WINDOW = 4
SMALL_BYTES = 1 << 16
"""Messages up to this size do not occupy the egress of a real link, because the network interleaves them."""


class _Message:
    """A SEND of one step.  content: None until its value is present."""

    def __init__(self, op: Op, values: StepValues, spans: list[Span]) -> None:
        self.op, self.values, self.spans = op, values, spans
        self.content: torch.Tensor | None = None
        self.nbytes = 0
        self.work: Any = None
        self.ready_s = 0.0  # when its value was present and it was next in its channel
        self.start_s = 0.0  # when it begins to occupy the egress
        self.end_s = 0.0  # not before: until then an emulated link is occupied

    @property
    def is_large(self) -> bool:
        return self.nbytes > SMALL_BYTES


class _Channel:
    """The messages to one destination, in list order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: deque[_Message] = deque()
        self.num_sent = 0
        self.ready_s = 0.0  # when the last message that left was ready


class _Expected(NamedTuple):
    """A RECV of one step."""

    op: Op
    spec: Spec
    values: StepValues
    spans: list[Span]


class _Source:
    """The messages from one source, in list order: those that gloo may already write, and the later ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.coming: deque[_Expected] = deque()
        self.posted: queue.SimpleQueue[tuple[_Expected, torch.Tensor, Any] | None] = queue.SimpleQueue()
        self.num_posted = self.posted_bytes = self.number = 0
        self.came_s = 0.0  # when the last message came


class Transport:
    """Sends and receives for one rank over a gloo process group.  Close it.

    group: a torch ProcessGroup of all ranks.  subgroup: returns the group of some ranks (called only on its members).
    links: the described links, and the part of them to emulate; None: only gloo's own time.  slow_links: how many times
    slower messages to a device are, by its name (an injected fault).  timeout_s: how long to wait for a value from
    another rank.
    peers: the group's number of each rank named in operations (None: the same numbers).  The numbers differ if the
    survivors of a failure have formed a new group.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        rank: int,
        *,
        subgroup: Callable[[tuple[int, ...]], torch.distributed.ProcessGroup],
        links: RankLinks | None = None,
        timeout_s: float = 30.0,
        peers: Mapping[int, int] | None = None,
    ) -> None:
        self.subgroup, self.links, self.timeout_s = subgroup, links, timeout_s
        self._group, self._rank, self._peers = group, rank, peers
        self.slow_links = dict[str, float]()
        self._channels: dict[int, _Channel] = {}
        self._egress = threading.Lock()
        self._num_waiting = 0  # messages that the sending thread has yet to pass to gloo
        self._num_large = 0  # large messages that were passed to gloo but not sent yet
        self._egress_free_s = 0.0  # when the messages to emulated links will have left
        self._ingress = SharedIngress()
        self._leaving: queue.SimpleQueue = queue.SimpleQueue()
        self._sources: dict[int, _Source] = {}
        self._is_closed = False
        self.failure: BaseException | None = None
        in_background(self._send_loop, name="send")

    def expect_sends(
        self, sends: Sequence[Op], values: StepValues, spans: list[Span]
    ) -> Callable[[Value, Any, float], None]:
        """Announce a step's SENDs, in list order.  Returns a function that must be called with each value once it is
        present.

        The spans of the messages are added to `spans`.  Each message releases its value once sent.
        """
        outgoing: dict[Value, list[tuple[_Channel, _Message]]] = {}
        for op in sends:
            channel = self._channels.setdefault(op.ranks[1], _Channel())
            message = _Message(op, values, spans)
            outgoing.setdefault(op.reads[0], []).append((channel, message))
            channel.pending.append(message)

        def present(value: Value, content: Any, time_s: float) -> None:
            for channel, message in outgoing.pop(value, ()):
                message.ready_s = time_s
                message.content = content.detach().contiguous()
                message.nbytes = nbytes(message.content)
                self._advance(channel)

        return present

    def expect_receives(
        self, receives: Mapping[int, Sequence[tuple[Op, Spec]]], values: StepValues, spans: list[Span]
    ) -> None:
        """Announce a step's RECVs by source, in list order.  Received values are put into `values`, and their time
        spans into `spans`.
        """
        for source, batch in receives.items():
            expected = self._sources.get(source)
            if expected is None:
                expected = self._sources[source] = _Source()
                in_background(self._receive_loop, source, expected, name=f"receive-{source}")
            with expected.lock:
                expected.coming.extend(_Expected(op, spec, values, spans) for op, spec in batch)
            self._post(source, expected)

    def collective(
        self, op: Op, content: torch.Tensor, rows: Sequence[int], begin_s: float
    ) -> tuple[torch.Tensor, Span]:
        """Run a collective; return the result on this rank and the time span.

        content: this rank's contribution.  rows: size of each member's part (see run_collective).  begin_s: when the
        emulated device began.
        Raises DeviceLostError if a member died or became silent.
        """
        group, position = self.subgroup(op.ranks), op.ranks.index(self._rank)
        links = self.links if self.links is not None and self.links.fidelity != "real" and len(op.ranks) > 1 else None
        try:
            # At the same time as the content, so that it takes no additional time.  On shared air it would.
            begins = LatestBegin(group, begin_s) if links is not None and not links.is_shared else None
            result = run_collective(op, content, rows, group, position)
            latest = None if begins is None else begins.wait()
        except RuntimeError as error:
            raise DeviceLostError(
                f"{op.kind} of ranks {', '.join(map(str, op.ranks))} was in progress.",
                f"It failed: {str(error).splitlines()[0]}.",
                "See the first device that failed.",
            ) from error
        size = nbytes(result if op.kind == ALLGATHER else content)
        end_s, late_s = (time.monotonic(), 0.0) if links is None else end_on_links(op, size, links, latest)
        num_bytes = sent_bytes(op.kind, len(op.ranks), size, is_root=position == 0)
        return result, Span(self._rank, op, begin_s, end_s, num_bytes, late_s)

    def flush(self, values: StepValues) -> None:
        """Wait until all announced values have been sent, including forwarded ones.

        Raises DeviceLostError if a value could not be sent, or was not sent within timeout_s.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while any(channel.pending for channel in self._channels.values()):
            if time.monotonic() > deadline_s:
                message = next(channel.pending[0] for channel in self._channels.values() if channel.pending)
                values.fail(TimeoutError(f"value {message.op.reads[0]} did not come within {self.timeout_s:g} s"))
            values.raise_failure()
            time.sleep(2e-4)
        all_sent = threading.Event()
        self._leaving.put(all_sent)
        while not all_sent.wait(0.5):
            values.raise_failure()
        values.raise_failure()

    def close(self) -> None:
        """End the threads and abandon transfers in progress."""
        self._leaving.put(None)
        self._is_closed = True
        for source in self._sources.values():
            source.posted.put(None)

    def _fail(self, values: StepValues, error: BaseException) -> None:
        self.failure = self.failure or error
        values.fail(error)

    def _peer(self, rank: int) -> int:
        return rank if self._peers is None else self._peers[rank]

    def _advance(self, channel: _Channel) -> None:
        """Send the values that are present at the head of a channel."""
        with channel.lock:
            while channel.pending and channel.pending[0].content is not None:
                message = channel.pending[0]
                message.ready_s = channel.ready_s = max(message.ready_s, channel.ready_s)
                with self._egress:
                    is_free = not self._num_large and time.monotonic() >= self._egress_free_s - MESSAGE_S
                    if is_free and not self.slow_links and not self._num_waiting:
                        self._give_to_gloo(message)
                    else:
                        self._num_waiting += 1
                    self._leaving.put(message)
                channel.pending.popleft()  # last, because `flush` checks this first and then asks the sending thread

    def _give_to_gloo(self, message: _Message) -> None:
        destination = message.op.ranks[1]
        channel = self._channels[destination]
        begin_s = now_s = time.monotonic()
        if self._is_emulated(self._rank, destination):
            assert self.links is not None and message.content is not None
            begin_s = max(message.ready_s, self._egress_free_s, now_s - GRAIN_S)
            if not self.links.is_shared:
                self._egress_free_s = begin_s + self.links.occupied_s(self._rank, destination, message.nbytes)
                message.end_s = self._egress_free_s - MESSAGE_S
            message.content = stamped(message.content, Stamp(begin_s, max(0.0, now_s - begin_s)))
        message.start_s = message.start_s or begin_s
        try:
            message.work = self._group.send([message.content], self._peer(destination), channel.num_sent)
        except RuntimeError as error:
            self._fail(message.values, error)
            return
        channel.num_sent = (channel.num_sent + 1) % (1 << 30)
        self._num_large += message.is_large

    def _send_loop(self) -> None:
        """Wait until each message is sent, in the order in which they became ready; pass deferred messages to gloo."""
        while (item := self._leaving.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._see_off(item)
            except BaseException as error:  # passed to the streams, which raise it
                self._fail(item.values, error)
            item.content = item.work = None

    def _see_off(self, message: _Message) -> None:
        if message.work is None:
            if self.slow_links and self.links is not None:
                message.start_s = time.monotonic()
                time.sleep(self.links.slower_s(self.slow_links, message.op.ranks[1], message.nbytes))
                message.ready_s = time.monotonic()
            with self._egress:
                self._give_to_gloo(message)
                self._num_waiting -= 1
        if message.work is None:
            return
        try:
            message.work.wait()
        finally:
            with self._egress:
                self._num_large -= message.is_large
        end_s = wait_until(message.end_s)
        message.spans.append(Span(self._rank, message.op, message.start_s, end_s, message.nbytes))
        message.values.release(message.op.reads[0], end_s)

    def _post(self, source: int, expected: _Source) -> None:
        """Let gloo receive the next messages of a source, as far as the window reaches.

        A step's first ones are posted before it sends: the source waits for gloo's word that they are, which on shared
        air would be behind the messages of this rank.
        """
        is_emulated = self._is_emulated(source, self._rank)
        with expected.lock, torch.inference_mode(False):
            while expected.coming and (
                expected.num_posted < LEAST_WINDOW
                or (expected.num_posted < WINDOW and expected.posted_bytes < WINDOW_BYTES)
            ):
                message = expected.coming.popleft()
                buffer = empty_with_stamp(message.spec) if is_emulated else empty(message.spec)
                try:
                    work = self._group.recv([buffer], self._peer(source), expected.number)
                except RuntimeError as error:
                    self._fail(message.values, error)
                    return
                expected.posted.put((message, buffer, work))
                expected.num_posted += 1
                expected.posted_bytes += nbytes(buffer)
                expected.number = (expected.number + 1) % (1 << 30)

    def _receive_loop(self, source: int, expected: _Source) -> None:
        is_emulated = self._is_emulated(source, self._rank)
        message: _Expected | None = None
        delayed: queue.SimpleQueue = queue.SimpleQueue()  # messages that have passed the shared air
        if is_shared := is_emulated and self.links is not None and self.links.is_shared:
            in_background(self._hold_loop, delayed, name=f"hold-{source}")
        num_arrived = 0
        try:
            while (posted := expected.posted.get()) is not None and not self._is_closed:
                message, buffer, work = posted
                start_s = time.monotonic()
                work.wait()
                with expected.lock:
                    expected.num_posted -= 1
                    expected.posted_bytes -= nbytes(buffer)
                if not is_emulated:
                    self._deliver(expected, message, buffer, Stamp(start_s), None)
                else:
                    arrived_s = time.monotonic()
                    content, stamp = without_stamp(buffer, message.spec)
                    if is_shared:
                        assert self.links is not None
                        delay_s = self.links.delay_s(source, self._rank, message.spec.nbytes, num_arrived)
                        num_arrived += 1
                        due = Due(arrived_s - stamp.behind_s + delay_s + MESSAGE_S)
                        delayed.put((expected, message, content, stamp, due))
                    else:
                        assert self.links is not None
                        seconds = self.links.occupied_s(source, self._rank, message.spec.nbytes)
                        due = self._ingress.hold(source, stamp.sent_s, seconds)
                        self._deliver(expected, message, content, stamp, due)
                self._post(source, expected)
        except BaseException as error:  # passed to the streams, which raise it
            while not expected.posted.empty():
                waiting = expected.posted.get()
                if waiting is not None:
                    waiting[0].values.fail(error)
            if message is not None:
                self._fail(message.values, error)
        finally:
            delayed.put(None)

    def _hold_loop(self, delayed: queue.SimpleQueue) -> None:
        """Deliver messages that have passed the shared air, in order, each when it is due."""
        while (delivery := delayed.get()) is not None:
            try:
                self._deliver(*delivery)
            except BaseException as error:  # passed to the streams, which raise it
                self._fail(delivery[1].values, error)

    def _deliver(
        self, source: _Source, message: _Expected, content: torch.Tensor, stamp: Stamp, due: Due | None
    ) -> None:
        """Wait until a message is due, and put its value into the step.  due: None if it is not emulated."""
        # The last MESSAGE_S until it is due are this machine's (see SharedIngress).
        came_s = end_s = wait_until(0.0 if due is None else due.end_s - MESSAGE_S)
        late_s = never_late
        if due is not None:
            came_s = source.came_s = max(source.came_s, end_s - min(stamp.behind_s, due.late_s(end_s)))
            late_s = partial(due.late_s, came_s)
        message.spans.append(Span(self._rank, message.op, stamp.sent_s, came_s, message.spec.nbytes))
        message.values.put(message.op.writes[0], content, came_s, late_s)

    def _is_emulated(self, source: int, destination: int) -> bool:
        """Return whether messages between two ranks are held back, and carry the time for it."""
        return self.links is not None and self.links.added_s(source, destination, 1) > 0
