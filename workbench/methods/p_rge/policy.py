"""P-RGE's policy for the coordinator: the devices' queries, the log, and the handling of a step in which a device is
lost.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import msgspec

from workbench.core.cluster import Cluster, Factors
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import StepRecord
from workbench.core.schedule import Ranks
from workbench.core.serial import from_json
from workbench.methods.base import Notify, Planned, Prediction
from workbench.methods.common.folder import begin_folder, holds_run
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.records import measured_steps
from workbench.methods.p_rge.adaptive import Setting, candidates, choose
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.methods.p_rge.queries import plan_queries
from workbench.methods.p_rge.rank_job import LOG, Change, PRGERankJob, QueryResult, change_at, rank_job
from workbench.methods.p_rge.worker import record_of, usable_of
from workbench.methods.p_rge.zeroth_order import LogFile, StepLog
from workbench.methods.training.phases import Plans
from workbench.methods.training.step_policy import StepPolicy, is_same_work
from workbench.runtime.commands import Generation, Parts, StepDone, is_broken

TOLERATED = 1.5
"""A step may take this multiple of its first duration before its setting is changed."""


def fitted_setting(
    prepared: PreparedJob, cluster: Cluster, profile: Profile, *, step_s: float | None = None
) -> Setting:
    """Return the requested setting, or if the job adapts the most preferred one that fits in the devices' memory and in
    the time limit of a step.

    step_s: the time limit.
    """
    if not prepared.options.adapt:
        return prepared.setting

    def seconds(setting: Setting) -> float:
        try:
            return plan_queries(prepared.problem(profile, cluster, setting)).total_s
        except PlanError:
            return math.inf

    able = [each for each in candidates(prepared.setting) if each.queries >= prepared.rule.min_directions]
    return choose(able, seconds, step_s=step_s)


class Changes:
    """The settings of a run: each applies from some step on.

    folder: the run's folder; None for a simulated run.  records: the log's steps; a simulated run has none.
    """

    def __init__(self, first: Change) -> None:
        self.folder: Path | None = None
        self.records: list[StepLog] = []
        self.changes = [first]

    def changes_with(self, setting: Setting, step: int) -> list[Change]:
        """Return the changes so far, and one to a setting from a step on if it is not the current one."""
        last = self.changes[-1]
        new = [] if setting == last.setting else [Change(step, last.samples_before(step), setting)]
        return [*self.changes, *new]

    def change(self, change: Change) -> None:
        """Record that the next steps have another setting."""
        self.changes.append(change)


class History(Changes):
    """The finished steps, in memory and on disk.

    resumed: number of steps done by an earlier program call.  damage: the damage that made the log end early, or ''.
    """

    def __init__(self, folder: Path, prepared: PreparedJob, weights: str, *, resume: bool) -> None:
        """Begin a run in a folder, or reopen exactly the same run.  weights: the digest of the model's (see
        model_digest).

        The steps after a damaged line of the log are repeated.  Raises CacheError for another run's folder, ConfigError
        for foreign files and for another run's log.
        """
        super().__init__(Change(0, 0, prepared.setting))
        text = msgspec.json.encode(prepared.identity() | {"weights": weights})
        identity, digest = msgspec.json.decode(text), hashlib.sha256(text).hexdigest()
        self.continues = resume and holds_run(folder, digest, prepared.job)
        if not self.continues:
            begin_folder(folder, digest, prepared.job)
        self.folder: Path = folder
        self.path = folder / LOG
        self._file = LogFile(self.path, identity, mends=True)
        self.records += self._file.steps[: prepared.num_steps]
        self.resumed = len(self.records)
        self.damage = ""
        if self._file.damage:
            self.damage = f"'{LOG.name}': {self._file.damage}; the steps from {self.resumed + 1} on are done again."
        changes = [from_json(remark, Change, source=f"'{self.path}'") for remark in self._file.remarks]
        self.changes += [change for change in changes if change.step <= self.resumed]

    @property
    def changes_in_run(self) -> list[Change]:
        """Return the setting of the first step, which is reported with the plan, and the changes after it."""
        first = [change for change in self.changes if change.step == 0][-1]
        return [first, *(change for change in self.changes if change.step)]

    def add(self, record: StepLog) -> None:
        """Record a step unless it is known, because every device reports it.  It is on the disk on return."""
        num_steps = len(self.records)
        assert record.step <= num_steps, f"step {record.step} was sent before step {num_steps}"
        if record.step == num_steps:
            self.records.append(record)
            self._file.append(record)

    def change(self, change: Change) -> None:
        """Record that the next steps have another setting."""
        super().change(change)
        self._file.remark(change)


def notes_of(history: History, prepared: PreparedJob, *, resume: bool) -> list[str]:
    """Return notes for the report: where the run begins, and how its settings have changed."""
    notes = []
    if resume and not history.continues:
        notes.append("Nothing to resume: the run starts over.")
    elif resume:
        notes.append(f"Resumed after {history.resumed} of {prepared.num_steps} steps, from their seeds and scalars.")
    notes += [history.damage] * bool(history.damage)
    return notes + changed_notes(history.changes_in_run)


def changed_notes(changes: Sequence[Change]) -> list[str]:
    """Return the notes of the changes after the first setting."""
    return [
        f"From step {change.step + 1} on {words(change.setting)}."
        for former, change in pairwise(changes)
        if change.setting != former.setting
    ]


def fewer_samples(prepared: PreparedJob, changes: Sequence[Change]) -> list[str]:
    """Return the note of the samples that smaller batches than the first setting's leave out, if they do."""
    num_samples = changes[-1].samples_before(prepared.num_steps)
    requested = prepared.num_steps * changes[0].setting.batch_size
    if num_samples >= requested:
        return []
    return [
        f"The {prepared.num_steps} steps then train on {num_samples} samples, where {requested} were asked for: "
        "smaller batches fit."
    ]


