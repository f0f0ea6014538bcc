"""The named tensors of a rank: moved between ranks, backed up in memory, saved to files and loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.core.costs import Spec
from workbench.core.errors import StateError
from workbench.core.program import Program
from workbench.core.schedule import Value
from workbench.core.sealed import owner_of
from workbench.core.timeline import Span
from workbench.models.sealed_tensors import load_sealed, save_sealed
from workbench.runtime.executor import Execution
from workbench.runtime.transport import empty
from workbench.schedules.moves import Move

Run = Callable[[Program, dict[str, Any], dict[Value, Any]], Execution]
"""Executor.run or a session's method: (program, handlers, inputs) -> record of this rank's step."""

_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """step: number of optimizer steps the tensors have seen.  tensors: by name; may be views of an optimizer's or a file's memory."""

    step: int
    tensors: Mapping[str, Tensor]

    @property
    def specs(self) -> dict[str, Spec]:
        """Return the shape and dtype of every tensor."""
        return {name: spec_of(tensor) for name, tensor in self.tensors.items()}

    def snapshot(self) -> State:
        """Return a copy that later steps do not change."""
        return State(step=self.step, tensors={name: tensor.detach().clone() for name, tensor in self.tensors.items()})

    def moved(self, moves: Sequence[Move], rank: int, run: Run, specs: Mapping[str, Spec]) -> State:
        """Return a rank's state after a move, in new memory.  specs: of the tensors that the rank has after the move."""
        into = {name: empty(spec) for name, spec in specs.items()}
        carry_out(moves, rank, run, self.tensors, into)
        return State(step=self.step, tensors=into)

    def save(self, path: Path, run: str) -> None:
        """Write a sealed safetensors file atomically.  run: its fingerprint.  Raises WriteError if the system refuses."""
        save_sealed(path, owner_of(run, path), self.tensors, {_STEP: str(self.step)})

    @classmethod
    def load(cls, paths: Iterable[Path], run: str, into: Mapping[str, Tensor] | None = None) -> State:
        """Load tensors by name from files written by `save`, on any ranks.  into: memory for those to load; None loads all.

        Nothing else of the files is mapped or read: a device may have less memory than they are long.
        Raises DamagedError if a file is not as this run wrote it, and StateError if a tensor is in none of the files, or if the files are
        from different steps.
        """
        files = tuple(paths)
        tensors: dict[str, Tensor] = {}
        steps = set()
        for path in files:
            stored, metadata = load_sealed(path, owner_of(run, path), into)
            steps.add(int(metadata[_STEP]))
            tensors |= stored
        lost = sorted(set(into or ()).difference(tensors))
        if lost or len(steps) != 1:
            asked = f"A state was to be read from {', '.join(map(str, files)) or 'no file'}."
            found = (
                f"{', '.join(lost[:4])}{' and others' if len(lost) > 4 else ''} missing." if lost else f"Their steps are {sorted(steps)}."
            )
            raise StateError(asked, found, "Give --workdir a folder that all devices share, or begin without --resume.")
        return cls(step=steps.pop(), tensors=tensors)


class Backups:
    """The last two states that a rank keeps as backups of its own and other ranks' tensors.

    Two, because a device may be lost while the newer backup is being sent.  Then only some ranks have the newer one.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def keep(self, state: State) -> None:
        """Keep a snapshot, and drop the one before the last."""
        self._states[state.step] = state
        for step in sorted(self._states)[:-2]:
            del self._states[step]

    def forget_after(self, step: int) -> None:
        """Drop the backups of later steps.  Those steps are repeated, possibly with different results."""
        for later in [kept for kept in self._states if kept > step]:
            del self._states[later]

    def names(self) -> dict[int, tuple[str, ...]]:
        """Return the names of the tensors kept, by step."""
        return {step: tuple(state.tensors) for step, state in self._states.items()}

    def at(self, step: int) -> State:
        """Return the state after a step, which must be one of `names`."""
        return self._states[step]


def carry_out(moves: Sequence[Move], rank: int, run: Run, held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> list[Span]:
    """Do this rank's part of a move and return its spans.  Every rank must call this with the same moves.

    held: this rank's tensors before the move.  into: contiguous memory for its tensors after the move, which are copied bit for bit,
    including those that come from its own `held`.  It must not share memory with `held`.
    """
    for name in into.keys() & held.keys():
        if into[name].data_ptr() != held[name].data_ptr():
            into[name].copy_(held[name])
    spans: list[Span] = []
    for move in moves:
        own = {}
        for value in move.program.schedule.inputs[rank]:
            pieces = move.chunks[value.microbatch]
            own[value] = torch.cat([_bytes(held[piece.name])[piece.start : piece.stop] for piece in pieces])
        done = run(move.program, {}, own)
        spans += done.spans
        for value, content in done.outputs.items():
            at = 0
            for piece in move.chunks[value.microbatch]:
                size = piece.stop - piece.start
                _bytes(into[piece.name])[piece.start : piece.stop].copy_(content[at : at + size])
                at += size
    return spans


def spec_of(tensor: Tensor) -> Spec:
    """Return a tensor's shape and dtype."""
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, (nbytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
