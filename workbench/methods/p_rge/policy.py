"""A run from its first step to its last: on devices managed by a coordinator, or as one job of all of them.

P-RGE's policy for the coordinator: the devices' queries, the log, and the handling of a step in which a device is lost.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import Recovery
from workbench.core.serial import from_json
from workbench.methods.base import REAL_TIMEOUT_S, SILENT_AFTER_STEPS, Engines, Notify
from workbench.methods.common.folder import STEPS, begin_folder, holds_run, weights_digest
from workbench.methods.common.records import Progress
from workbench.methods.p_rge.adaptive import Price, Setting, candidates, choose
from workbench.methods.p_rge.options import Precision
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.queries import plan_queries
from workbench.methods.p_rge.query_costs import whole
from workbench.methods.p_rge.rank_job import Change, PRGERankJob, RankPart, rank_job
from workbench.methods.p_rge.worker import Logged, load_model, record_of, run_rank
from workbench.methods.p_rge.zeroth_order import CausalModel, LogFile, StepLog, warn_of_rounding
from workbench.methods.training.policy import ToldPolicy, shares_of
from workbench.methods.training.timetable import Timetable
from workbench.runtime.commands import Generation, Parts, StepDone
from workbench.runtime.devices import Devices

TOLERATED = 1.5
"""With `adapt` alone: a step may take this multiple of its first duration before its setting is changed."""

ProfileOf = Callable[[Precision], Profile]
"""Every layer's cost on every device, with frozen weights of a precision."""


def fitted_setting(
    prepared: PreparedJob, cluster: Cluster, profile_of: ProfileOf, asked: Setting, *, step_s: float | None = None
) -> Setting:
    """Return the requested setting, or the most preferred one that fits in the devices' memory and in the time limit of a step.

    step_s: that limit, if the job has none.  Raises PlanError if none fits.
    """
    options = prepared.options
    if not options.adapts:
        return asked

    def price(setting: Setting) -> Price:
        profile, size = profile_of(setting.precision), prepared.size(setting)
        try:
            return Price(plan_queries(profile, cluster, size).total_s)
        except PlanError:
            alone = zip(whole(profile, cluster, size), cluster.devices, strict=True)
            missing = min(costs.need_bytes(1) - device.memory_bytes for costs, device in alone)
            return Price(math.inf, max(0, missing))

    return choose(candidates(asked, precisions=options.allowed), price, step_s=step_s if options.step_s is None else options.step_s)


LOG = "log.jsonl"


class History:
    """The finished steps, in memory and on disk.

    resumed: number of steps done by an earlier program call.  damage: why the log had not more of them; '' if nothing was damaged.
    """

    def __init__(self, folder: Path, prepared: PreparedJob, model: CausalModel, *, resume: bool) -> None:
        """Begin a run in a folder, or reopen exactly the same run.

        The steps after a damaged line of the log are done again.  Raises CacheError for another run's folder, ConfigError for foreign
        files and for another run's log.
        """
        text = msgspec.json.encode(prepared.identity() | {"weights": weights_digest(model.backbone)})
        identity, digest = msgspec.json.decode(text), hashlib.sha256(text).hexdigest()
        self.found = resume and holds_run(folder, digest, prepared.job)
        if not self.found:
            begin_folder(folder, digest, prepared.job)
        self.path = folder / STEPS / LOG
        self._file = LogFile(self.path, identity, mends=True)
        self.records: list[StepLog] = list(self._file.steps[: prepared.num_steps])
        self.resumed = len(self.records)
        self.damage = ""
        if self._file.damage:
            self.damage = f"'{LOG}': {self._file.damage}; the steps from {self.resumed + 1} on are done again."
        changes = [from_json(remark, Change, source=f"'{self.path}'") for remark in self._file.remarks]
        self.changes = [Change(0, 0, prepared.setting), *(change for change in changes if change.step <= self.resumed)]

    def add(self, record: StepLog) -> None:
        """Record a step unless it is known, because every device reports it.  It is on the disk on return."""
        assert record.step <= len(self.records), f"step {record.step} was told before step {len(self.records)}"
        if record.step == len(self.records):
            self.records.append(record)
            self._file.append(record)

    def changed(self, setting: Setting) -> Change:
        """Return the change from which a setting would apply, if the next steps had it; the last change if it already applies."""
        step, last = len(self.records), self.changes[-1]
        return last if setting == last.setting else Change(step, last.samples_before(step), setting)

    def change(self, change: Change) -> None:
        """Record that the next steps have another setting."""
        self.changes.append(change)
        self._file.remark(change)


def notes_of(history: History, prepared: PreparedJob, *, resume: bool) -> tuple[str, ...]:
    """Return notes for the report: where the run began and how its settings changed."""
    notes = []
    if resume and not history.found:
        notes.append("Nothing to resume: the run starts over.")
    elif resume:
        notes.append(f"Resumed after {history.resumed} of {prepared.num_steps} steps, from their seeds and scalars.")
    notes += [history.damage] * bool(history.damage)
    first = [change for change in history.changes if change.step == 0][-1]  # told with the plan
    return (*notes, *changed_notes(prepared, [first, *(change for change in history.changes if change.step)]))


