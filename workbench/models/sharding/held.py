"""A block's weights as one device holds them: its units or columns, cut out and put side by side (Galaxy+, section III-B, Fig. 6-7)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.models.sharding.layout import Block, Cut, NormLayout
from workbench.models.sharding.slices import Ranges, size
from workbench.models.sharding.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """The slices of one block.

    ranges: of units or columns, in the order in which they are held.  count: how many that are.
    inputs: of each group of input projections the (sum of its cuts' widths x count, d) matrix, one cut below the other.
    biases: (the same rows,), None where no cut of the group has one.  output: (d, width x count).
    """

    ranges: Ranges
    count: int
    inputs: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    output: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        tensors = (*self.inputs, *(bias for bias in self.biases if bias is not None), self.output)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What the connection behind a block adds and normalises by: whole on every device.  bias: (d,), of the output matrix."""

    bias: Tensor | None
    weight: Tensor | None
    shift: Tensor | None
    norm: NormLayout

    @property
    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.bias, self.weight, self.shift) if tensor is not None)


class _Piece(NamedTuple):
    """`length` units to put at place `to`: from place `old` of what is held already; None: from unit `start` of the source."""

    to: int
    old: int | None
    start: int
    length: int


def hold_block(block: Block, ranges: Ranges, hidden_size: int, source: WeightSource, old: HeldBlock | None = None) -> HeldBlock:
    """Return the slices of a block; what `old` holds of them is copied from there, and only the rest is read.

    Returns `old` itself if it holds just these.
    """
    if old is not None and old.ranges == ranges:
        return old
    pieces = tuple(_pieces(ranges, () if old is None else old.ranges))
    count = size(ranges)
    inputs: list[Tensor] = []
    biases: list[Tensor | None] = []
    for index, group in enumerate(block.inputs):
        rows = count * sum(cut.width for cut in group)
        matrix = torch.empty(rows, hidden_size, dtype=source.dtype)
        vector = torch.zeros(rows, dtype=source.dtype) if any(cut.bias for cut in group) else None
        for cut, piece, to, there in _places(group, pieces, count, 0 if old is None else old.count):
            if piece.old is None or old is None:
                _read_rows(matrix[to], None if vector is None else vector[to], cut, piece, source)
                continue
            matrix[to] = old.inputs[index][there]
            before = old.biases[index]
            if vector is not None and before is not None:
                vector[to] = before[there]
        inputs.append(matrix)
        biases.append(vector)
    output = torch.empty(hidden_size, block.output.width * count, dtype=source.dtype)
    for cut, piece, to, there in _places((block.output,), pieces, count, 0):
        if piece.old is not None and old is not None:
            output[:, to] = old.output[:, there]
        elif cut.is_transposed:
            source.fill(output[:, to].t(), cut.weight, _span(cut, piece))
        else:
            source.fill(output[:, to], cut.weight, (0, hidden_size), _span(cut, piece))
    return HeldBlock(ranges=ranges, count=count, inputs=tuple(inputs), biases=tuple(biases), output=output)


def missing_units(ranges: Ranges, old: Ranges) -> int:
    """Return how many units (or columns) of `ranges` are not in `old`."""
    return sum(piece.length for piece in _pieces(ranges, old) if piece.old is None)


def hold_connection(block: Block, hidden_size: int, source: WeightSource) -> Connection:
    """Return a block's output bias and norm, whole."""
    return Connection(
        bias=read_vector(block.output.bias, hidden_size, source),
        weight=read_vector(block.norm.weight, hidden_size, source),
        shift=read_vector(block.norm.bias, hidden_size, source),
        norm=block.norm,
    )


def read_vector(name: str | None, length: int, source: WeightSource) -> Tensor | None:
    """Return a vector of weights, None without a name."""
    if not name:
        return None
    vector = torch.empty(length, dtype=source.dtype)
    source.fill(vector, name, (0, length))
    return vector


def _places(group: Sequence[Cut], pieces: Sequence[_Piece], count: int, old_count: int) -> Iterator[tuple[Cut, _Piece, slice, slice]]:
    """Go through cuts that stand one below the other; for each piece: its rows in the new matrix, and in the old one."""
    top = old_top = 0
    for cut in group:
        for piece in pieces:
            start, old = top + piece.to * cut.width, old_top + (piece.old or 0) * cut.width
            yield cut, piece, slice(start, start + piece.length * cut.width), slice(old, old + piece.length * cut.width)
        top, old_top = top + cut.width * count, old_top + cut.width * old_count


def _read_rows(matrix: Tensor, vector: Tensor | None, cut: Cut, piece: _Piece, source: WeightSource) -> None:
    span = _span(cut, piece)
    if cut.is_transposed:
        source.fill(matrix.t(), cut.weight, (0, matrix.shape[1]), span)
    else:
        source.fill(matrix, cut.weight, span)
    if vector is not None and cut.bias is not None:
        source.fill(vector, cut.bias, span)


def _span(cut: Cut, piece: _Piece) -> tuple[int, int]:
    return cut.offset + piece.start * cut.width, cut.offset + (piece.start + piece.length) * cut.width


def _pieces(ranges: Ranges, old: Ranges) -> Iterator[_Piece]:
    """Cut the ranges where what is held already begins and ends."""
    to = 0
    for start, stop in ranges:
        at = start
        while at < stop:
            place = 0
            found: int | None = None
            end = stop
            for first, last in old:
                if first <= at < last:
                    found, end = place + at - first, min(stop, last)
                    break
                if at < first:
                    end = min(end, first)
                place += last - first
            yield _Piece(to, found, at, end - at)
            to, at = to + end - at, end
