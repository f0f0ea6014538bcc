"""One sequence to be split among devices, with the answers of planners, simulator and memory check (Galaxy+, section
III-C).

And a serving system of which a device breaks, simulated at once (section III-E, Fig. 16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan
from workbench.core.job import Job
from workbench.core.spread import Spread
from workbench.methods import load_method
from workbench.methods.base import ignore
from workbench.methods.galaxy_plus import planners as galaxy_plus
from workbench.methods.galaxy_plus.costs import analytic_inference
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.prepare import prepare
from workbench.methods.galaxy_plus.prices import SequencePrice, tune
from workbench.methods.galaxy_plus.profiles import HostQuestion, inference_of
from workbench.methods.galaxy_plus.serving.figures import serving
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import Planner, Times
from workbench.methods.galaxy_plus.serving.serve import planner_of, serve_emulated, simulated_times
from workbench.methods.galaxy_plus.serving.simulation import simulate_serving
from workbench.planners import Problem
from workbench.runtime.virtual_work import VirtualWorld
from workbench.widgets.explorer import Explorer
from workbench.widgets.fields import lab_controls
from workbench_labs.planning import Comparison, as_described, compared, with_bandwidth
from workbench_labs.plots.overlapping import OverlapCell
from workbench_labs.plots.request_latencies import request_latencies

SequenceProblem = Problem[InferenceProfile]
"""The problem of splitting one sequence among devices."""

FEW, MORE = 3, 7
"""Layers of two models.  Their difference gives the time of a layer, without the extra work of the first and the last
one."""


def one_layer(problem: SequenceProblem) -> SequenceProblem:
    """Return the problem of a model with one layer in each stack, which the schedule player can show tile by tile."""
    stacks = tuple(replace(stack, num_layers=1) for stack in problem.profile.stacks)
    return replace(problem, profile=replace(problem.profile, stacks=stacks))


def with_schemes(problem: SequenceProblem, plan: InferencePlan, schemes: Sequence[int]) -> InferencePlan:
    """Return a hybrid plan with other schemes, layer by layer.  Raises ConfigError if their number is not that of the
    layers.
    """
    if len(schemes) != problem.profile.num_layers:
        raise ConfigError(
            f"Schemes for {len(schemes)} layers were asked for.",
            f"The model has {problem.profile.num_layers}.",
            "Give one for each.",
        )
    return replace(plan, method="by hand", schemes=tuple(schemes))


def fullness(problem: SequenceProblem, plan: InferencePlan) -> float:
    """Return the largest share of its budget that a device of the plan needs; above 1 the device is out of memory."""
    needs, devices = galaxy_plus.needs(problem, plan), problem.cluster.devices
    return max(need.total_bytes / devices[rank].memory_bytes for rank, need in needs.items())


def refusal(problem: SequenceProblem, plan: InferencePlan) -> PlanError | None:
    """Return the reason why a plan does not fit, naming device and bytes; None if it fits."""
    try:
        galaxy_plus.check(problem, plan)
    except PlanError as error:
        return error
    return None


def measured_problem(job: Job, cluster: Cluster) -> SequenceProblem:
    """Return the problem of a job's requests; operations are measured on this machine once, and scaled to the
    devices.
    """
    prepared = prepare(job)
    profile = load_method(job.method).profile(prepared, cluster, ignore, emulated=not cluster.is_real)
    return Problem(
        inference_of(profile), cluster, sequence_length=prepared.typical_length, decoder_length=prepared.decoder_length
    )


def described_problem(model: str, cluster: Cluster, *, length: int) -> SequenceProblem:
    """Return a problem at the paper's scale: a model of profiler.descriptions on catalogue devices, with computed, not
    measured, costs.
    """
    described = as_described(cluster)
    return Problem(analytic_inference(model, described), described, sequence_length=length)


def _galaxy_plus(problem: SequenceProblem) -> InferencePlan:
    return tune(problem, galaxy_plus.plans(problem), SequencePrice(problem), tries=40)


def _oracle(problem: SequenceProblem) -> InferencePlan:
    best = galaxy_plus.oracle(problem)
    if best is None:
        raise PlanError("The best plan by Eq. 5-9 was asked for.", "There is none that fits.", "Add memory or devices.")
    return replace(best.plan, overlap=True)  # Eq. 5-9 ignore overlap; the others' plans have it


PLANNERS: dict[str, Callable[[SequenceProblem], InferencePlan]] = {
    "Galaxy+": _galaxy_plus,
    "Algorithm 1": galaxy_plus.algorithm_1,
    "oracle (Eq. 5-9)": _oracle,
    "Galaxy": galaxy_plus.galaxy,
    "Megatron-LM": galaxy_plus.megatron_lm,
    "sequence parallel": galaxy_plus.sequence_parallel,
    "EdgeShard": galaxy_plus.edgeshard,
    "one device": galaxy_plus.local,
}
"""The planners and the systems that Galaxy+ is compared with (section IV-A), by the name that widgets and figures
show."""


def compare_inference(problem: SequenceProblem, planners: Sequence[str] = tuple(PLANNERS)) -> tuple[Comparison, ...]:
    """Return each planner's result for a problem; a plan that does not fit has a reason."""
    return compared(problem, {name: PLANNERS[name] for name in planners}, SequencePrice(problem))


