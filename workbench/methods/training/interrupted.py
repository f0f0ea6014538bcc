"""Find the state that an interrupted run left in its folder, so that the same or other devices can resume at the next step.

All trainable tensors are saved by name: a checkpoint or journal covers some layers, and together they cover the model.

Every step of an epoch leaves a record: ranks, times, and the optimizer's last two states, from which a run can resume.
The kernel owns what is written to a shared memory map, so it survives if the process is killed.  Two slots are written in turn,
because the devices of a run are at most one step apart: each device has the last step that all completed in one of its slots.
The file names its tensors, so that a run can resume under another plan.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.errors import WorkbenchError
from workbench.core.plan import Homes, Plan
from workbench.core.report import StepRecord
from workbench.core.serial import from_json, to_json, write_text
from workbench.methods.common.folder import (
    CHECKPOINTS,
    JOURNALS,
    PLAN,
    STEPS,
    cover,
    covering,
    is_whole,
    journal_path,
    middle_path,
    steps_log_path,
)
from workbench.methods.common.session import RankResult, StepTrace, on_clock
from workbench.methods.training.phases import RankJob, RankPhase
from workbench.runtime.flat_optimizer import Optimizer
from workbench.runtime.state import State

AGAIN = "The steps of its unfinished epoch are done again: the devices' shares of the samples are others now."

_LOG = re.compile(r"^epoch-(\d+)-from-(\d+)-rank-(\d+)\.jsonl$")
_CHECKPOINT = re.compile(r"^(?:epoch|moments)-(\d+)-(?:layers-\d+-\d+|step-(\d+))\.safetensors$")


_Logs = Mapping[int, Mapping[int, list[StepTrace]]]
"""An epoch's steps, by the first step of each attempt and by rank."""


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
            if result.rank in former:
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
    is_same = replace(former, since=mine.since) == mine
    mine = former if is_same else replace(mine, since=(epochs, step))
    write_text(folder / PLAN, to_json(mine))
    state: tuple[Path, ...] = (middle_path(folder, epochs, step),) if step and not homes else ()
    if epochs and not state:
        state = tuple(path for kind in ("epoch", "moments") for path in covering(folder, kind, epochs - 1, plan.num_layers))
    results = _results(logs, epochs, step, since=mine.since)
    return Interrupted(epochs=epochs, step=step, state=state, held=homes, results=results, is_same=is_same, notes=tuple(notes))


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


def _results(logs: Mapping[int, _Logs], epochs: int, step: int, *, since: tuple[int, int]) -> tuple[RankResult, ...]:
    """Return the ranks' results of the steps that count, with the spans of those `since` then."""
    results = []
    for epoch, by_begin in sorted(logs.items()):
        begins = sorted(by_begin)
        for begin, following in zip(begins, [*begins[1:], None], strict=True):
            for rank, traces in sorted(by_begin[begin].items()):
                end = following if following is not None else begin + len(traces)
                end = end if epoch < epochs else min(end, step) if epoch == epochs else 0
                whole = (epoch, begin) >= since
                own = [trace if whole else trace._replace(spans=(), memory=()) for trace in traces if trace.step < end]
                if own:
                    results.append(RankResult(rank=rank, steps=own, resumed_at=(epoch, begin) if begin else None))
    return tuple(results)


_HEADER = 4
"""int64 words of a slot: steps taken (set to -1 while the slot is written), number of values, checksum, and one spare."""


class StepJournal:
    """A file of fixed size with two slots for an optimizer's parameters and moments; it replaces an older file."""

    def __init__(self, path: Path, optimizer: Optimizer) -> None:
        self._num_values, self._optimizer = sum(vector.numel() for vector in optimizer.state_vectors()), optimizer
        text, words = _head(optimizer), _slot_words(self._num_values)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Writing zeros reserves the space: a map of a sparse file ends in SIGBUS on a full disk.
        path.write_bytes(text + bytes(2 * 4 * words))
        start = len(text) // 4
        self._slots = torch.from_file(str(path), shared=True, size=start + 2 * words, dtype=torch.int32)[start:].view(2, words)

    def write(self) -> None:
        """Save the optimizer's current state in place of the step before the last."""
        header, values = _parts(self._slots[self._optimizer.num_steps % 2], self._num_values)
        header[0] = -1
        at = 0
        for vector in self._optimizer.state_vectors():  # an optimizer that keeps versions has other vectors now
            values[at : at + vector.numel()].copy_(vector)
            at += vector.numel()
        header[1], header[2] = at, _checksum(values)
        header[0] = self._optimizer.num_steps


