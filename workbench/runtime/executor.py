"""Run one rank of a program with real tensors.  The simulator replays the same program in virtual time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from workbench.core.program import Program
from workbench.core.schedule import ALLGATHER, COLLECTIVES, REDUCESCATTER, Op, Value
from workbench.core.threads import in_background
from workbench.core.timeline import MemorySample, Span
from workbench.profiler.processors import Place, pinned
from workbench.runtime.pacing import Pacer, behind
from workbench.runtime.step_values import RankPart, StepValues, never_late
from workbench.runtime.transport import Transport

COMPUTE = "compute"
"""The stream that runs on the calling thread of a step.  Every other stream has its own thread."""
_KEPT_PARTS = 64

Contents = tuple[Any, ...]
"""The contents of the values that an operation reads or writes, in their order."""
Handler = Callable[[Op, Contents], Contents]
"""Implements one operation kind: (operation, contents of op.reads) -> contents of op.writes.

The handler of a collective returns one tensor, this rank's contribution (see Transport.collective).
"""


@dataclass(slots=True, kw_only=True)
class Execution:
    """Record of one rank's step.

    spans: in monotonic seconds of the emulated device.  ended_s: when its last operation ended, and its last message
    came, on this machine, which may be up to GRAIN_S behind (see pacing).  outputs: the schedule's outputs on this
    rank, without carried ones.
    """

    spans: list[Span] = field(default_factory=list)
    ended_s: float = 0.0
    memory: list[MemorySample] = field(default_factory=list)
    outputs: dict[Value, Any] = field(default_factory=dict)

    def in_device_time(self, dilation: float) -> Execution:
        """Return the record in emulated seconds, each of which took `dilation` seconds here (see RankContext)."""
        spans = [
            span._replace(start_s=span.start_s / dilation, end_s=span.end_s / dilation, late_s=span.late_s / dilation)
            for span in self.spans
        ]
        memory = [sample._replace(time_s=sample.time_s / dilation) for sample in self.memory]
        return Execution(spans=spans, ended_s=self.ended_s / dilation, memory=memory, outputs=self.outputs)


class Executor:
    """The streams of one rank, for the lifetime of its process group.  Close it, or use it as a context manager.

    pacer: for the stream "compute"; it creates the pacers of the other streams.  The executor
    reports to it when a stream waits, and how much longer a busy host makes that.
    ends_at_failure: whether a step that has failed ends with the operation under way, otherwise with the first one that
    lacks a value.
    """

    ends_at_failure = True

    def __init__(self, rank: int, transport: Transport, pacer: Pacer) -> None:
        self.rank, self.transport, self.pacer = rank, transport, pacer
        self._places: dict[str, Place] = {}
        self._pinned = ExitStack()
        self._pacers: dict[str, Pacer] = {COMPUTE: pacer}
        self._threads: dict[str, queue.SimpleQueue] = {}
        self._free_s: dict[str, float] = {}
        self._idle_until_s: float | None = None
        self._parts: dict[int, tuple[Program, RankPart]] = {}
        self._last: Step | None = None
        self._carrying: Step | None = None  # the last step with values for a later one
        self.aborted: BaseException | None = None  # the error that aborted this step and all later ones
        self._leaving: list[Step] = []  # finished, but some of their values may still be forwarded

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads of the streams and of the transport."""
        for waiting in self._threads.values():
            waiting.put(None)
        self.transport.close()
        self._pinned.close()
        # A thread of the transport may still wait for a lost device, and refers to this executor.
        self._last = self._carrying = None
        self._leaving.clear()

    def place(self, places: Mapping[str, Place]) -> None:
        """Let streams run on some processors of this machine from now on.  Call this before the first step.

        An accelerator gets an operation's inputs from the host's memory and returns its results to it.  All threads
        except those of the other placed streams are pinned to the cores of stream "compute".
        """
        self._places.update(places)
        if COMPUTE in places:
            self._pinned.enter_context(pinned(places[COMPUTE]))

    def idle(self, until_s: float | None = None) -> None:
        """Record that the device waited outside its programs: no stream counts as free before now.

        until_s: until when it waited, if that is known.  What the host took since then is hidden in the next operations
        if they leave room for it, and is late if not (see Pacer).
        """
        self._free_s.clear()
        self._idle_until_s = until_s

    def abort(self, error: BaseException) -> None:
        """Abort the current step and all later ones: wherever they wait, they raise DeviceLostError.  May be called
        from any thread.
        """
        self.aborted = error
        if self._last is not None:
            self._last.values.fail(error)

    def run(
        self, program: Program, handlers: Mapping[str, Handler], inputs: Mapping[Value, Any], *, name: str = ""
    ) -> Execution:
        """Run the rank's part of a program to its end (see `begin`); if it carries values over, some may still be on
        their way.
        """
        step = self.begin(program, handlers, inputs, name=name)
        return step.finish(flushes=not step.part.carried)

    def begin(
        self, program: Program, handlers: Mapping[str, Handler], inputs: Mapping[Value, Any], *, name: str = ""
    ) -> Step:
        """Start a step: its transfers and all streams except "compute", which runs in `finish`.  Finish steps in the
        order of their start.

        A step may begin before the previous one is finished.  Values carried over from an earlier step are no inputs;
        other programs may run between the two.
        handlers: by operation kind.  inputs: contents of the schedule's inputs on this rank.  name: name of the step in
        error messages.
        With a pacer factor of 1, a compute operation takes the seconds that the program states.  Operations of stream
        RING run unpaced, on the thread that delivers the last value that they read.
        """
        begin_s = time.monotonic() if self._idle_until_s is None else self._idle_until_s
        self._idle_until_s = None
        step = Step(self, program, self._part(program), handlers, name, begin_s)
        former, self._last = self._last, step
        if former is not None:
            former.precede(step)
        arriving = set(self._carrying.part.carried.values()) if self._carrying is not None else set()
        if self._carrying is not None and arriving <= set(program.schedule.inputs[self.rank]):
            self._carrying.values.continue_in(step.values)
            self._carrying = None
        else:
            arriving = set()
        if step.part.carried:
            self._carrying = step
        failure = self.aborted or self.transport.failure
        if failure is not None:
            step.values.fail(failure)
        for value in program.schedule.inputs[self.rank]:
            if value in inputs and value not in arriving:
                step.values.put(value, inputs[value], self._free_s.get(COMPUTE, begin_s))
        for stream in step.part.streams:
            if stream != COMPUTE:
                self._thread(stream).put(step)
        return step

    def flush(self) -> None:
        """Wait until all values of all steps have been sent."""
        if self._last is not None:
            self.transport.flush(self._last.values)

    def finished(self, step: Step, *, has_left: bool) -> None:
        """Release the memory of steps once all their values have been sent."""
        if not has_left and not step.part.forwards:
            step.let_go()
            return
        self._leaving.append(step)
        if has_left:
            for sender in self._leaving:
                sender.let_go()
            self._leaving.clear()

    def _part(self, program: Program) -> RankPart:
        cached = self._parts.get(id(program))
        if cached is None or cached[0] is not program:
            if len(self._parts) >= _KEPT_PARTS:
                self._parts.pop(next(iter(self._parts)))
            cached = self._parts[id(program)] = (program, RankPart.of(program, self.rank))
        return cached[1]

    def _thread(self, stream: str) -> queue.SimpleQueue:
        waiting = self._threads.get(stream)
        if waiting is None:
            waiting = self._threads[stream] = queue.SimpleQueue()
            self._pacers[stream] = self.pacer.for_stream()
            in_background(self._stream_loop, stream, waiting, name=f"stream-{stream}")
        return waiting

    def _stream_loop(self, stream: str, waiting: queue.SimpleQueue) -> None:
        if stream in self._places:
            self._places[stream].pin()
        while (step := waiting.get()) is not None:
            step.run_in_thread(stream)

    def run_stream(self, step: Step, stream: str) -> None:
        """Run a stream's operations of a step in list order, on the calling thread."""
        pacer, free_s = self._pacers[stream], self._free_s.get(stream, step.begin_s)
        place, values = self._places.get(stream), step.values
        for index, op in step.part.streams.get(stream, ()):
            try:
                if self.ends_at_failure:
                    values.raise_failure()
                arrivals = [values.get(value) for value in op.reads]
                contents = tuple(arrival.content for arrival in arrivals)
                handle = partial(
                    step.handlers[op.kind] if place is None else partial(_at, place.device, step.handlers[op.kind]),
                    op,
                    contents,
                )
                last = max(arrivals, key=lambda arrival: arrival.time_s, default=None)
                ready_s = free_s if last is None else last.time_s
                if pacer.factor and last is not None and ready_s > free_s:
                    pacer.wait(ready_s - free_s, last.late_s)
                if op.kind in COLLECTIVES:
                    begin_s = max(ready_s, free_s) if pacer.factor else time.monotonic()
                    results, span = self._collective(step.program, op, handle()[0], begin_s)
                    free_s = span.end_s
                    if pacer.factor:
                        pacer.wait(span.end_s - begin_s, partial(getattr, span, "late_s"))
                else:
                    duration_s = step.program.seconds(self.rank, index) if pacer.factor else 0.0
                    results, start_s, free_s, late_s = pacer.run(handle, duration_s, max(ready_s, free_s))
                    span = Span(self.rank, op, start_s, free_s, 0, late_s)
                step.spans.append(span)
                step.write(op, results, free_s)
            except Exception as error:
                error.add_note(step.place(index))
                raise
            del arrivals, contents, handle, results
            for value in op.reads:
                values.release(value, free_s)
        self._free_s[stream] = free_s

    def _collective(
        self, program: Program, op: Op, content: torch.Tensor, begin_s: float
    ) -> tuple[tuple[torch.Tensor, ...], Span]:
        rows: list[int] = []
        if op.kind in (ALLGATHER, REDUCESCATTER):
            alike = {
                rank: next(
                    other
                    for other in program.schedule.ops[rank]
                    if other._replace(reads=op.reads, writes=op.writes) == op
                )
                for rank in op.ranks
            }
            values = [alike[rank].reads[0] if op.kind == ALLGATHER else alike[rank].writes[0] for rank in op.ranks]
            rows = [program.costs.spec(value).shape[0] for value in values]
        result, span = self.transport.collective(op, content, rows, begin_s)
        return (result,) * len(op.writes), span


