"""Break a device of a serving system and watch the reaction, simulated at once (Galaxy+, section III-E, Fig. 16)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.inference import InferencePlan
from workbench.core.job import Fidelity, Job
from workbench.core.serving import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.base import ignore
from workbench.methods.galaxy_plus.prepare import prepare
from workbench.methods.galaxy_plus.profiles import HostQuestion, host_profile
from workbench.methods.galaxy_plus.serving.serve import calibrate, planner_of, serve, simulated_times
from workbench.methods.galaxy_plus.serving.simulation import SimulatedWorld, simulate_serving
from workbench.plots import request_latencies, serving
from workbench.runtime.engines import default_pool
from workbench.widgets.controls import BIG_FIRST, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.inference_problem import InferenceProblem

KINDS = {"computes slower": "slow", "is killed": "kill", "freezes": "freeze"}
REACTIONS = {"leave it out": "exclude", "nothing": "none"}


class StragglerLab(Explorer):
    """Controls for one fault and the reaction to it; throughput with and without re-scheduling, processors and events below.

    reports: the results shown, by name.  fault, rescheduling: the controls' settings.
    """

    def __init__(self, problem: InferenceProblem, *, num_requests: int = 400) -> None:
        self.problem = problem
        self._planner = planner_of(problem.profile, problem.cluster, problem.lengths)
        self._times = simulated_times(problem.profile, problem.cluster, problem.lengths)
        self._typical_s = self._times(self._planner(tuple(range(problem.cluster.world_size))), {}).seconds
        whole_s = num_requests * self._typical_s
        self._num_requests, self._tick_s = num_requests, whole_s / 100
        names = [(device.name, rank) for rank, device in enumerate(problem.cluster.devices)]
        self.device = _choice("Device", "Which device", names, 1)
        self.kind = _choice("It", "What happens to it", KINDS.items(), "slow")
        self.factor = _slider("Times slower", "How many times slower it computes", 5.0, 1.5, 20.0, 0.5)
        part = "in hundredths of the undisturbed stream's time"
        self.start = _slider("From (%)", f"When it begins, {part}", 25, 0, 95, 5)
        self.duration = _slider("For (%)", f"How long it lasts, {part}", 40, 5, 200, 5)
        self.reaction = _choice("What to do", "What the portal does about a straggler", REACTIONS.items(), "exclude")
        self.reports: dict[str, ServingReport] = {}
        rows = [[self.device, self.kind, self.factor], [self.start, self.duration, self.reaction]]
        super().__init__(
            [widgets.HBox(row) for row in rows],
            [control for row in rows for control in row],
            lambda: (self.fault, self.rescheduling),
            lambda asked: self._serve(*asked),
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
        return settings_for(self._typical_s, reaction=self.reaction.value)

    @property
    def report(self) -> ServingReport:
        """Return the report of the stream with the chosen reaction."""
        return self.reports["with re-scheduling"]

    def _serve(self, fault: Fault, settings: ReschedulingSettings) -> None:
        self.factor.disabled = fault.kind != "slow"
        found = {"with re-scheduling": self._simulated(fault, settings)}
        if fault.kind == "slow":  # a killed device has to be left out
            found["without"] = self._simulated(fault, replace(settings, reaction="none"))
        self.reports = found
        self.headline.value = self._headline(fault)
        self.show(lambda: serving(self.reports), lambda: request_latencies(self.report))

    def _simulated(self, fault: Fault, settings: ReschedulingSettings) -> ServingReport:
        return simulate_serving(
            self.problem.profile,
            self.problem.cluster,
            self._planner,
            self._times,
            stream=StreamSettings(num_requests=self._num_requests, length=self.problem.length),
            rescheduling=settings,
            faults=(fault,),
            world=SimulatedWorld(restart_s=20 * self._typical_s, join_s=self._typical_s, probe_s=0.2 * self._typical_s),
        )

    def _headline(self, fault: Fault) -> str:
        report = self.report
        before = report.throughput_per_s(0.0, fault.start) or 1 / self._typical_s
        assert fault.end is not None
        level = report.throughput_per_s(fault.start + 0.5 * (fault.end - fault.start), min(fault.end, report.end_s))
        words = f"{level / before:.0%} of the throughput in the second half of the fault"
        if "without" in self.reports:
            without = self.reports["without"]
            other = without.throughput_per_s(fault.start + 0.5 * (fault.end - fault.start), min(fault.end, without.end_s))
            words += f", {other / before:.0%} without re-scheduling"
        lost = f"{len(report.requests)} of {self._num_requests} requests answered, {report.num_lost} lost, {report.num_repeated} repeated"
        return BIG_FIRST.format(words, f"{lost} (simulated)")


def serve_here(
    job: Job,
    cluster: Cluster,
    plan: InferencePlan,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings,
    faults: Sequence[Fault] = (),
    fidelity: Fidelity = "auto",
) -> ServingReport:
    """Serve a stream on emulated devices, starting with a plan, and return its report.  The engines are kept for the next call.

    job: gives the model, and the settings for which it was profiled.
    """
    host = host_profile(HostQuestion.of(prepare(job)), ignore)
    engines = default_pool().acquire(cluster, fidelity)
    calibrate(job.model, cluster, engines, host, stream=stream, first_plan=plan)
    return serve(job.model, cluster, engines, host, stream=stream, rescheduling=rescheduling, faults=faults, first_plan=plan)


def settings_for(request_s: float, *, reaction: Any = "exclude") -> ReschedulingSettings:
    """Return settings whose times are a few requests long: for services as fast as a laptop's or as slow as a Raspberry Pi's."""
    return ReschedulingSettings(
        reaction=reaction,
        report_every_s=4 * request_s,
        slow_factor=1.5,
        probe_every_s=10 * request_s,
        longest_probe_s=600 * request_s,
        calm_s=100 * request_s,
        request_timeout_s=max(5.0, 20 * request_s),
    )


def _choice(description: str, tooltip: str, options: Iterable[tuple[str, Any]], value: Any) -> widgets.Dropdown:
    return described(widgets.Dropdown, description, tooltip, width="23em", options=list(options), value=value)


def _slider(description: str, tooltip: str, value: float, least: float, most: float, step: float) -> widgets.FloatSlider:
    settings = {"min": least, "max": most, "step": step, "readout_format": ".0f" if step >= 1 else ".1f"}
    return described(widgets.FloatSlider, description, tooltip, width="23em", value=value, continuous_update=False, **settings)
