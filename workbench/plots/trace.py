"""Write a report's timelines as a Chrome trace (JSON of trace events), which Perfetto and chrome://tracing open.

A process for each device and kind of number (predicted, measured), a thread for each processor and each link, arrows
from sends to their receives, and a counter of memory.  The steps follow one another; a predicted step begins with the
measured one, so that both can be compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.methods import title_of
from workbench.core.report import Report, busy_note
from workbench.core.schedule import COLLECTIVES, RECV, SEND
from workbench.core.serial import write_text
from workbench.core.timeline import INVALID_MARK, Span, Timeline
from workbench.plots.breakdown import step_name
from workbench.plots.style import class_of

STEPS_PID = 1
"""The process whose only thread names the steps."""
PAUSE_SHARE = 0.05
"""The pause between two steps, as a share of the longer one's time."""

TraceEvent = dict[str, Any]


class _Row(NamedTuple):
    """A thread of a process.  group: 0 for compute, 1 to send, 2 to receive, 3 for collectives; viewers sort by it.

    lane: the second and later ones hold operations that overlap others of the same row.
    """

    pid: int
    group: int
    name: str
    lane: int = 0


def write_trace(report: Report, path: Path | str) -> Path:
    """Write a report's timelines as a Chrome trace and return its path.  Raises WriteError if that is not possible."""
    path = Path(path)
    write_text(path, trace_text(report) + "\n")
    return path


def trace_text(report: Report) -> str:
    """Return a report's timelines as the JSON text of a Chrome trace."""
    about = {
        "method": title_of(report.job.method),
        "model": report.job.model,
        "cluster": report.cluster.name,
        "numbers": report.label,
        "time": "seconds of the devices' clock",
    }
    note = busy_note(report)
    return json.dumps(chrome_trace(report.timelines, about=about | ({"warning": note} if note else {}), note=note))


def chrome_trace(
    timelines: Mapping[str, Timeline], *, about: Mapping[str, str] | None = None, note: str = ""
) -> dict[str, Any]:
    """Return a Chrome trace of timelines by name, such as 'first epoch, predicted'.

    about: facts for the trace's metadata.  note: why the measured times mean little; they are marked then.
    """
    steps: dict[str, list[Timeline]] = defaultdict(list)
    for name, timeline in timelines.items():
        steps[step_name(name)].append(timeline)
    events = _named(STEPS_PID, "steps")
    pids: dict[str, int] = {}
    arrows, begin_s = count(1), 0.0
    for step, kinds in steps.items():
        longest_s = max(timeline.makespan_s for timeline in kinds)
        events.append(_slice(step, "step", (begin_s, begin_s + longest_s), _Row(STEPS_PID, 0, "step"), {}))
        for timeline in sorted(kinds, key=lambda timeline: timeline.source != "simulated"):
            kind = _kind(timeline, note)
            digits = len(str(timeline.world_size - 1))
            names = [f"{kind}: {rank:0{digits}} {device}" for rank, device in enumerate(timeline.device_names)]
            numbers = [pids.setdefault(name, len(pids) + 1 + STEPS_PID) for name in names]
            events += _slices(timeline, begin_s, numbers, arrows)
            events += _counters(timeline, begin_s, numbers)
        begin_s += longest_s * (1 + PAUSE_SHARE)
    for name, pid in pids.items():
        events += _named(pid, name)
    rows = sorted({event["tid"] for event in events if isinstance(event["tid"], _Row)})
    # A thread with its process's number would be its 'main thread' to Perfetto, which sorts threads by number.
    numbers_of = {row: number for number, row in enumerate(rows, start=1 + STEPS_PID + len(pids))}
    for event in events:
        event["tid"] = numbers_of.get(event["tid"], event["tid"])
    for row, tid in numbers_of.items():
        events += _named(row.pid, row.name + f" ({row.lane + 1})" * (row.lane > 0), tid=tid)
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"]))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}


def _kind(timeline: Timeline, note: str) -> str:
    """Return what the names of a timeline's processes begin with; Perfetto sorts processes by name."""
    if timeline.source == "simulated":
        return "predicted (simulated)"
    return f"measured ({timeline.source}){f' {INVALID_MARK}' if note else ''}"


