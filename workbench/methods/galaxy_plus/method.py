"""Galaxy+ as a Method: the functions that experiment.run calls, in call order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.inference import InferenceProfile
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import SweepPoint
from workbench.methods.base import Engines, Event, Notify, Outcome, Planned, Prediction, ignore
from workbench.methods.common.plans import REAL_TIMEOUT_S
from workbench.methods.common.records import overrun_share
from workbench.methods.common.scaling import forward_costs
from workbench.methods.galaxy_plus.launch import (
    Progress,
    largest_error,
    latency_metrics,
    measured_steps,
    measured_timelines,
    rank_job,
)
from workbench.methods.galaxy_plus.planning import check_memory, check_plan, inference_of, plan_job
from workbench.methods.galaxy_plus.predict import predict, shown_request
from workbench.methods.galaxy_plus.prepare import METHOD, PreparedJob, prepare, require_known
from workbench.methods.galaxy_plus.profiles import HostQuestion, answer_of_host, as_profile, catalogue_profile, host_profile, of_devices
from workbench.methods.galaxy_plus.requests import local_hidden, local_texts
from workbench.methods.galaxy_plus.worker import RankServed, serve_rank
from workbench.methods.training.method import ProfiledMethod
from workbench.models.loading import load_tokenizer
from workbench.profiler.analytic import LayerCost
from workbench.profiler.inference import scaled_to
from workbench.runtime.context import RankContext

SILENT_AFTER_REQUESTS = 10
SHORTEST_TIMEOUT_S = 20.0


def measure_rank(context: RankContext, asked: tuple[HostQuestion, bool]) -> InferenceProfile:
    """Return the costs on this device's core.  asked: the HostQuestion, and whether to measure again."""
    question, refresh = asked
    return answer_of_host(question, ignore, refresh=refresh)


