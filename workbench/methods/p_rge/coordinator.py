"""A run on devices that may die, come back or change their pace: who does which steps, decided anew whenever that changes.

Between two such moments, in one generation, the devices work by themselves: they exchange losses and make the same updates.  A
generation ends when all its steps are done, when its members pause together, or when one of them is lost.  What the next one begins with is
the log of seeds and scalars, which every device makes into the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import DeviceLostError, PlanError
from workbench.core.plan import Plan
from workbench.methods.base import Event, Notify
from workbench.methods.common.records import Progress
from workbench.methods.p_rge.devices import Devices, Generation
from workbench.methods.p_rge.faults import StepFault
from workbench.methods.p_rge.handlers import record_of
from workbench.methods.p_rge.history import History, words
from workbench.methods.p_rge.launch import Launcher
from workbench.methods.p_rge.messages import Abort, Ended, Pause, Probe, Probed, Ready, Train
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.session import RankPart, StepDone
from workbench.planners.adaptive import Pace
from workbench.runtime.engine_service import EngineService, News


@dataclass(kw_only=True)
class Done:
    """What came of a run.  parts: of every generation, the members with what each did.  predicted_s: by step, under the plan of then."""

    parts: list[tuple[Generation, dict[int, RankPart]]] = field(default_factory=list)
    predicted_s: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


PROBE_EVERY = 4
"""Steps between two probes of a device that has nothing to do since it was found slow."""


class Coordinator:
    """One run.  Ranks are the cluster's; a generation's members have ranks of their own among themselves."""

    def __init__(
        self,
        service: EngineService,
        prepared: PreparedJob,
        cluster: Cluster,
        launcher: Launcher,
        history: History,
        faults: tuple[StepFault, ...],
        notify: Notify,
    ) -> None:
        self._service, self._prepared, self._cluster, self._notify = service, prepared, cluster, notify
        self._launcher, self._history, self._faults = launcher, history, list(faults)
        self._devices = Devices(service, cluster, prepared.job.model)
        self._pace = Pace()
        self._generation: Generation | None = None
        self._progress: Progress | None = None
        self._ended: dict[int, RankPart] = {}
        self._lost: set[int] = set()
        self._pausing = False
        self._planned_with: dict[int, float] = {}
        self._deadline_s: float | None = None
        self._number = self._probed_at = 0
        self._done = Done()

    def run(self, plan: Plan) -> Done:
        """Do all steps that are left, the first of them under `plan`, and return what happened.

        Raises DeviceLostError if the devices that are left cannot go on, and a device's own error.
        """
        total = self._prepared.num_steps
        if len(self._history.records) >= total:
            return self._done
        self._devices.start()
        while not self._devices.all_ready:
            self._take_all(0.05)
        fits = plan.micro_batch_size == self._launcher.setting.batch_size and all(
            sum(share.queries for share in stage.shares) == self._launcher.setting.queries for stage in plan.stages
        )
        is_there = self._devices.ready >= {rank for stage in plan.stages for rank in stage.ranks}
        self._begin(plan if fits and is_there else None)
        while len(self._history.records) < total or self._generation is not None:
            self._take_all(0.02)
            self._inject()
            self._look_after()
            if self._generation is None and len(self._history.records) < total and not self._devices.awaited:
                self._begin()
        self._devices.stop()
        return self._done

    # News.

    def _take_all(self, timeout_s: float) -> None:
        for news in self._service.news(timeout_s):
            self._take(news)

    def _take(self, news: News) -> None:
        rank, kind, content = news
        if kind == "event":
            if isinstance(content, StepDone):
                self._history.add(content.record)
                self._observe(rank, content)
            elif isinstance(content, Ended):
                self._end(rank, content)
            elif isinstance(content, Ready):
                if self._devices.came(rank):
                    self._say(f"{self._name(rank)} has come back after {len(self._history.records)} steps")
            elif isinstance(content, Probed):
                self._pace.observe(rank, content.slowness, 1.0)
            elif isinstance(content, dict):
                self._show(rank, content)
        elif kind == "restarted":
            self._devices.restarted(rank, content)
        else:
            if kind == "ended" and content.error is not None:
                raise content.error
            self._lose(rank)

    def _show(self, rank: int, event: Mapping[str, Any]) -> None:
        """Pass a device's progress on."""
        generation = self._generation
        if generation is not None and rank in generation.members and self._progress is not None:
            self._progress(generation.members.index(rank), event)

    def _observe(self, rank: int, told: StepDone) -> None:
        """Compare a device's pace with its profile; what the generation's plan took it to be is in its prices."""
        generation = self._generation
        if generation is None or rank not in generation.members or not told.busy_s:
            return
        priced_s = generation.predictor.busy_s(self._launcher.shape(told.record.step), generation.members.index(rank))
        self._pace.observe(rank, told.busy_s, priced_s / self._planned_with.get(rank, 1.0))

    def _lose(self, rank: int) -> None:
        self._devices.lost(rank)
        if self._generation is None:
            if not self._devices.ready:
                raise self._nobody_left()
            return
        if rank in self._generation.members and rank not in self._ended:
            self._lost.add(rank)
            self._say(f"{self._name(rank)} is lost, in step {len(self._history.records) + 1}")
            self._devices.command(self._generation.members, Abort(self._generation.number))
            self._wait_for_others()
        self._close_generation()

    def _end(self, rank: int, ended: Ended) -> None:
        if self._generation is None or ended.generation != self._generation.number:
            return
        self._ended[rank] = ended.part
        for record in ended.part.records[-2:]:
            if record.step == len(self._history.records):
                self._history.add(record)
        if ended.part.end == "lost":
            self._wait_for_others()
        self._close_generation()

    # Generations.

    def _begin(self, plan: Plan | None = None) -> None:
        """Begin a generation of the devices that are ready; plan: of the whole cluster's ranks, None to make one."""
        ready = tuple(sorted(self._devices.ready))
        if not ready:
            raise self._nobody_left()
        if plan is None:
            self._adapt_setting()
        self._number += 1
        try:
            generation = self._launcher.generation(self._number, ready, self._pace.factors, plan)
        except PlanError as error:
            lost = ", ".join(self._name(rank) for rank in range(self._cluster.world_size) if rank not in ready)
            raise DeviceLostError(
                f"Step {len(self._history.records) + 1} was to be done without {lost}." if lost else "Another setting was to be taken.",
                f"{error.asked} {error.found}",
                "Bring the device back and run with --resume, or resume on other devices.",
            ) from error
        self._generation, self._ended, self._lost = generation, {}, set()
        self._pausing, self._deadline_s = False, None
        self._planned_with = dict(self._pace.factors)
        self._pace.accept({})
        members = generation.members
        self._progress = Progress(
            generation.plan, lambda event: self._notify(event._replace(rank=members[event.rank]) if event.rank >= 0 else event)
        )
        for step in range(len(self._history.records), self._prepared.num_steps):
            self._done.predicted_s[step] = generation.predictor.seconds(self._launcher.shape(step))
        for rank in members:
            self._devices.command((rank,), Train(generation.number, members, generation.job))

    def _close_generation(self) -> None:
        """Once every member that lives has told its end, decide how the run goes on."""
        generation = self._generation
        if generation is None or any(rank not in self._ended and rank not in self._lost for rank in generation.members):
            return
        self._done.parts.append((generation, dict(self._ended)))
        self._generation = None
        if len(self._history.records) >= self._prepared.num_steps:
            return
        if any(part.end == "lost" for part in self._ended.values()) or self._lost:
            self._make_lost_step(generation)

    def _make_lost_step(self, generation: Generation) -> None:
        """Make the step in which a device was lost from the losses that the others know, if that is wished and there are any."""
        step = len(self._history.records)
        known: dict[int, float] = {}
        for part in self._ended.values():
            if generation.job.first_step + len(part.records) == step:
                known |= part.losses
        whole = {part: loss for part, loss in known.items() if part ^ 1 in known}
        asked = generation.job.estimator.queries
        # Where the others have not all come to this step, more than the lost device's share would be missing.
        others = 1
        if len(generation.plan.stages) == 1:
            others = sum(share.queries for share in generation.plan.stages[0].shares if generation.members[share.rank] not in self._lost)
        if self._prepared.options.after_loss == "repeat" or len(whole) // 2 < max(1, others):
            self._say(f"Step {step + 1} is repeated")
            return
        self._history.add(record_of(generation.job, step, whole))
        self._say(f"Step {step + 1} is made from {len(whole) // 2} of {asked} queries")

    def _pause(self) -> None:
        if self._generation is not None and not self._pausing:
            self._pausing = True
            self._devices.command(self._generation.members, Pause(self._generation.number))

    def _adapt_setting(self) -> None:
        setting = self._launcher.fitted(tuple(sorted(self._devices.ready)), self._pace.factors)
        if setting != self._history.changes[-1].setting:
            self._history.change(setting)
            self._say(f"From step {len(self._history.records) + 1} on {words(setting)}")

    # What the coordinator does by itself.

    def _inject(self) -> None:
        while self._faults and self._faults[0].step <= len(self._history.records):
            fault = self._faults.pop(0)
            self._say(f"Fault: {fault.kind} {self._name(fault.rank)}" + (f", {fault.factor:g} times" if fault.kind == "slow" else ""))
            self._devices.inject(fault)
            if fault.kind == "back":
                self._pause()  # the others wait for it

    def _look_after(self) -> None:
        """Act on devices that have changed their pace, and end those that do not answer."""
        if self._deadline_s is not None and time.monotonic() > self._deadline_s and self._generation is not None:
            for rank in self._generation.members:
                if rank not in self._ended and rank not in self._lost:
                    self._service.kill(rank)
            self._deadline_s = None
        if self._prepared.options.adapt and self._generation is not None and not self._pausing:
            self._probe(self._generation)
            changed = self._pace.changed()
            if changed:
                self._pace.accept(changed)
                told = ", ".join(f"{self._name(rank)} {factor:.1f} times" for rank, factor in changed.items())
                self._say(f"Pace changed, over the profile's seconds: {told}")
                if self._launcher.differs(self._generation, tuple(sorted(self._devices.ready)), self._pace.factors):
                    self._pause()

    def _probe(self, generation: Generation) -> None:
        if len(self._history.records) >= self._probed_at + PROBE_EVERY:
            self._probed_at = len(self._history.records)
            idle = self._devices.ready - set(generation.members)
            self._devices.command([rank for rank in idle if self._pace.factors.get(rank, 1.0) > 1], Probe())

    def _wait_for_others(self) -> None:
        if self._deadline_s is None and self._generation is not None:
            self._deadline_s = time.monotonic() + self._generation.job.timeout_s

    def _say(self, text: str) -> None:
        self._done.notes.append(f"{text}.")
        self._notify(Event("note", message=text))

    def _name(self, rank: int) -> str:
        return self._cluster.devices[rank].name

    def _nobody_left(self) -> DeviceLostError:
        return DeviceLostError(
            f"Step {len(self._history.records) + 1} was to be done.", "No device is left.", "Run with --resume to go on from the log."
        )
