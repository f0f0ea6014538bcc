"""Find the state that an interrupted run left in its folder, so that the same or other devices can resume at the next step.

All trainable tensors are saved by name: a checkpoint or journal covers some layers, and together they cover the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workbench.core.errors import WorkbenchError
from workbench.core.plan import Homes, Plan
from workbench.core.report import StepRecord
from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.folder import CHECKPOINTS, JOURNALS, PLAN, STEPS, cover, covering, is_whole, middle_path
from workbench.methods.common.session import RankResult, StepTrace
from workbench.methods.training.epoch_log import read_journal
from workbench.methods.training.phases import RankJob
from workbench.runtime.state import State

AGAIN = "The steps of its unfinished epoch are done again: the devices' shares of the samples are others now."

_LOG = re.compile(r"^epoch-(\d+)-from-(\d+)-rank-(\d+)\.jsonl$")
_CHECKPOINT = re.compile(r"^(?:epoch|moments)-(\d+)-(?:layers-\d+-\d+|step-(\d+))\.safetensors$")


_Logs = Mapping[int, Mapping[int, list[StepTrace]]]
"""An epoch's steps, by the first step of each attempt and by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The devices that use a folder.  devices: names by rank."""

    devices: tuple[str, ...]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """epochs: finished epochs.  step: completed steps of the next epoch.  state: files with the state so far; none before step 1.
    held: the ranks that keep the state in memory instead.

    results: of every rank, with one entry for each resumption.  is_same: whether the same devices continue under the same plan.
    notes: why completed steps are repeated.
    """

    epochs: int = 0
    step: int = 0
    state: tuple[Path, ...] = ()
    held: Homes = field(default_factory=dict)
    results: tuple[RankResult, ...] = field(default=(), repr=False)
    is_same: bool = True
    notes: tuple[str, ...] = ()

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
            former[result.rank] += result.steps
        return [replace(result, steps=former[result.rank] + result.steps) for result in results]


def take_up(rank_job: RankJob, held: Mapping[int, Homes] | None = None) -> Interrupted:
    """Return the progress of an interrupted run, and remove later files from its folder; job and data are the same.

    held: by optimizer step, the ranks that keep each tensor in memory, if devices back each other up; used if it is later.
    The steps of an unfinished epoch count if its mini-batches are the same under the new plan.
    """
    folder, plan = rank_job.folder, rank_job.plan
    mine = Ran(devices=tuple(device.name for device in rank_job.cluster.devices), plan=plan)
    former = _former(folder) or mine
    logs = _read_logs(folder)
    epochs = _finished(folder, rank_job.job.epochs, plan.num_layers, logs)
    step, notes = 0, []
    homes: Homes = {}
    if epochs < rank_job.job.epochs:
        phase = next(phase for phase in rank_job.phases() if epochs in phase.epochs)
        steps_per_epoch = len(phase.steps(epochs))
        same = same_batches(former.plan, plan, cached=phase.cached)
        # If an epoch's checkpoint is incomplete, its last step is repeated: it writes the checkpoint.
        before, count = epochs * steps_per_epoch, min(_count(logs.get(epochs, {})), steps_per_epoch - 1)
        found = _middle_of(folder, epochs, plan.num_layers, before, count) if held is None else None
        kept = max((at for at in held or () if before < at <= before + count), default=before)
        if kept > before and same:
            step, homes = kept - before, (held or {})[kept]
        elif kept > before:
            notes.append(AGAIN)
        elif found is not None and same:
            step = found.step - epochs * steps_per_epoch
            found.save(middle_path(folder, epochs, step))
        elif found is not None:
            notes.append(AGAIN)
    _clear(folder, epochs, step)
    write_text(folder / PLAN, to_json(mine))
    state: tuple[Path, ...] = (middle_path(folder, epochs, step),) if step and not homes else ()
    if epochs and not state:
        state = tuple(path for kind in ("epoch", "moments") for path in covering(folder, kind, epochs - 1, plan.num_layers))
    results = _results(logs, epochs, step, keeps_spans=former == mine)
    return Interrupted(epochs=epochs, step=step, state=state, held=homes, results=results, is_same=former == mine, notes=tuple(notes))


