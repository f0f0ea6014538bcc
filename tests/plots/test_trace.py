"""Chrome traces: every event is one of the Trace Event Format, and says what the timeline says."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import made_up_report
import pytest

from workbench.core import Op, Span, Timeline
from workbench.core.report import Report
from workbench.core.schedule import Value, recv, send
from workbench.plots.trace import chrome_trace, write_trace

Events = list[dict[str, Any]]
METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}


def faults(trace: dict[str, Any]) -> list[str]:
    """What contradicts the Trace Event Format, or would not be shown."""
    results, slices, arrows = [], defaultdict(list), defaultdict(list)
    named = {
        (event["pid"], event["tid"])
        for event in trace["traceEvents"]
        if event["name"] in ("process_name", "thread_name")
    }
    for event in trace["traceEvents"]:
        place, phase, ts = (event["pid"], event["tid"]), event["ph"], event["ts"]
        if not all(isinstance(number, int) for number in place) or ts < 0:
            results.append(f"place or time: {event}")
        if phase == "M":
            [value] = event["args"].values()
            results += [] if isinstance(value, METADATA[event["name"]]) else [f"metadata: {event}"]
        elif place not in named and (event["pid"], 0) not in named:
            results.append(f"no name: {event}")
        if phase == "X":
            slices[place].append((ts, ts + event["dur"]))
            results += [] if event["dur"] >= 0 and event["cat"] else [f"slice: {event}"]
        elif phase == "C":
            results += [] if all(value >= 0 for value in event["args"].values()) else [f"counter: {event}"]
        elif phase in "sf":
            arrows[event["id"]].append(event)
            results += [] if phase == "s" or event["bp"] == "e" else [f"arrow: {event}"]
        elif phase != "M":
            results.append(f"phase: {event}")
    for place, spans in slices.items():
        results += [f"overlap: {place} {a} {b}" for a, b in pairwise(spans) if b[0] < a[1] - 1e-6]
    for ends in arrows.values():
        for end in ends:
            if not any(start <= end["ts"] <= stop for start, stop in slices[end["pid"], end["tid"]]):
                results.append(f"arrow without a slice: {end}")
        results += [] if [end["ph"] for end in ends] == ["s", "f"] else [f"half an arrow: {ends}"]
    return results


def names(events: Events, kind: str = "process_name") -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == kind}


def overlapping() -> Timeline:
    """Two processors, two sends to one device that overlap, a receive that ends before its send, and a collective."""
    first, second = Value("act", 0, 0, 0), Value("act", 0, 1, 0)
    return Timeline(
        source="real",
        device_names=("one", "two"),
        spans=(
            Span(0, Op("F", 0, 0), 0.0, 0.1),
            Span(0, Op("F", 0, 1, stream="gpu"), 0.05, 0.15),
            Span(0, send(first, 0, 1), 0.1, 0.3),
            Span(0, send(second, 0, 1), 0.2, 0.4),
            Span(1, recv(first, 0, 1), 0.0, 0.3),
            Span(1, recv(second, 0, 1), 0.0, 0.19),
            Span(0, Op("ALLREDUCE", 0, ranks=(0, 1)), 0.4, 0.5, 10),
            Span(1, Op("ALLREDUCE", 0, ranks=(0, 1)), 0.4, 0.5, 10),
        ),
    )


def both(report: Report) -> Report:
    measured = made_up_report.timeline("emulated", "paced")
    later = replace(measured, spans=tuple(span._replace(end_s=span.end_s + 1) for span in measured.spans[-1:]))
    return replace(
        report,
        timelines={"first epoch, predicted": made_up_report.timeline(), "first epoch, measured": measured}
        | {"cached epoch, measured": later},
    )


@pytest.mark.parametrize("valid", [True, False])
def test_a_trace_of_predicted_and_measured_steps(tmp_path: Path, valid: bool) -> None:
    report = both(made_up_report.report(valid=valid))
    trace = json.loads(write_trace(report, tmp_path / "trace.json").read_text())
    assert faults(trace) == []
    events = trace["traceEvents"]
    mark = "" if valid else " (!)"
    assert [*names(events).values()] == [
        "steps",
        "predicted (simulated): 0 fast",
        "predicted (simulated): 1 slow",
        f"measured (emulated){mark}: 0 fast",
        f"measured (emulated){mark}: 1 slow",
    ]
    rows = names(events, "thread_name")
    assert list(rows.values()) == ["step", *["compute", "to slow", "compute", "from fast"] * 2]
    [(step, _), (cached, _)] = [
        (event["ts"], event["name"]) for event in events if event["ph"] == "X" and event["pid"] == 1
    ]
    assert step == 0 and cached == pytest.approx(10.5e6)  # the next step begins after the longer one and a pause
    begins = {event["pid"]: event["ts"] for event in reversed(events) if event["name"] == "0F0 forward"}
    assert begins == {2: 0, 4: 0}  # both kinds of one step begin together
    assert [event["ts"] / 1e6 for event in events if event["ph"] in "sf"] == [2, 2, 2, 2]
    assert {event["pid"] for event in events if event["ph"] == "C"} == {2, 3, 4, 5}
    assert ("warning" in trace["otherData"]) is not valid and trace["otherData"]["numbers"] == report.label
    [late] = {event["args"]["late_ms"] for event in events if "late_ms" in event.get("args", {})}
    assert late == 500


def test_operations_that_overlap_get_rows_of_their_own() -> None:
    trace = chrome_trace({"a step": overlapping()})
    assert faults(trace) == []
    first, second = (
        ["compute", "gpu", "to two", "to two (2)", "collectives"],
        ["from one", "from one (2)", "collectives"],
    )
    assert [*names(trace["traceEvents"], "thread_name").values()] == ["step", *first, *second]
    assert sum(event["ph"] == "s" for event in trace["traceEvents"]) == 1  # no arrow back in time


def test_a_report_without_timelines_gives_an_empty_trace() -> None:
    assert faults(chrome_trace({})) == []
