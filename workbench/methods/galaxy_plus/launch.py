"""The driver's side of a run: the message to every rank, and the evaluation of the ranks' results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from workbench.core.cluster import Cluster
from workbench.core.inference import InferenceProfile
from workbench.core.plan import Plan
from workbench.core.report import StepRecord
from workbench.core.timeline import Timeline
from workbench.methods.base import Event, Notify, Prediction
from workbench.methods.common.records import device_event, measured_timeline
from workbench.methods.galaxy_plus.predict import REQUEST, TOKEN, shown_request
from workbench.methods.galaxy_plus.prepare import PreparedJob
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.methods.galaxy_plus.worker import RankJob, RankServed


def rank_job(prepared: PreparedJob, cluster: Cluster, plan: Plan, host: InferenceProfile | None, *, timeout_s: float) -> RankJob:
    """Return the message that starts every rank.  host: costs on one unslowed core, None if devices are not slowed down."""
    assert plan.inference is not None
    options = prepared.options
    return RankJob(
        setup=SessionSetup(model=prepared.job.model, cluster=cluster, host=host, timeout_s=timeout_s),
        plan=plan.inference,
        requests=prepared.test,
        generate=options.generate,
        warmup=options.warmup,
        shown=shown_request(prepared),
        kept=options.compare,
    )


class Progress:
    """Forwards device states, and every request that the first device has answered."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        assert plan.inference is not None
        self._first, self._notify = plan.inference.ranks[0], notify
        self._told = 0

    def __call__(self, rank: int, event: Mapping[str, Any]) -> None:
        """Handle an engine's event (see worker)."""
        self._notify(device_event(rank, event, " request"))
        if "num_steps" in event and rank == self._first:
            # Samples since the last report: not every short request is reported.
            step, count = event["step"], event["num_steps"]
            samples, self._told = step + 1 - self._told, step + 1
            self._notify(Event("step", rank, 0, step, count, seconds=event.get("step_s"), samples=samples))


def measured_steps(served: RankServed, predicted: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the predicted requests with the first device's measurements, from the request's start to its answer."""
    traces = zip(predicted, served.requests, strict=False)
    return tuple(replace(record, measured_s=trace.end_s - trace.start_s) for record, trace in traces)


def latency_metrics(served: RankServed, prepared: PreparedJob) -> dict[str, float]:
    """Return mean, percentiles and throughput; for texts also the time of the first token and of each further one."""
    traces = served.requests
    latencies = [trace.end_s - trace.start_s for trace in traces]
    metrics = {
        "requests": float(len(latencies)),
        "latency mean s": statistics.fmean(latencies),
        "latency p50 s": float(np.percentile(latencies, 50)),
        "latency p95 s": float(np.percentile(latencies, 95)),
        "latency p99 s": float(np.percentile(latencies, 99)),
        "requests per s": len(latencies) / (traces[-1].end_s - traces[0].start_s),
    }
    further = [seconds for trace in traces for seconds in trace.token_s]
    if prepared.options.generate:
        firsts = [trace.end_s - trace.start_s - sum(trace.token_s) for trace in traces]
        metrics["first token s"] = statistics.fmean(firsts)
    if further:
        metrics["further token s"] = statistics.fmean(further)
    return metrics


def measured_timelines(results: Sequence[RankServed], cluster: Cluster, prediction: Prediction, fidelity: str) -> dict[str, Timeline]:
    """Return the timelines of the request, and token, that the prediction shows."""
    timelines = {}
    for name in (REQUEST, TOKEN):
        known = prediction.timelines.get(f"{name}, predicted")
        parts = [(r.spans, r.memory) if name == REQUEST else (r.token_spans, r.token_memory) for r in results]
        if known is None or not any(spans for spans, _ in parts):
            continue
        begin_s = min(span.start_s for spans, _ in parts for span in spans if not span.op.is_communication)
        held = [result.nbytes["weights"] for result in results]
        timelines[f"{name}, measured"] = measured_timeline(parts, cluster, fidelity, begin_s=begin_s, resident=held, title=known.title)
    return timelines


def largest_error(answers: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Return the largest deviation from the local model's answers, as a fraction of their largest absolute value."""
    return max(
        (float((answer - right).abs().max() / right.abs().max()) for answer, right in zip(answers, expected, strict=True)), default=0.0
    )
