"""Convert rank messages to progress events, records and timelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import median
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.report import EpochRecord, StepRecord, SweepPoint
from workbench.core.schedule import RECV, SEND
from workbench.core.timeline import MemorySample, Span, Timeline, late_share_of
from workbench.methods.base import DeviceState, Event, Notify, Prediction
from workbench.methods.common.rank_results import RankResult, StepTrace, moved
from workbench.methods.common.session import SessionJob
from workbench.runtime.pacing import Pace

WARM_UP_STEPS = 2
"""Steps that a sweep runs first and does not count."""


class Progress:
    """Forwards device states, sums the ranks' parts of each step's loss, and reports completed steps."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        self._notify = notify
        self._reporters = {False: plan.busy_ranks, True: frozenset(plan.cached.ranks if plan.cached else ())}
        self._parts: dict[tuple[int, int], list[tuple[float, tuple[Span, ...]]]] = defaultdict(list)

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        """Handle an engine's event (see session.DeviceReporter)."""
        if "phase" in event:
            self._notify(device_event(rank, event))
        cached = bool(event.get("cached"))
        if not event.keys() >= {"loss", "epoch", "step", "num_steps"} or rank not in self._reporters[cached]:
            return
        epoch, step = event["epoch"], event["step"]
        parts = self._parts[epoch, step]
        parts.append((event["loss"], event.get("spans", ())))
        if len(parts) < len(self._reporters[cached]):
            return
        del self._parts[epoch, step]
        losses, spans = zip(*parts, strict=True)
        place = (rank, epoch, step, event["num_steps"])
        self._notify(Event("step", *place, sum(losses), samples=event.get("samples", 0)))
        if all(spans):
            self._notify(Event("spans", *place, spans=from_beginning(spans)))


def show_device(notify: Notify, rank: int, state: str) -> None:
    """Report that a device is lost, leaves or is back."""
    notify(Event("device", rank, message=state, device=DeviceState(state)))


def device_event(rank: int, event: Mapping[str, Any], step_label: str = ", step") -> Event:
    """Convert a device message to the event that all methods use.  Between phases there is no step.

    step_label: the method's word for a step.
    """
    at_step = event.keys() >= {"step", "num_steps"}
    step, num_steps = (event["step"], event["num_steps"]) if at_step else (-1, 0)
    state = DeviceState(event.get("phase", ""), event.get("step_s"), event.get("busy_s"), event.get("used_bytes"))
    message = f"{state.phase}{step_label} {step + 1} of {num_steps}" if at_step else state.phase
    return Event("device", rank, event.get("epoch", -1), step, num_steps, message=message, device=state)


