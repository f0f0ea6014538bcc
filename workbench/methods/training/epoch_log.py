"""The on-disk record of every step of an epoch: ranks, times, and the optimizer's last two states, from which a run can resume.

The kernel owns what is written to a shared memory map, so it survives if the process is killed.  Two slots are written in turn,
because the devices of a run are at most one step apart: each device has the last step that all completed in one of its slots.
The file names its tensors, so that a run can resume under another plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.serial import to_json
from workbench.methods.common.folder import journal_path, steps_log_path
from workbench.methods.common.session import StepTrace, on_clock
from workbench.methods.training.phases import RankPhase
from workbench.runtime.flat_optimizer import Optimizer
from workbench.runtime.state import State

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
