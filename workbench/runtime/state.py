"""The named tensors that a rank holds: moved between ranks, kept in memory as a backup, written to files and read from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from workbench.core.costs import Spec
from workbench.core.errors import StateError
from workbench.core.program import Program
from workbench.core.schedule import Value
from workbench.core.timeline import Span
from workbench.models.partial_loading import save_tensors
from workbench.runtime.executor import Execution
from workbench.runtime.transport import empty
from workbench.schedules.moves import Move

Run = Callable[[Program, dict[str, Any], dict[Value, Any]], Execution]
"""Executor.run or a session's: (program, handlers, inputs) -> what this rank did."""

_STEP = "step"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """step: how many optimizer steps the tensors have seen.  tensors: by name; they may be views of an optimizer's or a file's memory."""

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
        """Return what a rank holds after a move, in new memory.  specs: of what it is to hold."""
        into = {name: empty(spec) for name, spec in specs.items()}
        carry_out(moves, rank, run, self.tensors, into)
        return State(step=self.step, tensors=into)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all.  Raises WriteError if the system refuses."""
        save_tensors(path, self.tensors, {_STEP: str(self.step)})

    @classmethod
    def load(cls, paths: Iterable[Path], names: Iterable[str] | None = None) -> State:
        """Return tensors by name from files that `save` wrote, whichever ranks wrote which; None: all of them.

        Raises StateError if a tensor is in none of the files, or if the files are of different steps.
        """
        files = tuple(paths)
        wanted = None if names is None else set(names)
        tensors: dict[str, Tensor] = {}
        steps = set()
        for path in files:
            with safe_open(path, framework="pt") as file:
                steps.add(int(file.metadata()[_STEP]))
                for name in file.keys() if wanted is None else wanted.intersection(file.keys()):
                    tensors[name] = file.get_tensor(name)
        lost = sorted((wanted or set()).difference(tensors))
        if lost or len(steps) != 1:
            asked = f"A state was to be read from {', '.join(map(str, files)) or 'no file'}."
            found = (
                f"{', '.join(lost[:4])}{' and others' if len(lost) > 4 else ''} missing." if lost else f"Their steps are {sorted(steps)}."
            )
            raise StateError(asked, found, "Give --workdir a folder that all devices share, or begin without --resume.")
        return cls(step=steps.pop(), tensors=tensors)


class Backups:
    """The last two states that a rank keeps for itself and for others, in case a device is lost.

    Two, because a device may be lost while the later one is on its way: then some ranks have it and others do not.
    """

    def __init__(self) -> None:
        self._states: dict[int, State] = {}

    def keep(self, state: State) -> None:
        """Keep a snapshot, in place of the one before the last."""
        self._states[state.step] = state
        for step in sorted(self._states)[:-2]:
            del self._states[step]

    def forget_after(self, step: int) -> None:
        """Forget later steps, which are done again: other devices may do them otherwise."""
        for later in [kept for kept in self._states if kept > step]:
            del self._states[later]

    def names(self) -> dict[int, tuple[str, ...]]:
        """Return what is kept, by step."""
        return {step: tuple(state.tensors) for step, state in self._states.items()}

    def at(self, step: int) -> State:
        """Return the state as it was after a step, one of `names`."""
        return self._states[step]


def carry_out(moves: Sequence[Move], rank: int, run: Run, held: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> list[Span]:
    """Do this rank's part of a move and return its spans; every rank calls this with the same moves.

    held: what this rank holds before.  into: where what it is to hold is written, bit for bit, also from its own `held`; contiguous, and
    no tensor's memory is another's in `held`.
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
