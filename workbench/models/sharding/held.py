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
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.biases, self.output) if tensor is not None)


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
        return sum(tensor.nbytes for tensor in (self.bias, self.weight, self.shift) if tensor is not None)


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
        inputs.append(torch.empty(rows, hidden_size))
        biases.append(torch.zeros(rows) if any(cut.bias for cut in group) else None)
        before = (0, None, None) if old is None else (old.count, old.inputs[index], old.biases[index])
        _fill(inputs[-1], biases[-1], group, pieces, source, *before)
    output = torch.empty(hidden_size, block.output.width * count)
    held = (0, None, None) if old is None else (old.count, old.output.t(), None)
    _fill(output.t(), None, (block.output,), pieces, source, *held, is_output=True)
    return HeldBlock(ranges=ranges, count=count, inputs=tuple(inputs), biases=tuple(biases), output=output)


def hold_connection(norm: NormLayout, bias: str | None, hidden_size: int, source: WeightSource) -> Connection:
    """Return a norm, and the output bias of the block before it, whole."""

    def read(name: str | None) -> Tensor | None:
        if not name:
            return None
        vector = torch.empty(hidden_size)
        source.fill(vector, name, (0, hidden_size))
        return vector

    return Connection(bias=read(bias), weight=read(norm.weight), shift=read(norm.bias), norm=norm)


def _fill(
    matrix: Tensor,
    bias: Tensor | None,
    cuts: Sequence[Cut],
    pieces: Sequence[_Piece],
    source: WeightSource,
    old_count: int,
    old_matrix: Tensor | None,
    old_bias: Tensor | None,
    *,
    is_output: bool = False,
) -> None:
    """Fill a matrix (sum of the cuts' widths x count, d), one cut below the other, and its bias from what is held or the source."""
    count, hidden_size = sum(piece.length for piece in pieces), matrix.shape[1]
    top = old_top = 0
    for cut in cuts:
        for piece in pieces:
            to = slice(top + piece.to * cut.width, top + (piece.to + piece.length) * cut.width)
            if piece.old is not None and old_matrix is not None:
                there = slice(old_top + piece.old * cut.width, old_top + (piece.old + piece.length) * cut.width)
                matrix[to] = old_matrix[there]
                if bias is not None and old_bias is not None:
                    bias[to] = old_bias[there]
                continue
            span = cut.offset + piece.start * cut.width, cut.offset + (piece.start + piece.length) * cut.width
            if cut.is_transposed == is_output:
                source.fill(matrix[to], cut.weight, span)
            else:
                source.fill(matrix[to].t(), cut.weight, (0, hidden_size), span)
            if bias is not None and cut.bias is not None:
                source.fill(bias[to], cut.bias, span)
        top, old_top = top + cut.width * count, old_top + cut.width * old_count


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
