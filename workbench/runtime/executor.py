"""Run one rank of a program with real tensors: the same object that the simulator replays in virtual time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from workbench.core.program import Program, require_same
from workbench.core.schedule import COLLECTIVES, RECV, RING, SEND, Op, Schedule, Value
from workbench.core.timeline import MemorySample, Span
from workbench.runtime.direct_transport import DirectTransport
from workbench.runtime.transport import Transport

Handler = Callable[[Op, tuple[Any, ...]], tuple[Any, ...]]
"""What an operation kind does: (operation, contents of op.reads) -> contents of op.writes.

A collective's handler returns one tensor, which is reduced in place and then written.
"""


class ComputePacer(Protocol):
    """Makes an operation take as long as the emulated device would."""

    factor: float
    """0: run as fast as the host can; 1: take as long as the program says."""

    def run(self, function: Callable[[], Any], duration_s: float, begin_s: float | None = None) -> tuple[Any, float, float, float]:
        """Return (result, start, end, late) in monotonic seconds; begin_s: when the device could have begun."""
        ...


@dataclass(slots=True, kw_only=True)
class Execution:
    """What one rank did in one step.  spans: monotonic seconds.  outputs: the schedule's outputs on this rank."""

    spans: list[Span] = field(default_factory=list)
    memory: list[MemorySample] = field(default_factory=list)
    outputs: dict[Value, Any] = field(default_factory=dict)


def execute(
    program: Program,
    rank: int,
    *,
    handlers: Mapping[str, Handler],
    transport: Transport | DirectTransport,
    inputs: Mapping[Value, Any],
    pacer: ComputePacer,
    begin_s: float | None = None,
) -> Execution:
    """Run the rank's operations in list order; transfers and their waiting overlap with them.

    handlers: by operation kind.  inputs: contents of the schedule's inputs on this rank.
    pacer: makes a compute operation take the seconds that the program states.
    begin_s: when the device became free, if that was before this call (monotonic seconds).
    Operations of further compute streams run in list order on the same thread.  With a DirectTransport a value is sent as soon as it is
    there, one that only passes through without this thread, and the sums of stream RING are added, unpaced, by the thread that brings the
    last term.
    Raises DeviceLostError when a peer dies or falls silent.
    """
    schedule, spec = program.schedule, program.costs.spec
    ops = schedule.ops[rank]
    mailbox = transport.mailbox
    direct = transport if isinstance(transport, DirectTransport) else None
    done = Execution()
    last_read = _last_reads(schedule, rank, compute_only=direct is not None)
    live = _LiveBytes(done.memory)

    def present(value: Value, content: Any, time_s: float) -> None:
        if direct is None or value in last_read:
            mailbox.put(value, content, time_s)
        if direct is not None:
            direct.present(value, content)

    def summed(op: Op, contents: tuple[Any, ...]) -> None:
        start = time.monotonic()
        with torch.inference_mode():
            results = handlers[op.kind](op, contents)
        end = time.monotonic()
        done.spans.append(Span(rank, op, start, end))
        for value, content in zip(op.writes, results, strict=True):
            present(value, content, end)

    free_s = time.monotonic() if begin_s is None else begin_s
    if direct is not None:
        for op in ops:
            if op.stream == RING:
                direct.join(op, partial(summed, op))
        direct.expect(ops, spec, schedule.outputs[rank])
    else:
        transport.expect(ops, spec)
    for value in schedule.inputs[rank]:
        present(value, inputs[value], free_s)

    for index, op in enumerate(ops):
        if op.kind == RECV or (direct is not None and (op.kind == SEND or op.stream == RING)):
            continue
        arrivals = tuple(mailbox.get(value) for value in op.reads)
        contents = tuple(arrival.content for arrival in arrivals)
        if isinstance(transport, Transport) and op.kind == SEND:
            transport.send(op, contents[0], lambda: None)
        elif op.kind in COLLECTIVES:
            tensor = handlers[op.kind](op, contents)[0]
            transport.collective(op, tensor)
            _write(op, (tensor,) * len(op.writes), present, live)
            free_s = time.monotonic()
        else:
            begin_s = max((arrival.time_s for arrival in arrivals), default=free_s)
            duration_s = program.seconds(rank, index) if pacer.factor else 0.0
            results, start, end, late = pacer.run(partial(handlers[op.kind], op, contents), duration_s, max(begin_s, free_s))
            free_s = end
            done.spans.append(Span(rank, op, start, end, 0, late))
            _write(op, results, present, live)
        for value, content in zip(op.reads, contents, strict=True):
            live.seen(value, content)
            if last_read[value] == index:
                mailbox.drop(value)
                live.free(value)
        if direct is not None:
            direct.tidy()
            for value in op.writes:
                if value not in last_read:
                    live.free(value)  # it was only to be sent
        del arrivals, contents

    transport.flush()
    done.outputs = {value: mailbox.get(value).content for value in schedule.outputs[rank]}
    mailbox.take_all()
    done.spans += transport.take_spans()
    return done


