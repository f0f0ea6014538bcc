"""What lab 08, Break it, shows: text token by token, a student's rule in virtual time and on devices, recoveries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from workbench import experiment, plots
from workbench.core.device_faults import Fault
from workbench.core.job import Job
from workbench.core.report import Report, busy_note
from workbench.methods.galaxy_plus import planners as galaxy_plus
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.methods.galaxy_plus.serving.figures import serving
from workbench.methods.galaxy_plus.serving.records import ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import Rescheduler
from workbench.methods.galaxy_plus.serving.serve import planner_of, simulated_times
from workbench.widgets import passages_folder
from workbench.widgets.tables import Table
from workbench_labs.exercises.straggling import goodput, three_in_a_row, world
from workbench_labs.inference_problem import PLANNERS, StragglerLab, measured_problem, serve_here, settings_for
from workbench_labs.planning import on_this_computer
from workbench_labs.plots.request_latencies import request_latencies
from workbench_labs.ruling import Rule, ruled_by

__all__ = [
    "Host",
    "busy_note",
    "goodput_without",
    "longest_step",
    "plots",
    "recovery_steps",
    "request_latencies",
    "serve_three",
    "served_table",
    "serving",
    "straggler_lab",
    "text_table",
    "token_share",
    "world",
    "write_text",
]

FIRST, NEXT = "request, measured", "next token, measured"
NEVER, OURS = "never leave out", "the workbench's"


def write_text(parameters: Any) -> Report:
    """Let a decoder write two texts on a lab's emulated devices.  given: the lab's Parameters."""
    return experiment.run(parameters.text_job, parameters.cluster(), "execute", fidelity=parameters.fidelity)


def text_table(report: Report) -> Table:
    """Return what was written, and the time of the first and of a further token."""
    first, following = (report.timelines.get(name) for name in (FIRST, NEXT))
    rows = [(name, text) for name, text in report.artifacts.items()]
    if first is not None and following is not None:
        rows += [
            ("first token", f"{1e3 * first.makespan_s:.3g} ms"),
            ("a further token", f"{1e3 * following.makespan_s:.3g} ms"),
        ]
    return Table(("what", "answer"), rows, title=f"Written by {report.job.model} ({report.label})")


def token_share(report: Report) -> float:
    """Return the time of a further token over that of the first, in per cent; 0 if the run has neither."""
    first, following = (report.timelines.get(name) for name in (FIRST, NEXT))
    return 0.0 if first is None or following is None else round(100 * following.makespan_s / first.makespan_s, 1)


def straggler_lab() -> StragglerLab:
    """Return an explorer of one fault, on the service of the lab's exercises."""
    return StragglerLab(world().problem, num_requests=200)


def _whose(rule: Rule) -> str:
    return "three slow reports in a row" if rule is three_in_a_row else "yours"


def serve_three(rule: Rule) -> dict[str, ServingReport]:
    """Serve a stream whose device 1 is slow for a while: by a rule, without one, by the workbench's (simulated)."""
    whole_s = 200 * world().request_s
    faults = (Fault(kind="slow", rank=1, start=0.2 * whole_s, end=0.8 * whole_s, factor=5.0),)
    return {
        _whose(rule): world().serve(faults, decided_by=ruled_by(rule, [10.0] * world().size)),
        NEVER: world().serve(faults, decided_by=Rescheduler, reaction="none"),
        OURS: world().serve(faults, decided_by=Rescheduler),
    }


def goodput_without(served: Mapping[str, ServingReport]) -> float:
    """Return the goodput if nobody is left out."""
    return round(goodput(served[NEVER]), 2)


def served_table(served: Mapping[str, ServingReport]) -> Table:
    """Return what each way of reacting has answered."""
    rows = [
        (
            name,
            len(report.requests),
            report.num_lost,
            report.num_wrong,
            f"{len(report.requests) / report.end_s:.1f}" if report.requests else "",
            len(report.events_of("excluded")),
            len(report.events_of("readmitted")),
        )
        for name, report in served.items()
    ]
    columns = ("rule", "answered", "lost", "wrong", "answers per second", "left out", "taken back")
    first = next(iter(served.values()))
    return Table(columns, rows, title=f"A stream of requests ({first.label})")