def overlap_cells(
    problem: SequenceProblem, plan: InferencePlan, megabits_per_s: Sequence[float]
) -> tuple[OverlapCell, ...]:
    """Return the gain from overlap (Galaxy+, section III-D): a layer of the plan's first scheme at each bandwidth.

    Each is timed as computation alone (links take no time), communication alone (operations take no time), and both.
    """
    cells = []
    for megabit_per_s in megabits_per_s:
        cluster = with_bandwidth(problem.cluster, megabit_per_s)
        free = with_bandwidth(problem.cluster, 1e12).with_links(lambda link: replace(link, latency_s=0.0))
        idle = replace(
            problem.profile, costs=tuple(tuple(_nothing(cost) for cost in row) for row in problem.profile.costs)
        )
        cells.append(
            OverlapCell(
                f"{megabit_per_s:g} Mbit/s",
                _layer(plan, replace(problem, cluster=free), 0.0),
                _layer(plan, replace(problem, cluster=cluster, profile=idle), MESSAGE_S),
                _layer(plan, replace(problem, cluster=cluster), MESSAGE_S),
            )
        )
    return tuple(cells)


def _layer(plan: InferencePlan, problem: SequenceProblem, message_s: float) -> Spread:
    seconds = []
    for count in (FEW, MORE):
        stacks = tuple(replace(stack, num_layers=count) for stack in problem.profile.stacks)
        repeated = replace(plan, schemes=plan.schemes[:1] * (count * len(stacks)))
        short = replace(problem, profile=replace(problem.profile, stacks=stacks))
        seconds.append(SequencePrice(short, message_s).timeline(repeated).makespan_s)
    return Spread.exactly((seconds[1] - seconds[0]) / (MORE - FEW))


def _nothing(costs: StackTimes) -> StackTimes:
    return StackTimes(pieces={kind: PieceCost() for kind in costs.pieces})


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service in virtual time.  first: the plan over all devices.  request_s: time of a request with it."""

    problem: SequenceProblem
    planner: Planner
    times: Times
    first: InferencePlan
    request_s: float

    @classmethod
    def of(cls, problem: SequenceProblem) -> Self:
        """Return the service that answers a problem's requests."""
        lengths = galaxy_plus.lengths_of(problem)
        planner = planner_of(problem.profile, problem.cluster, lengths)
        times = simulated_times(problem.profile, problem.cluster, lengths)
        first = planner(tuple(range(problem.cluster.world_size)))
        return cls(problem=problem, planner=planner, times=times, first=first, request_s=times(first, {}).seconds)

    def stream(
        self, faults: Sequence[Fault], rescheduling: ReschedulingSettings, *, num_requests: int, **more: Any
    ) -> ServingReport:
        """Return the report of so many requests, back to back (simulated).  more: settings of simulate_serving."""
        usual_s = self.request_s
        return simulate_serving(
            self.problem.profile,
            self.problem.cluster,
            self.planner,
            self.times,
            stream=StreamSettings(num_requests=num_requests, length=self.problem.sequence_length),
            rescheduling=rescheduling,
            faults=faults,
            world=VirtualWorld(start_s=0.0, restart_s=20 * usual_s, join_s=usual_s, probe_s=0.2 * usual_s),
            **more,
        )