def measured_steps(results: Sequence[RankResult], predicted: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Add measurements to the predicted steps: loss, and the time from one step's end to the next step's end."""
    by_step: dict[tuple[int, int], list[StepTrace]] = defaultdict(list)
    for result in results:
        for trace in result.steps:
            by_step[trace.epoch, trace.step].append(trace)
    # The time between the interruption and the resumption belongs to no step.
    resumed = {result.resumed_at for result in results}
    records, previous = [], None
    for record in predicted:
        traces = by_step.get((record.epoch, record.step))
        if not traces:
            continue
        end = max(trace.end_s for trace in traces)
        follows = record.step > 0 and (record.epoch, record.step) not in resumed
        start = min(trace.start_s for trace in traces)
        # The first step of an epoch that follows without a drain begins on some devices before the step before ends on
        # others.
        begin = previous if previous is not None and (follows or start < previous < end) else start
        previous = end
        loss = sum(trace.loss for trace in traces)
        records.append(replace(record, measured_s=end - begin, loss=loss, lowest_trained=traces[0].lowest_trained))
    return tuple(records)


def overrun_share(results: Sequence[RankResult], *, is_real: bool = False) -> float:
    """Return the late share of the emulated devices' time (see late_share_of), in the phase where it is largest.

    A short phase may be late although the whole run is hardly so.  A real device has no deadlines.
    """
    phases = () if is_real else zip_longest(*(result.paces for result in results), fillvalue=Pace(0.0, 0.0))
    return max(map(late_share_of, phases), default=0.0)


def sweep_point(name: str, plan: Plan, steps: Sequence[StepRecord], results: Sequence[RankResult] | None) -> SweepPoint:
    """Return the sweep point of a plan.

    steps: the predicted steps.  results: None if nothing was executed.
    """
    point = SweepPoint(
        name=name, plan=plan, predicted_s=median(step.predicted_s or 0.0 for step in steps), num_steps=len(steps)
    )
    if results is None:
        return point
    measured_s = median(step.measured_s or 0.0 for step in measured_steps(results, steps))
    return replace(point, measured_s=measured_s, overrun_share=overrun_share(results))


def epoch_records(steps: Sequence[StepRecord]) -> tuple[EpochRecord, ...]:
    """Return the epochs' seconds and mean losses."""
    records = []
    for epoch in sorted({step.epoch for step in steps}):
        epoch_steps = [step for step in steps if step.epoch == epoch]
        samples = sum(step.samples for step in epoch_steps)
        records.append(
            EpochRecord(
                epoch=epoch,
                cached=epoch_steps[0].cached,
                seconds=sum(step.measured_s or 0.0 for step in epoch_steps),
                loss=sum((step.loss or 0.0) * step.samples for step in epoch_steps) / samples,
            )
        )
    return tuple(records)


IN_USE = {False: "memory in use, first epoch", True: "memory in use, cached epoch"}
"""By whether epochs are cached, the name of the bytes that counted against a device's budget at an epoch's end."""


def measured_timelines(
    results: Sequence[RankResult],
    rank_job: SessionJob,
    prediction: Prediction,
    fidelity: str,
    resident: Mapping[bool, Sequence[int]],
) -> dict[str, Timeline]:
    """Return the measured timelines of the steps that the prediction shows, each with the predicted one.

    After a change the prediction is that of the remaining devices, so that the two can be compared.
    rank_job: job of the devices that did the last steps.  resident[cached][rank]: bytes that stay in memory.
    """
    timelines = {}
    for name, cached in (("first epoch", False), ("cached epoch", True)):
        since = rank_job.begins_at[0]
        epoch = min(
            (step.epoch for step in prediction.steps if step.cached == cached and step.epoch >= since), default=-1
        )
        count = sum(1 for step in prediction.steps if step.epoch == epoch)
        traced = (epoch, rank_job.traced_step(epoch, count))
        chosen = [
            [trace for trace in result.steps if (trace.epoch, trace.step) == traced and trace.spans]
            for result in results
        ]
        if not any(chosen):
            continue
        begin_s = min(trace.start_s for traces in chosen for trace in traces)
        parts = [
            (
                [span for trace in step_traces for span in trace.spans],
                [sample for trace in step_traces for sample in trace.memory],
            )
            for step_traces in chosen
        ]
        predicted = timelines[f"{name}, predicted"] = prediction.timelines[f"{name}, predicted"]
        measured = measured_timeline(
            parts, rank_job.cluster, fidelity, begin_s=begin_s, resident=resident[cached], title=predicted.title
        )
        in_use = tuple(result.nbytes.get(IN_USE[cached], 0) for result in results)
        timelines[f"{name}, measured"] = replace(measured, in_use_bytes=in_use if any(in_use) else ())
    return timelines


def measured_timeline(
    parts: Sequence[tuple[Sequence[Span], Sequence[MemorySample]]],
    cluster: Cluster,
    fidelity: str,
    *,
    begin_s: float,
    resident: Sequence[int],
    title: str,
) -> Timeline:
    """Return each rank's spans, settled, and memory samples from a given moment.  resident[rank]: bytes that stay in
    memory.
    """
    memory = [
        (
            MemorySample(0.0, resident_bytes),
            *(MemorySample(max(0.0, sample.time_s - begin_s), sample.nbytes + resident_bytes) for sample in samples),
        )
        for (_, samples), resident_bytes in zip(parts, resident, strict=True)
    ]
    spans = moved((span for rank_spans, _ in parts for span in rank_spans), -begin_s)
    return Timeline(
        source="real" if fidelity == "real" else "emulated",
        fidelity="" if fidelity == "real" else fidelity,  # type: ignore[arg-type]
        device_names=cluster.names,
        spans=tuple(sorted(settled(spans), key=lambda span: (span.rank, span.start_s))),
        memory=tuple(memory),
        budget_bytes=tuple(device.memory_bytes for device in cluster.devices),
        title=title,
    )


def from_beginning(spans: Iterable[Sequence[Span]]) -> tuple[Span, ...]:
    """Return the settled spans of all devices in a step, with its beginning as time 0."""
    all_spans = [span for device_spans in spans for span in device_spans]
    return tuple(settled(moved(all_spans, -min(span.start_s for span in all_spans))))


def settled(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with each communication starting when its last party arrives, and a transfer ending when it is
    received.

    This is as in the simulator.  A receive is posted long before its value is sent, the first member of a collective
    waits for the last, and the sender notices late that a send has completed.
    """
    begins: dict[tuple, float] = {}
    ends: dict[tuple, float] = {}
    for span in spans:
        if span.op.is_communication:
            key = _party_key(span)
            begins[key] = max(begins.get(key, 0.0), span.start_s)
            if span.op.kind == RECV:
                ends[key] = span.end_s
    settled_spans = []
    for span in spans:
        if span.op.is_communication:
            key = _party_key(span)
            end_s = ends.get(key, span.end_s)
            span = span._replace(start_s=min(begins[key], end_s), end_s=end_s)
        settled_spans.append(span)
    return settled_spans


def _party_key(span: Span) -> tuple:
    op = span.op
    return (op.ranks, *(op.reads or op.writes)[:1]) if op.kind in (SEND, RECV) else (op.ranks, op.kind, op.stage)


def device_bytes(results: Sequence[RankResult], cluster: Cluster) -> dict[str, int]:
    """Return each device's readings, named with the device.

    Of several results of a device, the bytes sent are added; of other readings the largest counts.
    """
    readings: dict[str, int] = {}
    for result in results:
        for name, nbytes in result.nbytes.items():
            key = f"{cluster.devices[result.rank].name}: {name}"
            before = readings.get(key, 0)
            readings[key] = before + nbytes if name == "sent" else max(before, nbytes)
    return readings


def phase_seconds(results: Sequence[RankResult]) -> dict[str, float]:
    """Return each phase's seconds from the first rank's start to the last rank's end."""
    names = {name: None for result in results for name in result.phases_s}
    return {
        name: max(result.phases_s[name][1] for result in results if name in result.phases_s)
        - min(result.phases_s[name][0] for result in results if name in result.phases_s)
        for name in names
    }