class Host:
    """A service on a lab's emulated devices; its operations are measured on this computer once."""

    def __init__(self, parameters: Any) -> None:
        """given: the lab's Parameters."""
        self._parameters, self._cluster = parameters, on_this_computer(parameters.cluster())
        self.name = self._cluster.devices[parameters.straggler].name
        self._job = Job(
            method="galaxy_plus",
            model=parameters.model,
            task="sst2",
            data=passages_folder(count=4, sentences=12),
            test_samples=4,
            max_length=parameters.tokens,
        )

    @cached_property
    def _problem(self) -> Any:
        return measured_problem(self._job, self._cluster)

    @cached_property
    def _first(self) -> Any:
        return PLANNERS["Algorithm 1"](self._problem)

    @cached_property
    def _request_s(self) -> float:
        return SequencePrice(self._problem)(self._first)

    def _serve(self, fault: Fault, reaction: str = "exclude", **settings: Any) -> ServingReport:
        stream = StreamSettings(num_requests=self._parameters.stream_requests, length=self._problem.sequence_length)
        return serve_here(
            self._job,
            self._cluster,
            self._first,
            stream=stream,
            rescheduling=settings_for(max(self._request_s, 0.02), reaction=reaction),
            faults=(fault,),
            fidelity=self._parameters.fidelity,
            **settings,
        )

    def serve_three(self, rule: Rule) -> dict[str, ServingReport]:
        """Serve a stream in which one device becomes slower: by a rule, without one, by the workbench's."""
        whole_s, parameters = self._parameters.stream_requests * self._request_s, self._parameters
        slow = Fault(
            kind="slow", rank=parameters.straggler, start=0.2 * whole_s, end=0.8 * whole_s, factor=parameters.slower
        )
        lengths = galaxy_plus.lengths_of(self._problem)
        blocks = simulated_times(self._problem.profile, self._cluster, lengths)(self._first, {}).blocks
        usual_ms = [1e3 * sum(blocks.get(rank, {}).values()) for rank in range(self._cluster.world_size)]
        return {
            _whose(rule): self._serve(slow, decided_by=ruled_by(rule, usual_ms)),
            NEVER: self._serve(slow, "none"),
            OURS: self._serve(slow),
        }

    def serve_killed(self) -> tuple[ServingReport, float]:
        """Serve a stream in which one device is killed; return also the seconds that planning without it takes."""
        at_s = 0.3 * self._parameters.stream_requests * self._request_s
        report = self._serve(Fault(kind="kill", rank=self._parameters.straggler, start=at_s))
        others = tuple(rank for rank in range(self._cluster.world_size) if rank != self._parameters.straggler)
        planner = planner_of(self._problem.profile, self._cluster, galaxy_plus.lengths_of(self._problem))
        begin_s = time.perf_counter()
        planner(others)
        return report, time.perf_counter() - begin_s


def steps_after_a_kill(killed: tuple[ServingReport, float]) -> dict[str, float]:
    """Return the seconds of each step of a recovery.  killed: see Host.serve_killed."""
    report, plan_s = killed
    moments = {
        kind: next((event.time_s for event in report.events if event.kind == kind), None)
        for kind in ("killed", "lost", "switched")
    }
    lost_s = moments["lost"]
    if moments["killed"] is None or lost_s is None:
        return {}
    after = (event.time_s for event in report.events if event.kind == "switched" and event.time_s >= lost_s)
    begins_s = next(after, lost_s)
    answered_s = next((request.end_s for request in report.requests if request.end_s > begins_s), begins_s)
    return {
        "noticing": lost_s - moments["killed"],
        "planning": plan_s,
        "reading": max(0.0, begins_s - lost_s - plan_s),
        "repeating": answered_s - begins_s,
    }


def recovery_steps(killed: tuple[ServingReport, float]) -> Table:
    """Return how long each step of a recovery took."""
    words = {
        "noticing": "noticing: from the kill until the portal knows",
        "planning": "planning again (measured apart)",
        "reading": "reading weights, and forming a group again",
        "repeating": "repeating the request that was in flight",
    }
    rows = [(words[name], f"{1e3 * seconds:.0f} ms") for name, seconds in steps_after_a_kill(killed).items()]
    report = killed[0]
    counts = f"{report.num_lost} lost, {report.num_wrong} wrong, {report.num_repeated} repeated"
    note = f"{len(report.requests)} answered, {counts}."
    return Table(("step", "time"), rows, title=f"After the kill ({report.label})", note=note)


def longest_step(killed: tuple[ServingReport, float]) -> str:
    """Return the name of the longest step of a recovery."""
    steps = steps_after_a_kill(killed)
    return max(steps, key=lambda name: steps[name]) if steps else "none"
