"""The named tensors of a rank: moved between ranks, saved to files and loaded again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from workbench.models.sealed_tensors import load_sealed
from workbench.runtime.executor import Execution
from workbench.schedules.moves import Move

Run = Callable[[Program, dict[str, Any], dict[Value, Any]], Execution]
"""Executor.run or a session's method: (program, handlers, inputs) -> record of this rank's step."""


def load_state(paths: Iterable[Path], run: str, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return tensors by name from a run's sealed files, written by any ranks.  into: memory for those to load; None
    loads all.

    Nothing else of the files is mapped or read: a device may have less memory than they are long.
    Raises DamagedError if a file is not as this run wrote it, and StateError if a tensor is in none of the files.
    """
    files = tuple(paths)
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_sealed(path, owner_of(run, path), into)
    if lost := sorted(set(into or ()).difference(tensors)):
        asked = f"A state was to be read from {', '.join(map(str, files)) or 'no file'}."
        found = f"{', '.join(lost[:4])}{' and others' if len(lost) > 4 else ''} missing."
        raise StateError(asked, found, "Give --workdir a folder that all devices share, or begin without --resume.")
    return tensors


def carry_out(
    moves: Sequence[Move], rank: int, run: Run, held: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> list[Span]:
    """Do this rank's part of a move and return its spans.  Every rank must call this with the same moves.

    held: this rank's tensors before the move.  into: contiguous memory for its tensors after the move, which are copied
    bit for bit,
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