def words(setting: Setting) -> str:
    """Describe a setting in words."""
    return f"{setting.queries} queries of {setting.batch_size} samples"


class SettingPolicy(StepPolicy):
    """A StepPolicy of queries: the devices' queries, and the setting of the next steps.

    history: the settings so far, and the finished steps.
    """

    def __init__(self, method: Plans, planned: Planned[PreparedJob], history: Changes, notify: Notify) -> None:
        first = replace(method.rank_job(*planned), folder=history.folder)
        super().__init__(method, planned, first, notify)
        self.history, self._step = history, len(history.records)
        self.adapts = planned.prepared.options.adapt

    @property
    def setting(self) -> Setting:
        """Return the current setting."""
        return self.history.changes[-1].setting

    def _next_job(self, ready: Ranks, factors: Factors) -> tuple[tuple[int, ...], PRGERankJob]:
        """Return the ready devices that get work, and their job, which continues from the log (see StepPolicy)."""
        members, job = super()._next_job(ready, factors)
        assert isinstance(job, PRGERankJob)
        changes = self.history.changes_with(job.change.setting, self.step)
        return members, replace(job, records=tuple(self.history.records), changes=tuple(changes))

    def _job(self, ranks: Sequence[int], factors: Factors, plan: Plan | None = None) -> PRGERankJob:
        """Return the job of some devices (see StepPolicy); with another setting, if the job allows it and the devices
        require it.
        """
        setting, part = self._fitted(ranks, factors), self.cluster.part(ranks, factors)
        profile, slowed = self.profile.part(ranks), self.profile.part(ranks, factors)
        plan = plan or plan_queries(self.prepared.problem(slowed, part, setting))
        changes, folder = self.history.changes_with(setting, self.step), self.history.folder
        return rank_job(self.prepared, profile, part, plan, changes, slowed=slowed, folder=folder)

    def _record(self, job: PRGERankJob) -> None:
        """Record the setting of a job that begins."""
        if job.change != self.history.changes[-1]:
            self.history.change(job.change)
            if job.change.step:  # the first setting is reported with the plan
                self.say(f"From step {self.step + 1} on {words(job.change.setting)}")

    def differs(self, generation: Generation, ready: Ranks, factors: Factors) -> bool:
        """Return whether the devices' speeds call for another setting or plan than a generation's; no state has to be
        moved for it.
        """
        members, job = self._next_job(ready, factors)
        return job.change.setting != self.setting or not is_same_work(generation, members, job.plan)

    def _fitted(self, ranks: Sequence[int], factors: Factors) -> Setting:
        """Return the setting for some devices at their speed; it is raised again, up to the requested one, when that is
        possible.
        """
        cluster, profile = self.cluster.part(ranks, factors), self.profile.part(ranks, factors)
        return fitted_setting(self.prepared, cluster, profile, step_s=self._tolerated_s)

    @cached_property
    def _tolerated_s(self) -> float | None:
        """Return the time limit of a step in an adapting run, from the time that all devices together need at the
        profiled speed.
        """
        if not self.prepared.options.adapt:
            return None
        first = self.history.changes[0].setting
        return TOLERATED * plan_queries(self.prepared.problem(self.profile, self.cluster, first)).total_s


