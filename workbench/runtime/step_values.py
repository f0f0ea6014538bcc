"""A rank's part of a program, and the values of one step: written, awaited, and freed after their last use."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from workbench.core.costs import Spec
from workbench.core.errors import DeviceLostError, ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import COLLECTIVES, RECV, RING, SEND, Op, Value
from workbench.core.timeline import MemorySample

_SEE_FIRST = "See the first device that failed."


def never_late() -> float:
    """Return by how much later than on emulated links a value came that is no message."""
    return 0.0


class Arrival(NamedTuple):
    """A value and the time at which it became present on the emulated device, in seconds of the monotonic clock.

    This machine may have been up to GRAIN_S behind it (see pacing).

    late_s(): by how much later than on emulated links a message came, because the host was busy.  The answer may become
    less: a message that comes soon afterwards may have slowed it down.
    """

    content: Any
    time_s: float
    nbytes: int = 0
    late_s: Callable[[], float] = never_late


class StepValues:
    """The values of one step.  Every thread of a rank may write, await and release values.

    uses: number of operations of this rank that read each value, which is freed after as many releases.  sources: the
    rank that sends a value.  carried: values that the next step reads under another name (see Schedule.carried).
    timeout_s: how long to wait for a value from another rank.
    """

    def __init__(
        self,
        uses: Mapping[Value, int],
        sources: Mapping[Value, int],
        carried: Mapping[Value, Value],
        *,
        timeout_s: float,
    ) -> None:
        self._uses, self._sources, self._carried, self._timeout_s = dict(uses), dict(sources), carried, timeout_s
        self._present: dict[Value, Arrival] = {}
        self._waiting: dict[Value, list[threading.Event]] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._next: StepValues | None = None
        self._later: list[StepValues] = []
        self._for_next: dict[Value, Arrival] = {}
        self._on_present: Callable[[Value, Any, float], None] = lambda value, content, time_s: None
        self._changes: list[tuple[float, int]] = []  # of the bytes in use, with their times
        self.present_s = 0.0  # when the last value was put

    @property
    def memory(self) -> list[MemorySample]:
        """Return the bytes in use over time on the emulated device, where values come and go in another order than on
        this machine.
        """
        with self._lock:
            changes = sorted(self._changes, key=lambda change: change[0])
        live_bytes = accumulate(nbytes for _, nbytes in changes)
        return [MemorySample(time_s, sum_bytes) for (time_s, _), sum_bytes in zip(changes, live_bytes, strict=True)]

    def on_present(self, call: Callable[[Value, Any, float], None]) -> None:
        """Call call(value, content, time_s) right after a value is present, on the thread that writes it."""
        self._on_present = call

    def put(self, value: Value, content: Any, time_s: float, late_s: Callable[[], float] = never_late) -> None:
        """Store a value, wake the streams that wait for it, and forward it.  time_s, late_s: see Arrival."""
        arrival = Arrival(content, time_s, nbytes(content), late_s)
        self.present_s = time.monotonic()
        with self._lock:
            if self._uses.get(value, 0):
                self._present[value] = arrival
                self._count(arrival.nbytes, time_s)
                for event in self._waiting.get(value, ()):
                    event.set()
            carried = self._carried.get(value)
            following = self._next
            if carried is not None and following is None:
                self._for_next[carried] = arrival
        if carried is not None and following is not None:
            following.put(carried, content, time_s, late_s)
        self._on_present(value, content, time_s)

    def get(self, value: Value) -> Arrival:
        """Wait for a value.  Raises DeviceLostError if its sender failed or became silent, or if another stream of this
        rank failed.
        """
        arrival = self._present.get(value)
        if arrival is not None:
            return arrival
        event = threading.Event()
        with self._lock:
            self._waiting.setdefault(value, []).append(event)
        deadline_s = time.monotonic() + self._timeout_s
        source = self._sources.get(value)
        while True:
            event.clear()
            arrival = self._present.get(value)
            if arrival is not None:
                return arrival
            if self._failure is not None:
                raise DeviceLostError(self._request(value), f"It failed: {self._failure}.", _SEE_FIRST)
            # A value computed on this rank may take any time.
            if (
                not event.wait(None if source is None else max(0.0, deadline_s - time.monotonic()))
                and time.monotonic() >= deadline_s
            ):
                raise DeviceLostError(
                    self._request(value),
                    f"It did not come within {self._timeout_s:g} s.",
                    "Check that every device still runs.",
                )

    def _request(self, value: Value) -> str:
        return (
            f"Value {value} was awaited from "
            f"{f'rank {self._sources[value]}' if value in self._sources else 'this rank itself'}."
        )

    def take(self, value: Value) -> Any:
        """Wait for an output and transfer the ownership of its memory to the caller."""
        content = self.get(value).content
        with self._lock:
            del self._present[value]
        return content

    def release(self, value: Value, time_s: float) -> None:
        """Record that one operation has finished with a value; free the value after the last.  time_s: see Arrival."""
        with self._lock:
            uses_left = self._uses[value] = self._uses[value] - 1
            if uses_left == 0:
                self._waiting.pop(value, None)
                self._count(-self._present.pop(value).nbytes, time_s)

    def warn(self, later: StepValues) -> None:
        """Make a later step fail if this one fails."""
        with self._lock:
            self._later.append(later)
            failure = self._failure
        if failure is not None:
            later.fail(failure)

    def continue_in(self, following: StepValues) -> None:
        """Pass carried values to the step that reads them from now on, including those already present."""
        following._sources |= {
            given_as: self._sources[value] for value, given_as in self._carried.items() if value in self._sources
        }
        with self._lock:
            self._next, ready = following, self._for_next
            self._for_next = {}
        for value, arrival in ready.items():
            following.put(value, arrival.content, arrival.time_s, arrival.late_s)
        self.warn(following)

    def fail(self, error: BaseException) -> BaseException:
        """Wake every waiting stream, also of later steps, with an error.  Returns the first error, which counts."""
        with self._lock:
            first = self._failure = self._failure or error
            for events in self._waiting.values():
                for event in events:
                    event.set()
        for later in self._later:
            later.fail(error)
        return first

    def raise_failure(self) -> None:
        """Raise DeviceLostError if a communication thread has failed."""
        if self._failure is not None:
            raise DeviceLostError("A transfer was in progress.", f"It failed: {self._failure}.", _SEE_FIRST)

    def _count(self, change: int, time_s: float) -> None:
        if change:
            self._changes.append((time_s, change))


def empty(spec: Spec) -> torch.Tensor:
    """Return an uninitialized tensor with the given spec."""
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))


def nbytes(content: Any) -> int:
    """Return the bytes of a tensor, of an object with `nbytes`, or of a sequence of these; 0 for anything else."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, (tuple, list)):
        return sum(nbytes(part) for part in content)
    return int(getattr(content, "nbytes", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank's operations.  streams: (index in the rank's list, operation) in order, by stream.

    inline: the operations of stream RING, by each value that they read.  receives: (operation, spec of the received
    value) by source.
    uses: number of operations here that read a value; an output counts as one more.  forwards: whether values may be
    sent or computed after the streams' last operation.
    """

    streams: Mapping[str, list[tuple[int, Op]]]
    inline: Mapping[Value, list[Op]]
    sends: list[Op]
    receives: Mapping[int, list[tuple[Op, Spec]]]
    uses: Mapping[Value, int]
    sources: Mapping[Value, int]
    carried: Mapping[Value, Value] = field(default_factory=dict)
    forwards: bool = False

    @classmethod
    def of(cls, program: Program, rank: int) -> RankPart:
        """Return a rank's part.  Raises ScheduleError if collectives of the same ranks are on different streams
        (undefined order).
        """
        schedule = program.schedule
        streams: dict[str, list[tuple[int, Op]]] = {}
        inline: dict[Value, list[Op]] = {}
        sends: list[Op] = []
        receives: dict[int, list[tuple[Op, Spec]]] = {}
        stream_of: dict[frozenset[int], str] = {}
        for index, op in enumerate(schedule.ops[rank]):
            if op.kind == SEND:
                sends.append(op)
            elif op.kind == RECV:
                receives.setdefault(op.ranks[0], []).append((op, program.costs.spec(op.writes[0])))
            elif op.stream == RING:
                for value in set(op.reads):
                    inline.setdefault(value, []).append(op)
            else:
                streams.setdefault(op.stream, []).append((index, op))
                if op.kind in COLLECTIVES and stream_of.setdefault(frozenset(op.ranks), op.stream) != op.stream:
                    other = stream_of[frozenset(op.ranks)]
                    raise ScheduleError(
                        f"Collectives of ranks {', '.join(map(str, op.ranks))} were asked for on streams "
                        f"'{other}' and '{op.stream}'.",
                        f"Their order is not determined:\n{schedule.grid((rank, index))}",
                        "Put them on one stream.",
                    )
        carried = dict(schedule.carried[rank])
        uses = Counter(value for op in schedule.ops[rank] for value in op.reads)
        uses.update(value for value in schedule.outputs[rank] if value not in carried)
        written = {value for listed in streams.values() for _, op in listed for value in op.writes}
        sources = {op.writes[0]: source for source, batch in receives.items() for op, _ in batch}
        return cls(
            streams=streams,
            inline=inline,
            sends=sends,
            receives=receives,
            uses=uses,
            sources=sources,
            carried=carried,
            forwards=bool(inline) or any(op.reads[0] not in written for op in sends),
        )