def _named(pid: int, name: str, *, tid: int = 0) -> list[TraceEvent]:
    """Return the metadata that name a process, or one of its threads, and put it into its place."""
    kind = "thread" if tid else "process"
    base = {"ph": "M", "ts": 0, "pid": pid, "tid": tid}
    return [
        base | {"name": f"{kind}_name", "args": {"name": name}},
        base | {"name": f"{kind}_sort_index", "args": {"sort_index": tid or pid}},
    ]


def _slices(timeline: Timeline, begin_s: float, pids: Sequence[int], arrows: Iterator[int]) -> Iterator[TraceEvent]:
    """Yield a slice for each operation and two ends for each arrow.  Their threads are rows without numbers yet."""
    by_row: dict[_Row, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        by_row[_row(span, timeline, pids[span.rank])].append(span)
    ends: dict[tuple[str, object], list[tuple[Span, TraceEvent]]] = defaultdict(list)
    for row, spans in by_row.items():
        for lane, span in _lanes(spans):
            args: dict[str, str | float] = {"operation": str(span.op)} | ({"bytes": span.nbytes} if span.nbytes else {})
            args |= {"late_ms": span.late_s * 1e3} if span.late_s else {}
            kind = class_of(span.op)
            times = (begin_s + span.start_s, begin_s + span.end_s)
            event = _slice(f"{span.op.label} {kind}", kind, times, row._replace(lane=lane), args)
            yield event
            if span.op.kind in (SEND, RECV):
                ends[span.op.kind, (span.op.ranks, *span.op.reads, *span.op.writes)].append((span, event))
    for (kind, message), begins in ends.items():
        for begin, end in zip(begins, ends.get((RECV, message), ()), strict=False) if kind == SEND else ():
            yield from _arrow(begin, end, next(arrows))


def _row(span: Span, timeline: Timeline, pid: int) -> _Row:
    """Return the thread on which an operation is shown."""
    if span.op.kind == SEND:
        return _Row(pid, 1, f"to {timeline.device_names[span.op.ranks[1]]}")
    if span.op.kind == RECV:
        return _Row(pid, 2, f"from {timeline.device_names[span.op.ranks[0]]}")
    return _Row(pid, 3, "collectives") if span.op.kind in COLLECTIVES else _Row(pid, 0, span.op.stream)


def _lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """Yield the spans by start, with the first lane that is free then: slices of one thread may not overlap."""
    free_s: list[float] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        lane = next((lane for lane, end_s in enumerate(free_s) if end_s <= span.start_s), len(free_s))
        free_s[lane : lane + 1] = [span.end_s]
        yield lane, span


def _slice(name: str, category: str, times_s: tuple[float, float], row: _Row, args: Mapping[str, Any]) -> TraceEvent:
    """Return a complete event; whole nanoseconds keep neighbours from overlapping by rounding."""
    start, end = (round(time * 1e9) for time in times_s)
    place = {"ph": "X", "ts": start / 1e3, "dur": (end - start) / 1e3, "pid": row.pid, "tid": row}
    return {"name": name, "cat": category, "args": dict(args)} | place


def _arrow(begin: tuple[Span, TraceEvent], end: tuple[Span, TraceEvent], number: int) -> Iterator[TraceEvent]:
    """Yield both ends of the arrow from a send to its receive; none if the clocks differ so much that the receive ends
    before the send begins.
    """
    (sent, from_slice), (received, to_slice) = begin, end
    if received.end_s < sent.start_s:
        return
    common = {"name": "message", "cat": "message", "id": number, "args": {}}
    for phase, event in ({"ph": "s"}, from_slice), ({"ph": "f", "bp": "e"}, to_slice):
        position = {"ts": max(from_slice["ts"], event["ts"]), "pid": event["pid"], "tid": event["tid"]}
        yield common | phase | position


def _counters(timeline: Timeline, begin_s: float, pids: Sequence[int]) -> Iterator[TraceEvent]:
    """Yield the memory in use of each device, where it is known."""
    for pid, samples in zip(pids, timeline.memory, strict=False):
        for sample in samples:
            position = {"ph": "C", "ts": round((begin_s + sample.time_s) * 1e9) / 1e3, "pid": pid, "tid": 0}
            yield {"name": "memory", "cat": "memory", "args": {"bytes": sample.nbytes}} | position
