"""A block's weights as one device holds them: its units or columns, cut out and put side by side (Galaxy+, section III-B, Fig. 6-7)."""

from __future__ import annotations

from collections.abc import Iterator
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
    pieces = list(_pieces(ranges, () if old is None else old.ranges))
    count = size(ranges)
    inputs: list[Tensor] = []
    biases: list[Tensor | None] = []
    for index, group in enumerate(block.inputs):
        width = sum(cut.width for cut in group)
        matrix = torch.empty(width * count, hidden_size, dtype=source.dtype)
        vector = torch.zeros(width * count, dtype=source.dtype) if any(cut.bias for cut in group) else None
        top = old_top = 0
        for cut in group:
            for piece in pieces:
                to = slice(top + piece.to * cut.width, top + (piece.to + piece.length) * cut.width)
                if piece.old is not None and old is not None:
                    there = slice(old_top + piece.old * cut.width, old_top + (piece.old + piece.length) * cut.width)
                    matrix[to] = old.inputs[index][there]
                    before = old.biases[index]
                    if vector is not None and before is not None:
                        vector[to] = before[there]
                    continue
                span = _span(cut, piece)
                _fill_rows(matrix[to], cut, span, hidden_size, source)
                if vector is not None and cut.bias is not None:
                    source.fill(vector[to], cut.bias, span)
            top += cut.width * count
            old_top += cut.width * (0 if old is None else old.count)
        inputs.append(matrix)
        biases.append(vector)
    cut = block.output
    output = torch.empty(hidden_size, cut.width * count, dtype=source.dtype)
    for piece in pieces:
        part = output[:, piece.to * cut.width : (piece.to + piece.length) * cut.width]
        if piece.old is not None and old is not None:
            part.copy_(old.output[:, piece.old * cut.width : (piece.old + piece.length) * cut.width])
        elif cut.is_transposed:
            source.fill(part.t(), cut.weight, _span(cut, piece))
        else:
            source.fill(part, cut.weight, (0, hidden_size), _span(cut, piece))
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


def _fill_rows(out: Tensor, cut: Cut, span: tuple[int, int], hidden_size: int, source: WeightSource) -> None:
    if cut.is_transposed:
        source.fill(out.t(), cut.weight, (0, hidden_size), span)
    else:
        source.fill(out, cut.weight, span)


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