class GalaxyPlus(ProfiledMethod[PreparedJob]):
    """Single-shot inference of one sequence after the other, split inside the layers over unequal devices, or by a baseline."""

    name = METHOD
    known = staticmethod(require_known)
    prepared = staticmethod(prepare)
    measure_rank = staticmethod(measure_rank)

    def asked(self, prepared: PreparedJob) -> HostQuestion:
        """Return the parameters of a host profile (see ProfiledMethod)."""
        return HostQuestion.of(prepared)

    def joined(self, prepared: PreparedJob, cluster: Cluster, rows: Sequence[InferenceProfile]) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        return as_profile(of_devices(rows), cluster)

    def scaled(self, prepared: PreparedJob, cluster: Cluster, notify: Notify, *, refresh: bool) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        return as_profile(scaled_to(host_profile(prepared, notify, refresh=refresh), cluster), cluster)

    def catalogue(self, prepared: PreparedJob, cluster: Cluster) -> Profile:
        """Return every operation's cost on every device (see ProfiledMethod)."""
        return as_profile(catalogue_profile(prepared, cluster), cluster)

    def layer_costs(self, prepared: PreparedJob, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's FLOPs of a forward pass and its bytes, computed from sizes (see Method)."""
        return forward_costs(prepared.facts, batch=batch, sequence_length=sequence_length)

    def plan(self, prepared: PreparedJob, profile: Profile, cluster: Cluster) -> Plan:
        """Run the planner of the job's system (see Method)."""
        return plan_job(prepared, profile, cluster)

    def check(self, prepared: PreparedJob, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Check for errors that would end the run later (see Method)."""
        check_memory(prepared, inference_of(profile), cluster, check_plan(prepared, profile, cluster, plan))

    def predict(self, planned: Planned[PreparedJob]) -> Prediction:
        """Simulate every request (see Method)."""
        return predict(*planned)

    def execute(
        self, planned: Planned[PreparedJob], prediction: Prediction, engines: Engines, *, folder: Path, resume: bool, notify: Notify
    ) -> Outcome:
        """Answer every request on the engines, and compare some answers with the local model's (see Method)."""
        prepared, cluster = planned.prepared, planned.cluster
        results = self._serve(planned, engines, prediction, notify)
        served = _first(results, planned.plan)
        steps = measured_steps(served, prediction.steps)
        metrics = latency_metrics(served, prepared)
        if served.outputs:
            notify(Event("phase", message="Comparing answers with the local model's", stage="compare"))
            metrics |= _compared(prepared, served)
        sent = sum(trace.bytes_sent for result in results for trace in result.requests)
        return Outcome(
            fidelity=engines.fidelity,
            steps=steps,
            timelines=measured_timelines(results, cluster, prediction, engines.fidelity),
            metrics=metrics,
            phases_s={
                "loading": max(result.load_s for result in results),
                "answering": served.requests[-1].end_s - served.requests[0].start_s,
            },
            bytes={f"{cluster.devices[result.rank].name}: {name}": size for result in results for name, size in result.nbytes.items()}
            | {"sent for a request": round(sent / len(served.requests))},
            overrun_share=overrun_share(results, is_real=engines.fidelity == "real"),
            artifacts=_texts(prepared, served),
            notes=("Nothing is kept between runs of single requests, so there is nothing to resume: all are answered.",) if resume else (),
        )

    def _serve(self, planned: Planned[PreparedJob], engines: Engines, prediction: Prediction, notify: Notify) -> list[RankServed]:
        prepared, _, cluster, plan = planned
        is_real = engines.fidelity == "real"
        # A peer counts as silent when it takes far longer than a request should.
        slowest_s = max(step.predicted_s or 0.0 for step in prediction.steps)
        timeout_s = REAL_TIMEOUT_S if is_real else max(SHORTEST_TIMEOUT_S, SILENT_AFTER_REQUESTS * slowest_s)
        host = None if is_real else host_profile(prepared, ignore)
        message = rank_job(prepared, cluster, plan, host, timeout_s=timeout_s)
        notify(
            Event(
                "phase",
                message=f"Answering {prepared.num_requests} requests on {cluster.size_words}, {engines.fidelity} links",
                stage="answer",
            )
        )
        return engines.run(serve_rank, [message] * cluster.world_size, on_event=Progress(plan, notify))

    def sweep_point(self, planned: Planned[PreparedJob], name: str, engines: Engines | None, *, num_steps: int, folder: Path) -> SweepPoint:
        """Simulate the request of typical length under a plan, and measure it if engines are given (see Method)."""
        prepared, profile, cluster, plan = planned
        shown = shown_request(prepared)
        test = prepared.test
        ids: Any = (test.ids[shown],) * num_steps
        labels: Any = (test.labels[shown],) * num_steps
        repeated = replace(prepared, test=replace(test, ids=ids, labels=labels, sample_ids=tuple(range(num_steps)), windows=()))
        check_plan(prepared, profile, cluster, plan)
        planned = planned._replace(prepared=repeated)
        prediction = self.predict(planned)
        point = SweepPoint(name=name, plan=plan, predicted_s=prediction.steps[0].predicted_s or 0.0, num_steps=num_steps)
        if engines is None:
            return point
        results = self._serve(planned, engines, prediction, ignore)
        measured_s = median(trace.end_s - trace.start_s for trace in _first(results, plan).requests)
        return replace(point, measured_s=measured_s, overrun_share=overrun_share(results))


def _first(results: Sequence[RankServed], plan: Plan) -> RankServed:
    """Return the results of the device that receives requests and returns answers."""
    assert plan.inference is not None
    return next(result for result in results if result.rank == plan.inference.ranks[0])


def _texts(prepared: PreparedJob, served: RankServed) -> dict[str, str]:
    """Return the kept texts in words: the request, a bar, the generated text."""
    if not prepared.options.generate:
        return {}
    backend = load_tokenizer(prepared.job.model).backend  # type: ignore[union-attr]
    ids = prepared.test.ids
    return {
        f"text {number}": f"{backend.decode(list(ids[number]))} | {backend.decode(output.tolist())}"
        for number, output in enumerate(served.outputs)
    }


def _compared(prepared: PreparedJob, served: RankServed) -> dict[str, float]:
    """Return the deviation of the kept answers from the local model's."""
    requests = [prepared.request(number) for number in range(len(served.outputs))]
    name, generate = prepared.job.model, prepared.options.generate
    if generate:
        texts = local_texts(name, requests, generate)
        return {"texts that differ": float(sum(not bool((a == b).all()) for a, b in zip(served.outputs, texts, strict=True)))}
    return {"largest error": largest_error(served.outputs, local_hidden(name, requests))}
