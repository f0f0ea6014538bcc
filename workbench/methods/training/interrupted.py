"""Find the progress that an interrupted run left in its folder, so that the same or other devices can resume at the
next step.

Every rank logs its steps of an epoch.  The run resumes from the newest snapshot (see runtime.snapshot) of a step that
all have logged.
All files are sealed.  A damaged file is removed and reported, and its steps are repeated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.core.errors import ConfigError, DamagedError
from workbench.core.files import make_folder, remove
from workbench.core.plan import Homes, Plan
from workbench.core.report import StepRecord
from workbench.core.run_files import PLAN, STEPS
from workbench.core.schedule import Ranks
from workbench.core.sealed import (
    Lines,
    SealedLog,
    damaged,
    owner_of,
    read_lines,
    read_sealed,
    require_owner,
    write_sealed,
)
from workbench.core.serial import from_builtins, from_json
from workbench.methods.common.rank_results import RankResult, StepTrace, on_clock
from workbench.methods.training.phases import RankJob
from workbench.methods.training.rank_phases import RankPhase
from workbench.runtime.snapshot import (
    WEIGHTS,
    Position,
    covering,
    passing,
    remove_damaged,
    snapshot_files,
)

AGAIN = "The steps of its unfinished epoch are done again: the devices' shares of the samples are others now."

_LOG = re.compile(r"^epoch-(\d+)-from-(\d+)-rank-(\d+)\.jsonl$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOwner:
    """The first line of a log of steps.

    owner: see owner_of.  ranks: all ranks that write such a log.  steps: number of steps in the whole epoch.
    """

    owner: str
    ranks: Ranks
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """The intact steps of a rank's log, and the content of its first line."""

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
    """The progress of an interrupted run.

    epochs: number of finished epochs.  step: number of completed steps of the next epoch.  state: a snapshot's files;
    empty before step 1.
    homes: the ranks that have the snapshot in memory instead.
    results: results of every rank, with one entry for each resumption.  is_same: whether the same devices continue
    under the same plan.
    notes: why completed steps are repeated.  damage: which files of the run could not be used.
    """

    epochs: int = 0
    step: int = 0
    state: tuple[Path, ...] = ()
    homes: Homes = field(default_factory=dict)
    results: tuple[RankResult, ...] = field(default=(), repr=False)
    is_same: bool = True
    notes: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def begins(self) -> dict[str, Any]:
        """Return the fields of a RankJob that resumes here."""
        return {
            "start_epoch": self.epochs,
            "start_step": self.step,
            "state": self.state,
            "homes": self.homes,
            "is_same": self.is_same,
        }

    def steps(self, predicted: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
        """Return all steps of the run: measured ones where other devices did them, predicted ones otherwise."""
        done = (
            {}
            if self.is_same
            else {(record.epoch, record.step): record.samples for result in self.results for record in result.steps}
        )
        cached = {step.epoch: step.cached for step in predicted}
        finished_records = [
            StepRecord(epoch=place[0], step=place[1], samples=samples, cached=cached[place[0]])
            for place, samples in sorted(done.items())
        ]
        remaining = (
            predicted
            if self.is_same
            else [step for step in predicted if (step.epoch, step.step) >= (self.epochs, self.step)]
        )
        return (*finished_records, *remaining)

    def joined(self, results: Sequence[RankResult]) -> list[RankResult]:
        """Return each rank's results, before and after the resumption."""
        former: dict[int, list[StepTrace]] = {result.rank: [] for result in results}
        for result in self.results if self.is_same else ():
            if result.rank in former:
                former[result.rank] += result.steps
        return [replace(result, steps=former[result.rank] + result.steps) for result in results]


def take_up(rank_job: RankJob, in_memory: Mapping[Position, Homes] | None = None) -> Interrupted:
    """Return the progress of an interrupted run, and remove damaged and later files from its folder; job and data are
    the same.

    in_memory: for each snapshot in the devices' memory, the ranks that have each tensor.  The newest snapshot counts,
    wherever it is.
    One within an epoch counts if the epoch's mini-batches are the same under the new plan.
    """
    folder, plan, run, num_epochs = rank_job.folder, rank_job.plan, rank_job.fingerprint, rank_job.job.epochs
    mine = Ran(devices=rank_job.cluster.names, plan=plan)
    damage: list[str] = []
    former = _former(folder, run, damage)
    logs = _read_logs(folder, run, damage)
    damage += remove_damaged(folder, run)
    files, phases = snapshot_files(folder), rank_job.phases()

    def counts(position: Position) -> bool:
        phase = next(phase for phase in phases if position.epoch in phase.epochs)
        return not position.step or (former is not None and same_batches(former.plan, plan, cached=phase.cached))

    finished = 0
    # Its steps are logged, and the weights at its end are complete.
    while (
        finished < num_epochs
        and _is_whole(logs.get(finished, {}))
        and covering(files, Position(finished + 1, 0), plan.num_layers, WEIGHTS)
    ):
        finished += 1
    begin, state, notes = Position(finished, 0), tuple[Path, ...](), list[str]()
    homes: Homes = {}
    if finished < num_epochs:
        # If the snapshot at an epoch's end is incomplete, the last step is repeated: then it is taken.
        num_steps = len(next(phase for phase in phases if finished in phase.epochs).steps(finished))
        last = Position(finished, min(_count(logs.get(finished, {})), num_steps - 1))
        complete = {
            file.position: covering(files, file.position, plan.num_layers) for file in files if file.position <= last
        }
        usable = [
            position
            for position in {*(in_memory or {}), *(file_position for file_position, paths in complete.items() if paths)}
            if position <= last
        ]
        begin = max(filter(counts, usable), default=Position(0, 0))
        state = complete.get(begin, ())
        homes = {} if state else (in_memory or {}).get(begin, {})
        notes += [AGAIN] * any(position > begin for position in usable)
        newest = max((file.position.step for file in files if file.position.epoch == finished), default=0)
        if newest > last.step + 1:  # a crash leaves the log of a device at most one step behind
            damage.append(
                f"Steps {last.step + 1} to {newest} of epoch {finished + 1} are done again: a log lacks them."
            )
    whole_logs = 0
    while _is_whole(logs.get(whole_logs, {})):
        whole_logs += 1
    if begin.epoch < num_epochs and whole_logs > begin.epoch + 1:
        damage.append(f"Epochs {begin.epoch + 1} to {whole_logs} are done again: a snapshot is missing or was damaged.")
    _clear(folder, begin, state)
    is_same = former is not None and replace(former, since=mine.since) == mine
    mine = former if former is not None and is_same else replace(mine, since=begin)
    write_sealed(folder / PLAN, owner_of(run, folder / PLAN), mine)
    return Interrupted(
        epochs=begin.epoch,
        step=begin.step,
        state=state,
        homes=homes,
        results=_results(logs, *begin, since=mine.since),
        is_same=is_same,
        notes=tuple(notes),
        damage=tuple(damage),
    )


def same_batches(former: Plan, plan: Plan, *, cached: bool) -> bool:
    """Return whether an epoch's mini-batches are the same under two plans.

    cached: whether it runs from the activation cache.
    """
    return former.cached == plan.cached if cached else former.mini_batch_size == plan.mini_batch_size


def begin(rank_job: RankJob) -> Interrupted:
    """Record the devices that use a folder from the start."""
    devices = rank_job.cluster.names
    path = rank_job.folder / PLAN
    write_sealed(path, owner_of(rank_job.fingerprint, path), Ran(devices=devices, plan=rank_job.plan))
    return Interrupted()


def _read_logs(folder: Path, run: str, damage: list[str]) -> dict[int, dict[int, dict[int, RankLog]]]:
    """Return the intact steps of all logs, and remove the rest; the last line may have been cut off by a crash."""
    logs: dict[int, dict[int, dict[int, RankLog]]] = {}
    for path in sorted((folder / STEPS).glob("epoch-*.jsonl")):
        match = _LOG.match(path.name)
        if match is None:
            continue
        epoch, begin, rank = map(int, match.groups())
        lines = Lines()
        try:
            lines = read_lines(path)
            about = from_builtins(lines.owner, LogOwner, source=path.name)
            steps = tuple(from_json(line, StepTrace, source=path.name) for line in lines.contents)
            require_owner(path, about.owner, owner_of(run, path))
        except (ConfigError, DamagedError) as error:  # of another version, damaged from its first line on, or another's
            if lines.nbytes or lines.damage or not path.is_file():
                damage.append(
                    str(error if isinstance(error, DamagedError) else damaged(path, lines.damage or "it does not read"))
                )
            remove(path)
            continue
        if lines.damage:
            damage.append(f"'{path.name}': {lines.damage}; the steps from there on are done again.")
            os.truncate(path, lines.nbytes)
        logs.setdefault(epoch, {}).setdefault(begin, {})[rank] = RankLog(about=about, steps=steps)
    return logs


def _count(logs: _Logs) -> int:
    """Return how many steps of an epoch, from its first on, all ranks have completed."""
    count = 0
    for begin, by_rank in sorted(logs.items()):
        about = next(iter(by_rank.values())).about
        if begin > count:
            break
        if set(by_rank) != set(about.ranks):  # what an earlier attempt logged of these steps no longer counts
            count = begin
            break
        count = begin + min(len(log.steps) for log in by_rank.values())
    return count


def _is_whole(logs: _Logs) -> bool:
    return bool(logs) and _count(logs) == next(iter(logs[max(logs)].values())).about.steps


def _former(folder: Path, run: str, damage: list[str]) -> Ran | None:
    try:
        return read_sealed(folder / PLAN, owner_of(run, folder / PLAN), Ran)
    except FileNotFoundError:
        return None
    except DamagedError as error:
        damage.append(str(error))
        if not (folder / PLAN).is_file():
            remove(folder / PLAN)
        return None


def _clear(folder: Path, position: Position, state: Sequence[Path]) -> None:
    """Delete files written after a position, and snapshots that are no longer needed.

    state: the files of the snapshot that is used.
    """
    for path in (folder / STEPS).glob("epoch-*.jsonl"):
        match = _LOG.match(path.name)
        if match is not None and (int(match.group(1)), int(match.group(2))) >= position:
            remove(path)
    later = [file.path for file in snapshot_files(folder) if file.position > position]
    for path in {*later, *passing(folder, with_moments=False)}.difference(state):
        remove(path)


def _results(logs: Mapping[int, _Logs], epochs: int, step: int, *, since: tuple[int, int]) -> tuple[RankResult, ...]:
    """Return the ranks' results of the steps that count, with the spans of those `since` then."""
    results = []
    for epoch, by_begin in sorted(logs.items()):
        begins = sorted(by_begin)
        for begin, following in zip(begins, [*begins[1:], None], strict=True):
            for rank, log in sorted(by_begin[begin].items()):
                end = following if following is not None else begin + len(log.steps)
                end = end if epoch < epochs else min(end, step) if epoch == epochs else 0
                keeps_spans = (epoch, begin) >= since
                steps_done = [
                    trace if keeps_spans else trace._replace(spans=(), memory=())
                    for trace in log.steps
                    if trace.step < end
                ]
                if steps_done:
                    results.append(
                        RankResult(rank=rank, steps=steps_done, resumed_at=(epoch, begin) if begin else None)
                    )
    return tuple(results)


class EpochLog:
    """One rank's log of an epoch from a given step, with a line for each step."""

    def __init__(self, phase: RankPhase, epoch: int, begin: int) -> None:
        session, rank_job, plan = phase.session, phase.rank_job, phase.rank_job.present
        self._offset_s = session.context.clock_offset_s
        if phase.optimizer is None:
            return
        path = rank_job.folder / STEPS / f"epoch-{epoch}-from-{begin}-rank-{session.rank}.jsonl"
        make_folder(path.parent)
        ranks = plan.cached.ranks if phase.phase.cached and plan.cached else plan.busy_ranks
        owner = LogOwner(
            owner=owner_of(rank_job.fingerprint, path), ranks=tuple(sorted(ranks)), steps=len(phase.phase.steps(epoch))
        )
        self._lines = SealedLog(path, owner)

    def append(self, trace: StepTrace) -> None:
        """Log a step that this rank has completed."""
        self._lines.append(on_clock(trace, self._offset_s))
