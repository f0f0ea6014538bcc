"""Galaxy+ as a Method: the functions that experiment.run calls, in call order, and the ranks' results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import SweepPoint
from workbench.core.spread import percentile
from workbench.core.timeline import Timeline
from workbench.methods.base import REAL_TIMEOUT_S, Event, Notify, Outcome, Planned, Prediction, ignore
from workbench.methods.common.device_counts import publishing
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.records import device_bytes, measured_timeline, overrun_share
from workbench.methods.galaxy_plus.costs import scaled_to
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.options import METHOD
from workbench.methods.galaxy_plus.planners.memory import check as check_memory
from workbench.methods.galaxy_plus.planning import (
    REQUEST,
    TOKEN,
    check_plan,
    plan_job,
    predict,
    problem_of,
    shown_request,
)
from workbench.methods.galaxy_plus.prepare import PreparedJob, local_hidden, local_texts, prepare, require_known
from workbench.methods.galaxy_plus.profiles import HostQuestion, analytic_profile, as_profile, host_profile, of_devices
from workbench.methods.galaxy_plus.serving.messages import Served, ServiceJob
from workbench.methods.galaxy_plus.serving.run_policy import RunPolicy
from workbench.methods.galaxy_plus.serving.worker import serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.methods.training.profiled import ProfiledMethod
from workbench.models.loading import load_tokenizer
from workbench.models.sharding import shard_spec
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines

SILENT_AFTER_REQUESTS = 10
SHORTEST_TIMEOUT_S = 20.0
SWEPT_TOKENS = 4


def measure_rank(context: RankContext, payload: tuple[HostQuestion, bool]) -> InferenceProfile:
    """Return the costs on this device's core.  payload: the HostQuestion, and whether to measure again."""
    question, refresh = payload
    return host_profile(question, publishing(context), refresh=refresh)