def require_one_program(group: torch.distributed.ProcessGroup, program: Program) -> None:
    """Compare the ranks' programs before their first step; every rank of the group takes part.

    Raises ScheduleError on every rank, naming the first operation that differs, if a rank has another program than rank 0.
    """
    text = program.to_text().encode()
    own = torch.tensor(list(hashlib.sha256(text).digest()), dtype=torch.uint8)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([digests], [own]).wait()
    other = next((rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])), None)
    if other is None:
        return
    texts = []
    for root in (0, other):
        length = torch.tensor([len(text)])
        _from(group, root, length)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if group.rank() == root:
            content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        _from(group, root, content)
        texts.append(bytes(content.tolist()).decode())
    require_same(*texts, ranks=(0, other))


def _from(group: torch.distributed.ProcessGroup, root: int, tensor: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def _write(op: Op, results: tuple[Any, ...], put: Callable[[Value, Any, float], None], live: _LiveBytes) -> None:
    assert len(results) == len(op.writes), f"{op.label} wrote {len(results)} of {len(op.writes)} values"
    now = time.monotonic()
    for value, content in zip(op.writes, results, strict=True):
        put(value, content, now)
        live.seen(value, content)


def _last_reads(schedule: Schedule, rank: int, *, compute_only: bool) -> dict[Value, int]:
    """Return the index of each value's last reader; outputs are never dropped.

    compute_only: SENDs and the sums of a ring, which the transport sees to, do not count.
    """
    counted = [(index, op) for index, op in enumerate(schedule.ops[rank]) if not (compute_only and (op.kind == SEND or op.stream == RING))]
    last = {value: index for index, op in counted for value in op.reads}
    return last | {value: -1 for value in schedule.outputs[rank]}


class _LiveBytes:
    """Adds up the bytes of the values that live, as they come and go."""

    def __init__(self, samples: list[MemorySample]) -> None:
        self._samples, self._total = samples, 0
        self._sizes: dict[Value, int] = {}

    def seen(self, value: Value, content: Any) -> None:
        if value in self._sizes:
            return
        size = nbytes(content)
        self._sizes[value] = size
        if size:
            self._total += size
            self._samples.append(MemorySample(time.monotonic(), self._total))

    def free(self, value: Value) -> None:
        size = self._sizes.pop(value, 0)
        if size:
            self._total -= size
            self._samples.append(MemorySample(time.monotonic(), self._total))


def nbytes(content: Any) -> int:
    """Return the bytes of a tensor, of an object with `nbytes`, or of a sequence of these; 0 for anything else."""
    if isinstance(content, torch.Tensor):
        return content.numel() * content.element_size()
    if isinstance(content, (tuple, list)):
        return sum(nbytes(part) for part in content)
    return int(getattr(content, "nbytes", 0))