class StragglerLab(Explorer):
    """Controls for one fault and the reaction to it; throughput with and without re-scheduling, processors and events
    below.

    reports: the results shown, by name.  fault, rescheduling: the controls' settings.
    """

    def __init__(self, problem: SequenceProblem, *, num_requests: int = 400) -> None:
        self.problem = problem
        self._service = Service.of(problem)
        whole_s = num_requests * self._service.request_s
        self._num_requests, self._tick_s = num_requests, whole_s / 100
        names = [(device.name, rank) for rank, device in enumerate(problem.cluster.devices)]
        controls = lab_controls("straggler", {"device": names}, device=1)
        self.device, self.kind, self.factor, self.start, self.duration, self.reaction = controls
        self.reports: dict[str, ServingReport] = {}
        super().__init__(
            [widgets.HBox(controls[:3]), widgets.HBox(controls[3:])],
            controls,
            lambda: (self.fault, self.rescheduling),
            lambda request: self._serve(*request),
            tabs=("Throughput", "Latencies"),
        )

    @property
    def fault(self) -> Fault:
        """Return the fault, in seconds of the stream."""
        start_s = self.start.value * self._tick_s
        end_s = start_s + self.duration.value * self._tick_s
        factor = self.factor.value if self.kind.value == "slow" else 1.0
        return Fault(kind=self.kind.value, rank=self.device.value, start=start_s, end=end_s, factor=factor)

    @property
    def rescheduling(self) -> ReschedulingSettings:
        """Return the settings, with times that suit the duration of a request on this cluster."""
        return settings_for(self._service.request_s, reaction=self.reaction.value)

    @property
    def report(self) -> ServingReport:
        """Return the report of the stream with the chosen reaction."""
        return self.reports["with re-scheduling"]

    def _serve(self, fault: Fault, settings: ReschedulingSettings) -> None:
        self.factor.disabled = fault.kind != "slow"
        reports = {"with re-scheduling": self._simulated(fault, settings)}
        if fault.kind == "slow":  # a killed device has to be left out
            reports["without"] = self._simulated(fault, replace(settings, reaction="none"))
        self.reports = reports
        self.headline.say(*self._headline(fault))
        self.show(lambda: serving(self.reports), lambda: request_latencies(self.report))

    def _simulated(self, fault: Fault, settings: ReschedulingSettings) -> ServingReport:
        return self._service.stream((fault,), settings, num_requests=self._num_requests)

    def _headline(self, fault: Fault) -> tuple[str, str]:
        report = self.report
        before, end_s = report.throughput_per_s(0.0, fault.start) or 1 / self._service.request_s, fault.end
        assert end_s is not None
        second_half_s = fault.start + 0.5 * (end_s - fault.start)
        level, *others = (
            each.throughput_per_s(second_half_s, min(end_s, each.end_s)) / before for each in self.reports.values()
        )
        words = f"{level:.0%} of the throughput in the second half of the fault"
        words += "".join(f", {other:.0%} without re-scheduling" for other in others)
        lost = (
            f"{len(report.requests)} of {self._num_requests} requests answered, {report.num_lost} lost, "
            f"{report.num_repeated} repeated"
        )
        return words, f"{lost} (simulated)"


def serve_here(
    job: Job, cluster: Cluster, plan: InferencePlan, *, stream: StreamSettings, **settings: Any
) -> ServingReport:
    """Serve a stream on emulated devices, starting with a plan, and return its report (see serve_emulated).

    job: gives the model, and the settings for which it was profiled.  settings: rescheduling, faults, fidelity.
    """
    return serve_emulated(HostQuestion.of(prepare(job)), cluster, stream=stream, first_plan=plan, **settings)


def settings_for(request_s: float, *, reaction: Any = "exclude") -> ReschedulingSettings:
    """Return settings whose times are a few requests long: for services as fast as a laptop's or as slow as a Raspberry
    Pi's.
    """
    return ReschedulingSettings(
        reaction=reaction,
        report_every_s=4 * request_s,
        slow_factor=1.5,
        probe_every_s=10 * request_s,
        longest_probe_s=600 * request_s,
        calm_s=100 * request_s,
        request_timeout_s=max(5.0, 20 * request_s),
    )
