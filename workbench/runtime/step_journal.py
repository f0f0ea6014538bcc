"""The optimizer's last two states in a file of fixed size: a run resumes from them, and they survive a kill.

The kernel owns what is written to a shared memory map.  Two slots are written in turn, because the devices of a run are at most one step
apart: each device has the last step that all completed in one of its slots.  The file names its owner and its tensors, so that a run can
resume under another plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from workbench.core.sealed import checksum, owner_of
from workbench.runtime.flat_optimizer import Optimizer
from workbench.runtime.state import State

_HEADER = 2
"""int64 words of a slot: steps taken (set to -1 while the slot is written), and the checksum."""


class Journal(NamedTuple):
    """The complete records of a journal, oldest first.  damage: why there are not more; '' if nothing was damaged."""

    states: tuple[State, ...] = ()
    damage: str = ""


class StepJournal:
    """A file of fixed size with two slots for an optimizer's parameters and moments; it replaces an older file."""

    def __init__(self, path: Path, run: str, optimizer: Optimizer) -> None:
        """run: its fingerprint."""
        self._num_values, self._optimizer = sum(vector.numel() for vector in optimizer.state_vectors()), optimizer
        self._head = _head(owner_of(run, path), optimizer)
        words = _slot_words(self._num_values)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Writing zeros reserves the space: a map of a sparse file ends in SIGBUS on a full disk.
        path.write_bytes(self._head + bytes(2 * 4 * words))
        start = len(self._head) // 4
        self._slots = torch.from_file(str(path), shared=True, size=start + 2 * words, dtype=torch.int32)[start:].view(2, words)

    def write(self) -> None:
        """Save the optimizer's current state in place of the step before the last."""
        header, values = _parts(self._slots[self._optimizer.num_steps % 2], self._num_values)
        header[0] = -1
        at = 0
        for vector in self._optimizer.state_vectors():  # an optimizer that keeps versions has other vectors now
            values[at : at + vector.numel()].copy_(vector)
            at += vector.numel()
        header[1] = _checksum(self._head, self._optimizer.num_steps, [values])
        header[0] = self._optimizer.num_steps


def write_once(path: Path, run: str, optimizer: Optimizer) -> None:
    """Write a journal with the current state alone, without more memory: a device may have none for a second state."""
    vectors = optimizer.state_vectors()
    num_values = sum(vector.numel() for vector in vectors)
    head, slot_bytes = _head(owner_of(run, path), optimizer), 4 * _slot_words(num_values)
    header = torch.tensor([optimizer.num_steps, _checksum(head, optimizer.num_steps, vectors)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(head)
        file.seek(len(head) + optimizer.num_steps % 2 * slot_bytes)
        for part in (header, *vectors):
            file.write(part.numpy().data)
        file.truncate(len(head) + 2 * slot_bytes)


def read_journal(path: Path, run: str) -> Journal:
    """Return the records of a journal, by tensor name; none if there is no file."""
    if not path.is_file():
        return Journal()
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    try:
        owner, shapes = msgspec.json.decode(data[8 : 8 + length], type=tuple[str, dict[str, tuple[int, ...]]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Journal(damage="its header was changed after it was written")
    if owner != owner_of(run, path):
        return Journal(damage=f"it belongs to {owner}")
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    num_values, head = sum(sizes), data[: 8 + length]
    words = _slot_words(num_values)
    if len(data) != len(head) + 2 * 4 * words:
        return Journal(damage="its length was changed after it was written")
    slots = torch.frombuffer(bytearray(data[len(head) :]), dtype=torch.int32).view(2, words)
    found, damage = [], ""
    for slot in slots:
        header, values = _parts(slot, num_values)
        steps = int(header[0])
        if steps <= 0:  # empty, or a crash came while it was written
            continue
        if int(header[1]) != _checksum(head, steps, [values]):
            damage = "one of its two records was changed after it was written"
            continue
        named = zip(shapes.items(), values.split(sizes), strict=True)
        found.append(State(step=steps, tensors={name: tensor.view(shape) for (name, shape), tensor in named}))
    return Journal(tuple(sorted(found, key=lambda state: state.step)), damage)


def _head(owner: str, optimizer: Optimizer) -> bytes:
    """Return the start of a journal: its owner, and the shapes of its tensors in the order of the vectors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.named_tensors().items()}
    text = msgspec.json.encode((owner, shapes))
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _slot_words(num_values: int) -> int:
    """Return the int32 words of a slot; a header word takes two."""
    return 2 * _HEADER + num_values + num_values % 2  # even: keeps the second slot's int64 header aligned


def _parts(slot: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    return slot[: 2 * _HEADER].view(torch.int64), slot[2 * _HEADER : 2 * _HEADER + num_values].view(torch.float32)


def _checksum(head: bytes, steps: int, vectors: Iterable[Tensor]) -> int:
    found = checksum(checksum(0, head), steps.to_bytes(8, "little"))
    for vector in vectors:
        found = checksum(found, memoryview(vector.numpy()))
    return found
