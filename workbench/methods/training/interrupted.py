"""Find the state that an interrupted run left in its folder, so that the same or other devices can resume at the next step.

All trainable tensors are saved by name: a checkpoint or journal covers some layers, and together they cover the model.

Every step of an epoch leaves a record: ranks, times, and the optimizer's last two states (see runtime.step_journal), from which a run can
resume.  All files are sealed.  A damaged one is removed and reported, and what it held is done again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, DamagedError
from workbench.core.plan import Homes, Plan
from workbench.core.report import StepRecord
from workbench.core.sealed import SealedLog, damaged, owner_of, read_lines, read_sealed, require_owner, write_sealed
from workbench.core.serial import from_builtins, from_json
from workbench.methods.common.folder import (
    CHECKPOINTS,
    JOURNALS,
    PLAN,
    STEPS,
    cover,
    covering,
    journal_path,
    middle_path,
    steps_log_path,
)
from workbench.methods.common.session import RankResult, StepTrace, on_clock
from workbench.methods.training.phases import RankJob, RankPhase
from workbench.models.sealed_tensors import damage_of
from workbench.runtime.state import State
from workbench.runtime.step_journal import Journal, StepJournal, read_journal, write_once

AGAIN = "The steps of its unfinished epoch are done again: the devices' shares of the samples are others now."

_LOG = re.compile(r"^epoch-(\d+)-from-(\d+)-rank-(\d+)\.jsonl$")
_CHECKPOINT = re.compile(r"^(?:epoch|moments)-(\d+)-(?:layers-\d+-\d+|step-(\d+))\.safetensors$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOwner:
    """The first line of a log of steps.

    owner: see owner_of.  ranks: all ranks that write such a log.  steps: of the whole epoch.
    """

    owner: str
    ranks: tuple[int, ...]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The intact steps of a rank's log, and what its first line says."""

    about: LogOwner
    steps: tuple[StepTrace, ...]