def same_batches(former: Plan, plan: Plan, *, cached: bool) -> bool:
    """Return whether an epoch's mini-batches are the same under two plans.  cached: it runs from the activation cache."""
    return former.cached == plan.cached if cached else former.mini_batch_size == plan.mini_batch_size


def begin(rank_job: RankJob) -> Interrupted:
    """Record the devices that use a folder from the start."""
    devices = tuple(device.name for device in rank_job.cluster.devices)
    write_text(rank_job.folder / PLAN, to_json(Ran(devices=devices, plan=rank_job.plan)))
    return Interrupted()


def read_log(path: Path) -> list[StepTrace]:
    """Return the complete steps of a log; the last line may be truncated."""
    traces: list[StepTrace] = []
    for line in path.read_bytes().splitlines():
        try:
            traces.append(from_json(line, StepTrace, source=str(path)))
        except WorkbenchError:
            break
    return traces


def _read_logs(folder: Path) -> dict[int, dict[int, dict[int, list[StepTrace]]]]:
    found: dict[int, dict[int, dict[int, list[StepTrace]]]] = {}
    for path in (folder / STEPS).glob("epoch-*.jsonl"):
        match = _LOG.match(path.name)
        if match is not None:
            epoch, begin, rank = map(int, match.groups())
            found.setdefault(epoch, {}).setdefault(begin, {})[rank] = read_log(path)
    return found


def _finished(folder: Path, epochs: int, num_layers: int, logs: Mapping[int, _Logs]) -> int:
    """Return the number of finished epochs after which a run can resume: only the last ones have moments."""
    count = 0
    while count < epochs and covering(folder, "epoch", count, num_layers) and _is_whole(logs.get(count, {})):
        count += 1
    while 0 < count < epochs and not covering(folder, "moments", count - 1, num_layers):
        count -= 1
    return count


def _count(logs: _Logs) -> int:
    """Return how many steps of an epoch all its ranks have completed."""
    begin = max(logs, default=0)
    return begin + min(map(len, logs.get(begin, {}).values()), default=0)


def _is_whole(logs: _Logs) -> bool:
    return bool(logs) and len(set(map(len, logs[max(logs)].values()))) == 1


def _middle_of(folder: Path, epoch: int, num_layers: int, before: int, count: int) -> State | None:
    """Return the state after the last of `count` completed steps of an unfinished epoch; None if no step's state was saved.

    before: the optimizer's steps before the epoch.
    """
    states: dict[int, list[tuple[Path, State]]] = {}
    for path in sorted((folder / JOURNALS).glob(f"epoch-{epoch}-layers-*.bin")):
        for state in read_journal(path):
            states.setdefault(state.step, []).append((path, state))
    earlier = [path for path in (folder / CHECKPOINTS).glob(f"epoch-{epoch}-step-*.safetensors") if is_whole(path)]
    for step in range(count, 0, -1):
        parts = dict(states.get(before + step, ()))
        chosen = cover(list(parts), num_layers)
        if chosen:
            return State(step=before + step, tensors={name: one for path in chosen for name, one in parts[path].tensors.items()})
        if middle_path(folder, epoch, step) in earlier:
            return State.load([middle_path(folder, epoch, step)])
    return None


def _former(folder: Path) -> Ran | None:
    try:
        return from_json((folder / PLAN).read_bytes(), Ran, source=PLAN)
    except (OSError, WorkbenchError):
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


def _results(logs: Mapping[int, _Logs], epochs: int, step: int, *, keeps_spans: bool) -> tuple[RankResult, ...]:
    """Return the ranks' results of the steps that count."""
    results = []
    for epoch, by_begin in sorted(logs.items()):
        begins = sorted(by_begin)
        for begin, following in zip(begins, [*begins[1:], None], strict=True):
            for rank, traces in sorted(by_begin[begin].items()):
                end = following if following is not None else begin + len(traces)
                end = end if epoch < epochs else min(end, step) if epoch == epochs else 0
                own = [trace if keeps_spans else trace._replace(spans=(), memory=()) for trace in traces if trace.step < end]
                if own:
                    results.append(RankResult(rank=rank, steps=own, resumed_at=(epoch, begin) if begin else None))
    return tuple(results)