class Step:
    """One running step of one rank (see Executor.begin)."""

    def __init__(
        self,
        executor: Executor,
        program: Program,
        part: RankPart,
        handlers: Mapping[str, Handler],
        name: str,
        begin_s: float,
    ) -> None:
        self.program, self.part, self.handlers, self.name = program, part, handlers, name
        self.begin_s = begin_s
        self.spans: list[Span] = []
        self._ended_s = 0.0
        self._executor = executor
        transport = executor.transport
        self.values = StepValues(part.uses, part.sources, part.carried, timeout_s=transport.timeout_s)
        self._leave = transport.expect_sends(part.sends, self.values, self.spans)
        self._num_missing = {id(op): len(set(op.reads)) for ops in part.inline.values() for op in ops}
        self._lock = threading.Lock()
        self._modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._num_running = sum(stream != COMPUTE for stream in part.streams)
        self._streams_done = threading.Event()
        self._is_last = True
        self._error: BaseException | None = None
        if not self._num_running:
            self._streams_done.set()
        self.values.on_present(self._present)
        transport.expect_receives(part.receives, self.values, self.spans)

    def precede(self, following: Step) -> None:
        """Record that the following step has begun."""
        self._is_last = False
        self.values.warn(following.values)

    def finish(self, *, flushes: bool = True) -> Execution:
        """Run the stream "compute", wait for the other streams, and return the record of this rank's step.

        flushes: whether to wait until all values have been sent, unless a later step has begun.  An error gets a note
        that names the device, the step and the operation, and shows the grid with the operation marked.  Raises
        DeviceLostError when a peer dies or becomes silent.
        """
        try:
            self._executor.run_stream(self, COMPUTE)
            while not self._streams_done.wait(1.0):
                self.values.raise_failure()
            if self._error is not None:
                raise self._error
            if self._is_last and flushes:
                self._executor.transport.flush(self.values)
        except BaseException as error:
            first = self.values.fail(error)
            if self._error is first and error is not first:
                raise first from None
            raise
        finally:
            self._executor.finished(self, has_left=self._is_last and flushes)
        outputs = {}
        for value in self.program.schedule.outputs[self._executor.rank]:
            if value not in self.part.carried:
                outputs[value] = self.values.take(value)
        ended_s = max(self._ended_s, self.values.present_s)
        return Execution(spans=self.spans, ended_s=ended_s, memory=self.values.memory, outputs=outputs)

    def let_go(self) -> None:
        """Break the reference cycles, so that the handlers' memory is freed now and not at the next
        garbage collection.
        """
        self.values.on_present(lambda value, content, time_s: None)
        self.handlers, self._leave = {}, lambda value, content, time_s: None

    def run_in_thread(self, stream: str) -> None:
        """Run another stream on its own thread.  `finish` raises its error."""
        grad, inference = self._modes
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                self._executor.run_stream(self, stream)
        except BaseException as error:  # raised by `finish`
            if self.values.fail(error) is error:
                self._error = error
        with self._lock:
            self._num_running -= 1
            if not self._num_running:
                self._streams_done.set()

    def write(self, op: Op, results: Contents, time_s: float, late_s: Callable[[], float] = never_late) -> None:
        """Store the results of an operation.  time_s, late_s: see Arrival."""
        assert len(results) == len(op.writes), f"{op.label} wrote {len(results)} of {len(op.writes)} values"
        self._ended_s = time.monotonic()
        for value, content in zip(op.writes, results, strict=True):
            self.values.put(value, content, time_s, late_s)

    def place(self, index: int) -> str:
        """Describe an operation's position: device, step, operation, and the grid with the operation marked."""
        rank, schedule = self._executor.rank, self.program.schedule
        device, op = self.program.devices[rank], schedule.ops[rank][index]
        step = f", {self.name}" if self.name else ""
        return f"Device '{device}' (rank {rank}){step}, operation {op.label}:\n{schedule.grid((rank, index), window=4)}"

    def _present(self, value: Value, content: Any, time_s: float) -> None:
        self._leave(value, content, time_s)
        for op in self.part.inline.get(value, ()):
            with self._lock:
                self._num_missing[id(op)] -= 1
                is_complete = not self._num_missing[id(op)]
            if is_complete:
                self._run_inline(op)

    def _run_inline(self, op: Op) -> None:
        start_s = time.monotonic()
        arrivals = [self.values.get(read) for read in op.reads]
        behind_s = 0.0
        if self._executor.pacer.factor:
            behind_s = behind(max(arrival.time_s for arrival in arrivals), start_s)
        try:
            with torch.inference_mode():
                results = self.handlers[op.kind](op, tuple(arrival.content for arrival in arrivals))
        except Exception as error:
            error.add_note(self.place(self.program.schedule.ops[self._executor.rank].index(op)))
            if self.values.fail(error) is error:
                self._error = error
            raise
        end_s = time.monotonic() - behind_s
        self.spans.append(Span(self._executor.rank, op, start_s - behind_s, end_s))
        lateness = [arrival.late_s for arrival in arrivals]
        self.write(op, results, end_s, lambda: max(late_s() for late_s in lateness))
        for read in op.reads:
            self.values.release(read, end_s)


def _at(device: torch.device, handler: Handler, op: Op, contents: Contents) -> Contents:
    """Run a handler with its inputs on a device, and return its results to the host."""
    return _on(torch.device("cpu"), handler(op, _on(device, contents)))


def _on(device: torch.device, content: Any) -> Any:
    """Move a tensor, or a sequence of tensors, to a device.  Other values are returned unchanged."""
    if isinstance(content, torch.Tensor):
        return content.to(device)
    if isinstance(content, (tuple, list)):
        return type(content)(_on(device, part) for part in content)
    return content