_Logs = Mapping[int, Mapping[int, RankLog]]
"""An epoch's logs, by the first step of each attempt and by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The devices that use a folder.  devices: names by rank.

    since: the epoch and step from which on they use it; the ranks of earlier logs are others'.
    """

    devices: tuple[str, ...]
    plan: Plan
    since: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """epochs: finished epochs.  step: completed steps of the next epoch.  state: files with the state so far; none before step 1.
    held: the ranks that keep the state in memory instead.

    results: of every rank, with one entry for each resumption.  is_same: whether the same devices continue under the same plan.
    notes: why completed steps are repeated.  damage: which files of the run could not be used.
    """

    epochs: int = 0
    step: int = 0
    state: tuple[Path, ...] = ()
    held: Homes = field(default_factory=dict)
    results: tuple[RankResult, ...] = field(default=(), repr=False)
    is_same: bool = True
    notes: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def begins(self) -> dict[str, Any]:
        """Return the fields of a RankJob that resumes here."""
        return {"start_epoch": self.epochs, "start_step": self.step, "state": self.state, "held": self.held, "is_same": self.is_same}

    def steps(self, predicted: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
        """Return all steps of the run: measured ones where other devices did them, predicted ones otherwise."""
        done = {} if self.is_same else {(one.epoch, one.step): one.samples for result in self.results for one in result.steps}
        cached = {step.epoch: step.cached for step in predicted}
        known = [StepRecord(epoch=at[0], step=at[1], samples=samples, cached=cached[at[0]]) for at, samples in sorted(done.items())]
        left = predicted if self.is_same else [step for step in predicted if (step.epoch, step.step) >= (self.epochs, self.step)]
        return (*known, *left)

    def joined(self, results: Sequence[RankResult]) -> list[RankResult]:
        """Return each rank's results, before and after the resumption."""
        former: dict[int, list[StepTrace]] = {result.rank: [] for result in results}
        for result in self.results if self.is_same else ():
            if result.rank in former:
                former[result.rank] += result.steps
        return [replace(result, steps=former[result.rank] + result.steps) for result in results]


def take_up(rank_job: RankJob, held: Mapping[int, Homes] | None = None) -> Interrupted:
    """Return the progress of an interrupted run, and remove damaged and later files from its folder; job and data are the same.

    held: by optimizer step, the ranks that keep each tensor in memory, if devices back each other up; used if it is later.
    The steps of an unfinished epoch count if its mini-batches are the same under the new plan.
    """
    folder, plan, run = rank_job.folder, rank_job.plan, rank_job.fingerprint
    mine = Ran(devices=tuple(device.name for device in rank_job.cluster.devices), plan=plan)
    damage: list[str] = []
    former = _former(folder, run, damage)
    logs = _read_logs(folder, run, damage)
    _remove_damaged_checkpoints(folder, run, damage)
    epochs = _finished(folder, rank_job.job.epochs, plan.num_layers, logs)
    step, notes = 0, []
    homes: Homes = {}
    if epochs < rank_job.job.epochs:
        phase = next(phase for phase in rank_job.phases() if epochs in phase.epochs)
        steps_per_epoch = len(phase.steps(epochs))
        same = former is not None and same_batches(former.plan, plan, cached=phase.cached)
        # If an epoch's checkpoint is incomplete, its last step is repeated: it writes the checkpoint.
        before, count = epochs * steps_per_epoch, min(_count(logs.get(epochs, {})), steps_per_epoch - 1)
        journals = _read_journals(folder, run, epochs, damage)
        found = _middle_of(folder, run, epochs, journals, plan.num_layers, before, count) if held is None else None
        kept = max((at for at in held or () if before < at <= before + count), default=before)
        if kept > before and same:
            step, homes = kept - before, (held or {})[kept]
        elif kept > before:
            notes.append(AGAIN)
        elif found is not None and same:
            step = found.step - epochs * steps_per_epoch
            found.save(middle_path(folder, epochs, step), run)
        elif found is not None:
            notes.append(AGAIN)
        newest = max((state.step for _, journal in journals for state in journal.states), default=before)
        if newest > before + count + 1:  # a crash leaves the log of a device at most one step behind
            damage.append(f"Steps {count + 1} to {newest - before} of epoch {epochs + 1} are done again: a log lacks them.")
    known = 0
    while _is_whole(logs.get(known, {})):
        known += 1
    if epochs < rank_job.job.epochs and known > epochs + 1:
        damage.append(f"Epochs {epochs + 1} to {known} are done again: a checkpoint is missing or was damaged.")
    _clear(folder, epochs, step)
    is_same = former is not None and replace(former, since=mine.since) == mine
    mine = former if former is not None and is_same else replace(mine, since=(epochs, step))
    write_sealed(folder / PLAN, owner_of(run, folder / PLAN), mine)
    state: tuple[Path, ...] = (middle_path(folder, epochs, step),) if step and not homes else ()
    if epochs and not state:
        state = tuple(path for kind in ("epoch", "moments") for path in covering(folder, kind, epochs - 1, plan.num_layers))
    results = _results(logs, epochs, step, since=mine.since)
    return Interrupted(
        epochs=epochs,
        step=step,
        state=state,
        held=homes,
        results=results,
        is_same=is_same,
        notes=tuple(notes),
        damage=tuple(damage),
    )


def same_batches(former: Plan, plan: Plan, *, cached: bool) -> bool:
    """Return whether an epoch's mini-batches are the same under two plans.  cached: it runs from the activation cache."""
    return former.cached == plan.cached if cached else former.mini_batch_size == plan.mini_batch_size


def begin(rank_job: RankJob) -> Interrupted:
    """Record the devices that use a folder from the start."""
    devices = tuple(device.name for device in rank_job.cluster.devices)
    path = rank_job.folder / PLAN
    write_sealed(path, owner_of(rank_job.fingerprint, path), Ran(devices=devices, plan=rank_job.plan))
    return Interrupted()


def _read_logs(folder: Path, run: str, damage: list[str]) -> dict[int, dict[int, dict[int, RankLog]]]:
    """Return the intact steps of all logs, and remove the rest; the last line may have been cut off by a crash."""
    found: dict[int, dict[int, dict[int, RankLog]]] = {}
    for path in sorted((folder / STEPS).glob("epoch-*.jsonl")):
        match = _LOG.match(path.name)
        if match is None:
            continue
        epoch, begin, rank = map(int, match.groups())
        lines = read_lines(path)
        try:
            about = from_builtins(lines.owner, LogOwner, source=path.name)
            steps = tuple(from_json(line, StepTrace, source=path.name) for line in lines.contents)
            require_owner(path, about.owner, owner_of(run, path))
        except (ConfigError, DamagedError) as error:  # of another version, damaged from its first line on, or another's
            if lines.nbytes or lines.damage:
                damage.append(str(error if isinstance(error, DamagedError) else damaged(path, lines.damage or "it does not read")))
            path.unlink()
            continue
        if lines.damage:
            damage.append(f"'{path.name}': {lines.damage}; the steps from there on are done again.")
            os.truncate(path, lines.nbytes)
        found.setdefault(epoch, {}).setdefault(begin, {})[rank] = RankLog(about=about, steps=steps)
    return found


def _read_journals(folder: Path, run: str, epoch: int, damage: list[str]) -> list[tuple[Path, Journal]]:
    journals = [(path, read_journal(path, run)) for path in sorted((folder / JOURNALS).glob(f"epoch-{epoch}-layers-*.bin"))]
    damage += [str(damaged(path, journal.damage)) for path, journal in journals if journal.damage]
    return journals


def _remove_damaged_checkpoints(folder: Path, run: str, damage: list[str]) -> None:
    for path in sorted((folder / CHECKPOINTS).glob("*.safetensors")):
        about = path.stat()
        if _CHECKPOINT.match(path.name) and (why := _damage_of(path, run, about.st_ino, about.st_mtime_ns, about.st_size)):
            damage.append(why)
            path.unlink()


@lru_cache(maxsize=4096)
def _damage_of(path: Path, run: str, *version: int) -> str:
    """Return what is wrong with a checkpoint.  version: of the file: one that has been read is not read again after each lost device."""
    return damage_of(path, owner_of(run, path))


def _finished(folder: Path, epochs: int, num_layers: int, logs: Mapping[int, _Logs]) -> int:
    """Return the number of finished epochs after which a run can resume: only the last ones have moments."""
    count = 0
    while count < epochs and covering(folder, "epoch", count, num_layers) and _is_whole(logs.get(count, {})):
        count += 1
    while 0 < count < epochs and not covering(folder, "moments", count - 1, num_layers):
        count -= 1
    return count


def _count(logs: _Logs) -> int:
    """Return how many steps of an epoch, from its first on, all ranks have completed."""
    count = 0
    for begin, by_rank in sorted(logs.items()):
        about = next(iter(by_rank.values())).about
        if begin > count or set(by_rank) != set(about.ranks):
            break
        count = begin + min(len(log.steps) for log in by_rank.values())
    return count


def _is_whole(logs: _Logs) -> bool:
    return bool(logs) and _count(logs) == next(iter(logs[max(logs)].values())).about.steps


def _middle_of(
    folder: Path, run: str, epoch: int, journals: Sequence[tuple[Path, Journal]], num_layers: int, before: int, count: int
) -> State | None:
    """Return the state after the last of `count` completed steps of an unfinished epoch; None if no step's state was saved.

    before: the optimizer's steps before the epoch.
    """
    states: dict[int, list[tuple[Path, State]]] = {}
    for path, journal in journals:
        for state in journal.states:
            states.setdefault(state.step, []).append((path, state))
    for step in range(count, 0, -1):
        parts = dict(states.get(before + step, ()))
        chosen = cover(list(parts), num_layers)
        if chosen:
            return State(step=before + step, tensors={name: one for path in chosen for name, one in parts[path].tensors.items()})
        if (path := middle_path(folder, epoch, step)).exists():
            return State.load([path], run)
    return None


def _former(folder: Path, run: str, damage: list[str]) -> Ran | None:
    try:
        return read_sealed(folder / PLAN, owner_of(run, folder / PLAN), Ran)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        damage.append(str(error))
        return None


def _clear(folder: Path, epochs: int, step: int) -> None:
    """Remove the files from after so many epochs and steps."""
    for path in (folder / STEPS).glob("epoch-*.jsonl"):
        match = _LOG.match(path.name)
        if match is not None and (int(match.group(1)), int(match.group(2))) >= (epochs, step):
            path.unlink()
    for path in (folder / CHECKPOINTS).glob("*.safetensors"):
        match = _CHECKPOINT.match(path.name)
        if match is not None:
            epoch, middle = int(match.group(1)), match.group(2)
            counts = epoch < epochs if middle is None else (epoch, int(middle)) == (epochs, step)
            if not counts:
                path.unlink()
    for path in (folder / JOURNALS).glob("*.bin"):
        path.unlink()


def _results(logs: Mapping[int, _Logs], epochs: int, step: int, *, since: tuple[int, int]) -> tuple[RankResult, ...]:
    """Return the ranks' results of the steps that count, with the spans of those `since` then."""
    results = []
    for epoch, by_begin in sorted(logs.items()):
        begins = sorted(by_begin)
        for begin, following in zip(begins, [*begins[1:], None], strict=True):
            for rank, log in sorted(by_begin[begin].items()):
                end = following if following is not None else begin + len(log.steps)
                end = end if epoch < epochs else min(end, step) if epoch == epochs else 0
                whole = (epoch, begin) >= since
                own = [trace if whole else trace._replace(spans=(), memory=()) for trace in log.steps if trace.step < end]
                if own:
                    results.append(RankResult(rank=rank, steps=own, resumed_at=(epoch, begin) if begin else None))
    return tuple(results)


class EpochLog:
    """One rank's record of an epoch from a given step: a line for each step and, on one rank of each group, the state after every step."""

    def __init__(self, phase: RankPhase, epoch: int, begin: int, told: Callable[[StepTrace], None] | None = None) -> None:
        """told: called with every step once it is saved."""
        session, folder = phase.session, phase.rank_job.folder
        self._phase = phase
        self._journal: StepJournal | None = None
        self._told = told
        self._offset_s = session.context.clock_offset_s
        self._run = phase.rank_job.fingerprint
        self._journal_path = journal_path(folder, epoch, phase.layers)
        if phase.optimizer is None:
            return
        path = steps_log_path(folder, epoch, begin, session.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        plan, steps = phase.rank_job.present, phase.phase.steps(epoch)
        ranks = plan.cached.ranks if phase.phase.cached and plan.cached else plan.busy_ranks
        self._lines = SealedLog(path, LogOwner(owner=owner_of(self._run, path), ranks=tuple(sorted(ranks)), steps=len(steps)))
        if phase.keeps_steps:
            self._journal = StepJournal(self._journal_path, self._run, phase.optimizer)

    def __call__(self, trace: StepTrace) -> None:
        """Record a step that this rank has completed; the journal comes last, because it makes the step count."""
        self._lines.append(on_clock(trace, self._offset_s))
        if self._journal is not None:
            self._journal.write()
        if self._told is not None:
            self._told(trace)

    def pause(self) -> None:
        """Save the state between two steps if it is too large to be saved after each: then no step is repeated."""
        phase = self._phase
        if self._journal is None and phase.is_writer and not phase.is_backed_up and phase.optimizer is not None:
            write_once(self._journal_path, self._run, phase.optimizer)

    def end(self) -> None:
        """Remove the journal of an epoch whose checkpoint is complete."""
        if self._journal is not None:
            self._journal_path.unlink(missing_ok=True)