class GalaxyPlus(ProfiledMethod[PreparedJob]):
    """Single-shot inference of one sequence after the other, split inside the layers over unequal devices or by a
    baseline.
    """

    name = METHOD
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    measure_rank = staticmethod(measure_rank)
    plan = staticmethod(plan_job)

    def asked(self, prepared: PreparedJob) -> HostQuestion:
        """Return the parameters of a host profile (see ProfiledMethod)."""
        return HostQuestion.of(prepared)

    def joined(self, prepared: PreparedJob, cluster: Cluster, rows: Sequence[InferenceProfile]) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        return as_profile(of_devices(rows))

    def scaled(self, prepared: PreparedJob, cluster: Cluster, notify: Notify, *, refresh: bool) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        return as_profile(scaled_to(host_profile(self.asked(prepared), notify, refresh=refresh), cluster))

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        vocabulary = prepared.facts.vocabulary_size if prepared.options.generate else 0
        return as_profile(analytic_profile(prepared.job.model, cluster, vocabulary))

    def check(
        self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None
    ) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_memory(problem_of(prepared, profile, cluster), check_plan(prepared, profile, cluster, plan))

    def predict(self, planned: Planned[PreparedJob]) -> Prediction:
        """Simulate every request (see Method)."""
        return predict(*planned)

    def execute(
        self,
        planned: Planned[PreparedJob],
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Answer every request on the engines, and compare some answers with the local model's (see Method)."""
        prepared, cluster = planned.prepared, planned.cluster
        run = self._serve(planned, engines, prediction, notify)
        results, served = run.results, run.served[run.job.plan.ranks[0]]
        traces = zip(prediction.steps, served, strict=False)  # the first device's, from a request's start to its answer
        metrics = latency_metrics(served, prepared)
        outputs = [torch.from_numpy(answer.output) for answer in served if answer.output is not None]
        if outputs:
            notify(Event("phase", message="Comparing answers with the local model's", stage="compare"))
            metrics |= _compared(prepared, outputs)
        sent_bytes = sum(answer.sent_bytes for of_rank in run.served.values() for answer in of_rank)
        return Outcome(
            fidelity=engines.fidelity,
            steps=tuple(replace(record, measured_s=trace.end_s - trace.start_s) for record, trace in traces),
            timelines=measured_timelines(results, cluster, prediction, engines.fidelity),
            metrics=metrics,
            phases_s={
                "loading": max(result.spent_s["loading"] for result in results),
                "answering": served[-1].end_s - served[0].start_s,
            },
            bytes=device_bytes(results, cluster) | {"sent for a request": round(sent_bytes / len(served))},
            overrun_share=overrun_share(results, is_real=engines.fidelity == "real"),
            artifacts=_texts(prepared, outputs),
            notes=("Nothing is stored between runs of single requests, so all requests are answered again.",)
            if resume
            else (),
        )

    def _serve(
        self, planned: Planned[PreparedJob], engines: Engines, prediction: Prediction, notify: Notify
    ) -> RunPolicy:
        prepared, _, cluster, plan = planned
        is_real = engines.fidelity == "real"
        # A peer counts as silent when it takes far longer than a request should.
        slowest_s = max(step.predicted_s or 0.0 for step in prediction.steps)
        timeout_s = REAL_TIMEOUT_S if is_real else max(SHORTEST_TIMEOUT_S, SILENT_AFTER_REQUESTS * slowest_s)
        host = None if is_real else host_profile(self.asked(prepared), ignore)
        notify(
            Event(
                "phase",
                message=f"Answering {prepared.num_requests} requests on {cluster.in_words}, {engines.fidelity} links",
                stage="answer",
            )
        )
        setup = SessionSetup(model=prepared.job.model, cluster=cluster, host=host, timeout_s=timeout_s, is_run=True)
        policy = RunPolicy(list_job(prepared, cluster, plan, timeout_s=timeout_s), plan, notify)
        with engines.service(serve_worker, [setup] * cluster.world_size) as devices:
            policy.run(devices, cluster, prepared.job)
        return policy

    def sweep_point(
        self,
        planned: Planned[PreparedJob],
        name: str,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
        notify: Notify = ignore,
    ) -> SweepPoint:
        """Simulate the request of typical length under a plan, and measure it if engines are given (see Method).

        Of a text only the first SWEPT_TOKENS are written, because the others take as long.
        """
        check_plan(*planned)
        plan, planned = planned.plan, _of_requests(planned, num_steps)
        options = planned.prepared.options
        options = replace(options, generate=min(options.generate, SWEPT_TOKENS))
        planned = planned._replace(prepared=replace(planned.prepared, options=options))
        prediction = self.predict(planned)
        point = SweepPoint(
            name=name, plan=plan, predicted_s=prediction.steps[0].predicted_s or 0.0, num_steps=num_steps
        )
        if engines is None:
            return point
        run = self._serve(planned, engines, prediction, notify)
        measured_s = median(answer.end_s - answer.start_s for answer in run.served[run.job.plan.ranks[0]])
        return replace(point, measured_s=measured_s, overrun_share=overrun_share(run.results))

    def typical_step(self, planned: Planned[PreparedJob]) -> Timeline:
        """Simulate one request of typical length (see Method)."""
        return next(iter(self.predict(_of_requests(planned, 1)).timelines.values()))


def _of_requests(planned: Planned[PreparedJob], num_requests: int) -> Planned[PreparedJob]:
    """Return the job with the request of typical length, repeated."""
    test, shown = planned.prepared.test, shown_request(planned.prepared)
    ids: Any = (test.ids[shown],) * num_requests
    labels: Any = (test.labels[shown],) * num_requests
    repeated = replace(test, ids=ids, labels=labels, sample_ids=tuple(range(num_requests)), windows=())
    return planned._replace(prepared=replace(planned.prepared, test=repeated))


def _texts(prepared: PreparedJob, outputs: Sequence[Tensor]) -> dict[str, str]:
    """Return the stored texts in words: the request, a bar, the generated text."""
    if not prepared.options.generate:
        return {}
    backend = load_tokenizer(prepared.job.model).backend  # type: ignore[union-attr]
    ids = prepared.test.ids
    return {
        f"text {number}": f"{backend.decode(list(ids[number]))} | {backend.decode(output.tolist())}"
        for number, output in enumerate(outputs)
    }


def _compared(prepared: PreparedJob, outputs: Sequence[Tensor]) -> dict[str, float]:
    """Return the deviation of the stored answers from the local model's; for hidden states as a fraction of the largest
    absolute value.
    """
    requests = [prepared.request(number) for number in range(len(outputs))]
    name, generate = prepared.job.model, prepared.options.generate
    if generate:
        texts = local_texts(name, requests, generate)
        return {"texts that differ": float(sum(not bool((a == b).all()) for a, b in zip(outputs, texts, strict=True)))}
    pairs = zip(outputs, local_hidden(name, requests), strict=True)
    return {
        "largest error": max(
            (float((answer - right).abs().max() / right.abs().max()) for answer, right in pairs), default=0.0
        )
    }


def list_job(prepared: PreparedJob, cluster: Cluster, plan: Plan, *, timeout_s: float) -> ServiceJob:
    """Return the job of all devices: every request in turn, under one plan."""
    assert plan.inference is not None
    chosen, stacks = plan.inference, prepared.layout.stacks
    return ServiceJob(
        index=0,
        plan=chosen,
        members=tuple(range(cluster.world_size)),
        specs={rank: shard_spec(chosen, position, stacks) for position, rank in enumerate(chosen.ranks)},
        requests=tuple(map(prepared.request, range(prepared.num_requests))),
        arrivals_s=(),
        first_step=0,
        last_step=prepared.num_requests,
        begin_s=None,
        cluster=cluster,
        timeout_s=timeout_s,
        generate=prepared.options.generate,
        shown=shown_request(prepared),
        num_outputs=prepared.options.compare,
    )


def latency_metrics(traces: Sequence[Served], prepared: PreparedJob) -> dict[str, float]:
    """Return mean, percentiles and throughput; for texts also the time of the first token and of each further one."""
    latencies = [trace.end_s - trace.start_s for trace in traces]
    metrics = {
        "requests": float(len(latencies)),
        "latency mean s": statistics.fmean(latencies),
        **{f"latency p{share} s": percentile(latencies, share / 100) for share in (50, 95, 99)},
        "requests per s": len(latencies) / (traces[-1].end_s - traces[0].start_s),
    }
    further = [seconds for trace in traces for seconds in trace.token_s]
    if prepared.options.generate:
        firsts = [trace.end_s - trace.start_s - sum(trace.token_s) for trace in traces]
        metrics["first token s"] = statistics.fmean(firsts)
    if further:
        metrics["further token s"] = statistics.fmean(further)
    return metrics


def measured_timelines(
    results: Sequence[RankResult], cluster: Cluster, prediction: Prediction, fidelity: str
) -> dict[str, Timeline]:
    """Return the timelines of the request, and token, that the prediction shows."""
    timelines = {}
    for step, name in enumerate((REQUEST, TOKEN)):
        predicted = prediction.timelines.get(f"{name}, predicted")
        parts = [next(((trace.spans, trace.memory) for trace in result.steps[step:]), ((), ())) for result in results]
        if predicted is None or not any(spans for spans, _ in parts):
            continue
        begin_s = min(span.start_s for spans, _ in parts for span in spans if not span.op.is_communication)
        resident = [result.nbytes["weights"] for result in results]
        timelines[f"{name}, measured"] = measured_timeline(
            parts, cluster, fidelity, begin_s=begin_s, resident=resident, title=predicted.title
        )
    return timelines