def changed_notes(prepared: PreparedJob, changes: Sequence[Change]) -> tuple[str, ...]:
    """Return the notes of changes of the first setting, and of samples that smaller batches leave out."""
    former, *later = changes
    notes = [f"From step {change.step + 1} on {words(change.setting)}." for change in later if change.setting != former.setting]
    used, asked = changes[-1].samples_before(prepared.num_steps), prepared.num_steps * former.setting.batch_size
    if notes and used < asked:
        notes.append(f"The {prepared.num_steps} steps then train on {used} samples, where {asked} were asked for: smaller batches fit.")
    return tuple(notes)


def words(setting: Setting) -> str:
    """Describe a setting in words."""
    return f"{setting.queries} queries of {setting.batch_size} samples, weights in {setting.precision}"


@dataclass(kw_only=True)
class Done:
    """The results of a run.  parts: of every generation, the members with their results."""

    parts: list[tuple[Generation, dict[int, RankPart]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recoveries: tuple[Recovery, ...] = ()

    def expected_s(self, step: int) -> float | None:
        """Return the seconds of a step under the plan by which it was done; None if it was not done in this run."""
        done = (generation for generation, _ in reversed(self.parts) if generation.job.first_step <= step)
        return next((generation.predictor.seconds(step) for generation in done), None)


class QueryPolicy(ToldPolicy):
    """A ToldPolicy.  A generation starts from the log of seeds and scalars, which every device replays.

    plan: of the first generation, if its devices are present.
    """

    def __init__(self, run: Run, plan: Plan) -> None:
        super().__init__(run.notify)
        self._run, self._prepared, self._cluster, self._history, self._plan = run, run.prepared, run.cluster, run.history, plan
        self.done = Done(notes=self.notes)

    @property
    def step(self) -> int:
        """Return the number of steps in the log."""
        return len(self._history.records)

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self._prepared.num_steps

    @property
    def setting(self) -> Setting:
        """Return the current setting."""
        return self._history.changes[-1].setting

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> Generation:
        """Return the remaining steps; with another setting, if the job allows it and the devices require it (see Policy)."""
        stages, setting = self._plan.stages, self.setting
        queries = {sum(share.queries for share in stage.shares) for stage in stages}
        fits = self._plan.micro_batch_size == setting.batch_size and queries == {setting.queries}
        if number == 1 and fits and {rank for stage in stages for rank in stage.ranks} <= set(ready):
            members, plan = renumbered(self._plan)
        else:
            setting = self._fitted(ready, factors)
            members, plan = self._planned(ready, factors, setting)
        return self.planned(number, members, factors, plan, self._history.changed(setting))

    def planned(self, number: int, members: tuple[int, ...], factors: Mapping[int, float], plan: Plan, change: Change) -> Generation:
        """Return the remaining steps as a job of some devices.  Raises PlanError if one has too little memory for its share."""
        history, precision = self._history, change.setting.precision
        changes = history.changes if change == history.changes[-1] else [*history.changes, change]
        slowed, cluster = self._profile(precision, members, factors), self._cluster.part(members, factors)
        settings: dict[str, Any] = {"records": tuple(history.records), "folder": self._run.folder}
        job = rank_job(self._prepared, self._profile(precision, members, {}), cluster, plan, changes, slowed=slowed, **settings)
        timetable = Timetable(job, slowed)
        timeout_s = REAL_TIMEOUT_S if self._run.is_real else max(job.timeout_s, SILENT_AFTER_STEPS * timetable.longest_s())
        return Generation(number, members, plan, replace(job, timeout_s=timeout_s), timetable, timeout_s)

    def begun(self, generation: Generation) -> Generation:
        """Record a change of the setting."""
        if generation.job.change != self._history.changes[-1]:
            self._history.change(generation.job.change)
            self.say(f"From step {self.step + 1} on {words(generation.job.change.setting)}")
        self.watch(generation)
        return generation

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Add a step to the log."""
        self._history.add(done.content)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Add the known steps to the log; repeat the step of a loss, or complete it from the known queries."""
        found = {rank: ended.part for rank, ended in parts.items() if ended.part is not None}
        self.done.parts.append((generation, found))
        for part in found.values():
            for record in part.records[-2:]:
                if record.step == self.step:
                    self._history.add(record)
        if self.step < self.num_steps and (lost or any(ended.end == "lost" for ended in parts.values())):
            self._make_lost_step(generation, found, lost)

    def _make_lost_step(self, generation: Generation, parts: Mapping[int, RankPart], lost: frozenset[int]) -> None:
        """Complete the step in which a device was lost from the losses that the others know, if that is requested and there are any."""
        step, job = self.step, generation.job
        known: dict[int, float] = {}
        for part in parts.values():
            if job.first_step + len(part.records) == step:
                known |= part.losses
        complete = {part: loss for part, loss in known.items() if part ^ 1 in known}
        # If some of the others have not reached this step, more than the lost device's share would be missing.
        others = 1
        if len(generation.plan.stages) == 1:
            shares = generation.plan.stages[0].shares
            others = sum(share.queries for share in shares if generation.members[share.rank] not in lost)
        if self._prepared.options.after_loss == "repeat" or len(complete) // 2 < max(1, others):
            self.say(f"Step {step + 1} is repeated")
            return
        self._history.add(record_of(job, step, complete))
        self.say(f"Step {step + 1} is made from {len(complete) // 2} of {job.estimator.queries} queries")

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        """Return whether the devices' speeds call for another setting or plan than a generation's."""
        setting = self._fitted(ready, factors)
        if setting != self.setting:
            return True
        members, plan = self._planned(ready, factors, setting)
        return members != generation.members or shares_of(plan) != shares_of(generation.plan)

    def _fitted(self, ready: tuple[int, ...], factors: Mapping[int, float]) -> Setting:
        """Return the setting for the ready devices at their speed; it is raised again, up to the requested one, when that is possible."""
        asked = self._prepared.setting._replace(precision=self.setting.precision)
        profile_of = partial(self._profile, ranks=ready, factors=factors)
        try:
            return fitted_setting(self._prepared, self._cluster.part(ready, factors), profile_of, asked, step_s=self._tolerated_s)
        except PlanError:
            return self.setting  # the plan's own error is more specific

    @cached_property
    def _tolerated_s(self) -> float | None:
        """Return the time limit of a step in an adapting run, from the time that all devices together need at the profiled speed."""
        if not self._prepared.options.adapt:
            return None
        first = self._history.changes[0].setting
        return TOLERATED * plan_queries(self._run.profile_of(first.precision), self._cluster, self._prepared.size(first)).total_s

    def _planned(self, ready: tuple[int, ...], factors: Mapping[int, float], setting: Setting) -> tuple[tuple[int, ...], Plan]:
        """Return the members of a plan for the ready devices, and the plan, which numbers the members."""
        profile = self._profile(setting.precision, ready, factors)
        places, plan = renumbered(plan_queries(profile, self._cluster.part(ready, factors), self._prepared.size(setting)))
        return tuple(ready[place] for place in places), plan

    def _profile(self, precision: Precision, ranks: tuple[int, ...], factors: Mapping[int, float]) -> Profile:
        """Return the profile of some devices with their measured slowdown."""
        return self._run.profile_of(precision).part(ranks, factors)


def renumbered(plan: Plan) -> tuple[tuple[int, ...], Plan]:
    """Return the devices of a plan in its order, and the plan with the devices numbered in this order."""
    ranks = tuple(rank for stage in plan.stages for rank in stage.ranks)
    return ranks, plan.renumbered({rank: place for place, rank in enumerate(ranks)})


class Run:
    """One run in its folder.  model: the whole model before the first step.

    profile_of: every layer's cost on every device of the cluster, with weights of a precision.  is_real: devices that are not
    emulated are not slowed down, and get REAL_TIMEOUT_S.  notes: on the settings, for the user.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        cluster: Cluster,
        *,
        folder: Path,
        setting: Setting,
        profile_of: ProfileOf,
        is_real: bool,
        resume: bool,
        notify: Notify,
    ) -> None:
        """Open the folder.  setting: of a new run.  Raises CacheError if it belongs to another run, ConfigError for files of no run."""
        self.prepared, self.cluster, self.folder, self.notify = prepared, cluster, folder, notify
        self.profile_of, self.is_real = profile_of, is_real
        self.model = load_model(prepared)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_rounding(self.model, prepared.options.epsilon)
        self.notes = tuple(str(one.message) for one in told)
        self.history = History(folder, prepared, self.model, resume=resume)
        if not self.history.records and setting != self.history.changes[-1].setting:
            self.history.change(self.history.changed(setting))

    def on_devices(self, plan: Plan, devices: Devices) -> Done:
        """Do the remaining steps on devices that take commands, and may be lost, leave, come back or change speed."""
        policy = QueryPolicy(self, plan)
        policy.done.recoveries = policy.run(devices, self.cluster, self.prepared.job, adapts=self.prepared.options.adapt)
        return policy.done

    def together(self, plan: Plan, engines: Engines) -> Done:
        """Do the remaining steps as one job of all devices, which ends if one is lost; the log allows a later run to continue."""
        policy, history, total = QueryPolicy(self, plan), self.history, self.prepared.num_steps
        done = policy.done
        if len(history.records) >= total:
            return done
        everyone = tuple(range(self.cluster.world_size))
        generation = policy.planned(0, everyone, {}, plan, history.changes[-1])
        job: PRGERankJob = generation.job
        progress = Progress(plan, self.notify)

        def take(rank: int, event: Any) -> None:
            if isinstance(event, Logged):
                history.add(event.record)
            else:
                progress(rank, event)

        parts: list[RankPart] = engines.run(run_rank, [job] * self.cluster.world_size, on_event=take)
        for record in max(parts, key=lambda part: len(part.records)).records:  # the last one may still be in progress
            history.add(record)
        done.parts.append((generation, dict(enumerate(parts))))
        return done
