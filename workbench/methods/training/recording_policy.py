"""A policy that shows a user what the devices do, and one for a job that all devices do once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from workbench.core.cluster import Cluster, Factors
from workbench.core.errors import PlanError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.report import Recovery
from workbench.core.schedule import Ranks
from workbench.core.timeline import Timeline
from workbench.core.units import three_figures
from workbench.methods.base import SILENT_AFTER_STEPS, Event, Notify
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.records import Progress, show_device
from workbench.methods.common.session import LOADING, WAITING
from workbench.planners.pace import Pace
from workbench.runtime.commands import Generation, Parts, Policy, StepDone, is_finished
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.devices import Devices
from workbench.runtime.fleet import Fleet, fleet_of

REAL_PACE_S = 2.0
"""Seconds of computing over which a real device's pace is judged: its steps also vary by what else the device does."""


class RecordingPolicy(Policy):
    """A runtime.coordinator.Policy that notifies a user.

    notes: all messages.  least_timeout_s: shortest time-out of a generation on these devices.
    adapts: whether the run reacts to changes in speed.
    """

    adapts = True

    def __init__(self, notify: Notify) -> None:
        self._notify, self.notes, self.least_timeout_s = notify, list[str](), 0.0
        self._progress: Progress | None = None
        self._shown = 0  # the number of the last generation whose plan was shown
        self._fleet: Fleet | None = None

    def notify(self, event: Event) -> None:
        """Pass an event on; a device's state with what its own meter says."""
        if event.device is not None and self._fleet is not None:
            metered_j = self._fleet.metered_j.get(self._fleet.name(event.rank))
            event = event._replace(device=event.device._replace(metered_j=metered_j))
        self._notify(event)

    def say(self, text: str) -> None:
        """Notify the user."""
        self.notes.append(f"{text}.")
        self.notify(Event("note", message=text))

    def watch(self, generation: Generation) -> None:
        """Show the progress of a new generation."""
        members = generation.members

        def tell(event: Event) -> None:
            spans = tuple(
                span._replace(
                    rank=members[span.rank],
                    op=span.op._replace(ranks=tuple(members[rank] for rank in span.op.ranks)),
                )
                for span in event.spans
            )
            self.notify(event._replace(rank=members[event.rank], spans=spans))

        self._progress = Progress(generation.plan, tell)

    def _show(self, generation: Generation, progress: Mapping[str, Any]) -> None:
        """Show a generation's plan once a device works by it: simulating its steps before would delay the devices."""
        if self._shown != generation.number and progress.get("phase") not in (LOADING, WAITING):
            self._shown = generation.number
            plan = generation.plan.renumbered(dict(enumerate(generation.members)))
            self.notify(Event("plan", step=self.step, plan=plan, timelines=self.timelines(generation)))

    def generation_of(self, number: int, members: Ranks, plan: Plan, job: Any, timetable: Any) -> Generation:
        """Return a job of some devices as a generation.  timetable: the job's steps with their predicted seconds."""
        timeout_s = max(job.timeout_s, self.least_timeout_s, SILENT_AFTER_STEPS * timetable.longest_s())
        return Generation(number, members, plan, replace(job, timeout_s=timeout_s), timetable, timeout_s)

    def part(self, generation: Generation, place: int) -> Any:
        """Return the part of a job that a member gets (see Policy)."""
        return generation.job.on_rank(place)

    def timelines(self, generation: Generation) -> dict[str, Timeline]:
        """Return steps of a generation as simulated, by name: by default those of the prediction hold."""
        return {}

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Forward a device's progress."""
        if (
            generation is not None
            and rank in generation.members
            and self._progress is not None
            and isinstance(event, dict)
        ):
            self._show(generation, event)
            self._progress(generation.members.index(rank), event)

    def run(self, devices: Devices, cluster: Cluster, job: Job) -> tuple[Recovery, ...]:
        """Do the remaining steps on devices that may be lost, leave or come back; return the cost of such changes."""
        self.least_timeout_s = devices.timeout_s
        fleet, show = fleet_of(devices, cluster, job), partial(show_device, self.notify)
        self._fleet = fleet
        self.notify(Event("faults", faults=fleet.faults))
        pace = Pace(least_s=REAL_PACE_S if devices.is_real else 0.0)
        coordinator = Coordinator(fleet=fleet, policy=self, say=self.say, show=show, adapts=self.adapts, pace=pace)
        coordinator.run()
        for name, joules in fleet.metered_j.items():
            self.say(f"{name} used {three_figures(joules)} J, measured by its own meter, with all else that it did")
        return coordinator.recoveries


class OncePolicy(RecordingPolicy):
    """A RecordingPolicy of a job that all devices do once, and that ends if one of them is lost.

    timetable: the job's steps with their predicted seconds.  results: results by rank, once the job is done.
    """

    adapts = False

    def __init__(self, job: Any, plan: Plan, timetable: Any, notify: Notify) -> None:
        super().__init__(notify)
        self.job, self.plan, self._timetable = job, plan, timetable
        self.results: list[RankResult] = []

    @property
    def num_steps(self) -> int:
        """Return the steps of the job."""
        return self._timetable.num_steps

    @property
    def step(self) -> int:
        """Return the number of finished steps: all or none."""
        return self.num_steps if self.results else 0

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the whole job (see Policy)."""
        if len(ready) < self.job.cluster.world_size:
            raise PlanError(
                "All devices were to take part.",
                f"{len(ready)} of {self.job.cluster.world_size} are there.",
                "Run again.",
            )
        return self.generation_of(number, ready, self.plan, self.job, self._timetable)

    def begun(self, generation: Generation) -> Generation:
        """Show the job's progress."""
        self.watch(generation)
        return generation

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count no single step."""

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Take the results, unless it is to be done again."""
        if is_finished(parts, lost):
            self.results = [ended.part for _, ended in sorted(parts.items())]

    def differs(self, generation: Generation, ready: Ranks, factors: Factors) -> bool:
        """Return False, because there is only one plan."""
        return False