class QueryPolicy(SettingPolicy):
    """A SettingPolicy whose generations start from the log of seeds and scalars, which every device replays.

    results: those of every generation's devices, by their ranks in the cluster.
    """

    history: History
    _last_parts: Mapping[int, QueryResult] = MappingProxyType({})

    def measured_steps(self, prediction: Prediction) -> tuple[StepRecord, ...]:
        """Return the steps that are done, with their losses (see StepPolicy).

        The log has every step, also those of an earlier call, and the one in which a device was lost; their seconds are
        the log's.  A step of an earlier call is predicted for the devices with which this call began, and not at all if
        it had another setting than theirs.
        """
        history, predicted = self.history, []
        first = self.generations[0] if self.generations else self.last
        for number, record in enumerate(prediction.steps):
            setting = change_at(history.changes, number).setting
            step = self.expected(replace(record, samples=setting.batch_size, predicted_s=None))
            if number < history.resumed and setting == first.job.change.setting:
                step = replace(step, predicted_s=first.timetable.seconds(number))
            predicted.append(step)
        measured = {(step.epoch, step.step): step for step in measured_steps(self.results, predicted)}
        return tuple(
            replace(measured.get((step.epoch, step.step), replace(step, measured_s=record.seconds)), loss=record.loss)
            for step, record in zip(predicted, history.records, strict=False)
        )

    def last_results(self) -> list[RankResult]:
        """Return the last devices' results (see StepPolicy)."""
        return [self._last_parts.get(rank, RankResult(rank=place)) for place, rank in enumerate(self.last.members)]

    def begun(self, generation: Generation) -> Generation:
        """Record a change of the setting (see Policy)."""
        self._record(generation.job)
        self._begin(generation)
        self.watch(generation)
        return generation

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Add a step to the log."""
        self._add(done.content)

    def _add(self, record: StepLog) -> None:
        self.history.add(record)
        self._step = len(self.history.records)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Add the known steps to the log; repeat the step of a loss, or complete it from the known queries."""
        results: dict[int, QueryResult] = {rank: ended.part for rank, ended in parts.items() if ended.part is not None}
        self._last_parts = results
        for rank, part in sorted(results.items()):
            resumed_at = (part.steps[0].epoch, part.steps[0].step) if part.steps else None
            self.results.append(replace(part, rank=rank, resumed_at=resumed_at))
            for record in part.records[-2:]:
                if record.step == self.step:
                    self._add(record)
        super().ended(generation, parts, lost)
        if self.step < self.num_steps and is_broken(parts, lost):
            self._make_lost_step(generation, results, lost)

    def _make_lost_step(self, generation: Generation, parts: Mapping[int, QueryResult], lost: frozenset[int]) -> None:
        """Complete the step in which a device was lost from the losses that the others know, if that is requested and
        there are any.
        """
        step, job = self.step, generation.job
        losses: dict[int, float] = {}
        for part in parts.values():
            if job.first_step + len(part.records) == step:
                losses |= part.losses
        complete, each = usable_of(job, losses), job.estimator.rule.query_parts
        # If some of the others have not reached this step, more than the lost device's share would be missing.
        others = 1
        if len(generation.plan.stages) == 1:
            shares = generation.plan.stages[0].shares
            others = sum(share.queries for share in shares if generation.members[share.rank] not in lost)
        if self.prepared.options.after_loss == "repeat" or len(complete) // each < max(1, others):
            self.say(f"Step {step + 1} is repeated")
            return
        self._add(record_of(job, step, complete))
        self.say(f"Step {step + 1} is made from {len(complete) // each} of {job.estimator.num_queries} queries")