def write_once(path: Path, optimizer: Optimizer) -> None:
    """Write a journal with the current state alone, without more memory: a device may have none for a second state."""
    vectors = optimizer.state_vectors()
    num_values = sum(vector.numel() for vector in vectors)
    text, slot_bytes = _head(optimizer), 4 * _slot_words(num_values)
    header = torch.tensor([optimizer.num_steps, num_values, sum(map(_checksum, vectors)), 0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(text)
        file.seek(len(text) + optimizer.num_steps % 2 * slot_bytes)
        for part in (header, *vectors):
            file.write(part.numpy().data)
        file.truncate(len(text) + 2 * slot_bytes)


def read_journal(path: Path) -> list[State]:
    """Return the complete records of a journal, by tensor name, oldest first; nothing if the file is not a journal."""
    data = path.read_bytes() if path.is_file() else b""
    try:
        length = int.from_bytes(data[:8], "little")
        shapes = {name: torch.Size(shape) for name, shape in json.loads(data[8 : 8 + length])}
    except ValueError:
        return []
    num_values = sum(shape.numel() for shape in shapes.values())
    words = _slot_words(num_values)
    if len(data) != 8 + length + 2 * 4 * words:
        return []
    slots = torch.frombuffer(bytearray(data[8 + length :]), dtype=torch.int32).view(2, words)
    found = []
    for index, slot in enumerate(slots):
        header, values = _parts(slot, num_values)
        steps = int(header[0])
        if steps > 0 and steps % 2 == index and int(header[1]) == num_values and int(header[2]) == _checksum(values):
            tensors = values.split([shape.numel() for shape in shapes.values()])
            named = {name: tensor.view(shape) for (name, shape), tensor in zip(shapes.items(), tensors, strict=True)}
            found.append(State(step=steps, tensors=named))
    return sorted(found, key=lambda state: state.step)


def _head(optimizer: Optimizer) -> bytes:
    """Return the start of a journal: the shapes of its tensors."""
    shapes = [[name, list(tensor.shape)] for name, tensor in optimizer.named_tensors().items()]  # in the order of the vectors
    text = json.dumps(shapes).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _slot_words(num_values: int) -> int:
    """Return the int32 words of a slot; a header word takes two."""
    return 2 * _HEADER + num_values + num_values % 2  # even: keeps the second slot's int64 header aligned


def _parts(slot: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    return slot[: 2 * _HEADER].view(torch.int64), slot[2 * _HEADER : 2 * _HEADER + num_values].view(torch.float32)


def _checksum(values: Tensor) -> int:
    # A checksum detects pages that did not reach the disk when the machine crashed; it costs a tenth of a CRC.
    # A sum in another dtype converts all its input at once: in parts, a large state needs no more memory.
    return sum(int(part.sum(dtype=torch.int64)) for part in values.view(torch.int32).split(1 << 20))


class EpochLog:
    """One rank's record of an epoch from a given step: a line for each step and, on one rank of each group, the state after every step."""

    def __init__(self, phase: RankPhase, epoch: int, begin: int, told: Callable[[StepTrace], None] | None = None) -> None:
        """told: called with every step once it is saved."""
        session, folder = phase.session, phase.rank_job.folder
        self._phase = phase
        self._journal: StepJournal | None = None
        self._told = told
        self._offset_s = session.context.clock_offset_s
        self._path = steps_log_path(folder, epoch, begin, session.rank)
        self._journal_path = journal_path(folder, epoch, phase.layers)
        if phase.optimizer is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("")
        if phase.keeps_steps:
            self._journal = StepJournal(self._journal_path, phase.optimizer)

    def __call__(self, trace: StepTrace) -> None:
        """Record a step that this rank has completed; the journal comes last, because it makes the step count."""
        with open(self._path, "a", encoding="utf-8") as lines:
            lines.write(to_json(on_clock(trace, self._offset_s), indent=-1) + "\n")
        if self._journal is not None:
            self._journal.write()
        if self._told is not None:
            self._told(trace)

    def pause(self) -> None:
        """Save the state between two steps if it is too large to be saved after each: then no step is repeated."""
        phase = self._phase
        if self._journal is None and phase.is_writer and not phase.is_backed_up and phase.optimizer is not None:
            write_once(self._journal_path, phase.optimizer)

    def end(self) -> None:
        """Remove the journal of an epoch whose checkpoint is complete."""
        if self._journal is not None:
            self._journal_path.unlink(missing_ok=True)
