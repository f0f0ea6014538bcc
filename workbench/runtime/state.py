"""Move the named tensors of a rank between ranks, and load them from files."""

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
    """Return tensors by name from a run's sealed files, written by any ranks.

    into: memory for those to load; None loads all.

    No other part of the files is mapped or read, because a device may have less memory than the files' size.
    Raises DamagedError if a file differs from what this run wrote, and StateError if a tensor is in none of the files.
    """
    files = tuple(paths)
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= load_sealed(path, owner_of(run, path), into)
    if lost := sorted(set(into or ()).difference(tensors)):
        request = f"A state was to be read from {', '.join(map(str, files)) or 'no file'}."
        problem = f"{', '.join(lost[:4])}{' and others' if len(lost) > 4 else ''} missing."
        raise StateError(request, problem, "Give --workdir a folder that all devices share, or begin without --resume.")
    return tensors


def carry_out(
    moves: Sequence[Move], rank: int, run: Run, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]
) -> list[Span]:
    """Carry out this rank's part of a move and return its spans.  Every rank must call this with the same moves.

    tensors: this rank's tensors before the move.  into: contiguous memory for its tensors after the move.  They are
    copied bit for bit, including those that come from its own `tensors`.  It must not share memory with `tensors`.
    """
    for name in into.keys() & tensors.keys():
        if into[name].data_ptr() != tensors[name].data_ptr():
            into[name].copy_(tensors[name])
    spans: list[Span] = []
    for move in moves:
        pieces_by_value = {}
        for value in move.program.schedule.inputs[rank]:
            pieces = move.chunks[value.microbatch]
            pieces_by_value[value] = torch.cat(
                [_bytes(tensors[piece.name])[piece.start : piece.stop] for piece in pieces]
            )
        done = run(move.program, {}, pieces_by_value)
        spans += done.spans
        for value, content in done.outputs.items():
            offset = 0
            for piece in move.chunks[value.microbatch]:
                size = piece.stop - piece.start
                _bytes(into[piece.name])[piece.start : piece.stop].copy_(content[offset : offset + size])
                offset += size
    return spans


def spec_of(tensor: Tensor) -> Spec:
    """Return a tensor's shape and dtype."""
    return Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory, (nbytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
