"""One device's weights of a block: its units or columns, cut out and concatenated (Galaxy+, section III-B, Fig.
6-7).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.families import generating_families
from workbench.models.family import words_of
from workbench.models.layer_inputs import embed, embed_words
from workbench.models.quantization import QuantizationConfig, held_bytes
from workbench.models.quantization.stored import BlockWeight
from workbench.models.sharding.block import Block, Connection, Cut, Norm, NormLayout
from workbench.models.sharding.building import WeightSource
from workbench.models.sharding.layout import ModelLayout, Ranges, size, units_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """One device's slices of a block.

    ranges: ranges of units or columns, in memory order.  count: total number of units or columns.
    inputs: for each group of input projections the (sum of its cuts' widths x count, d) matrix, with the cuts stacked
    as rows.
    biases: (the same rows,), None if no cut of the group has a bias.  output: (d, width x count).
    """

    ranges: Ranges
    count: int
    inputs: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    output: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slices."""
        return sum(tensor.nbytes for tensor in (*self.inputs, *self.biases, self.output) if tensor is not None)


class Int4Block:
    """A HeldBlock whose matrices are stored in 4 bits (PAC+ Eq. 1-2), and dequantized each time they are read.

    It cannot become part of another shard.
    """

    def __init__(self, block: HeldBlock) -> None:
        config = QuantizationConfig(storage="int4")
        self.ranges, self.count, self.biases = block.ranges, block.count, block.biases
        self._inputs = [BlockWeight(matrix, "int4", config) for matrix in block.inputs]
        self._output = BlockWeight(block.output, "int4", config)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Return the input projections' matrices."""
        return tuple(matrix.dequantize() for matrix in self._inputs)

    @property
    def output(self) -> Tensor:
        """Return the output's matrix."""
        return self._output.dequantize()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the slices as they are stored."""
        biases = sum(bias.nbytes for bias in self.biases if bias is not None)
        return biases + sum(held_bytes(matrix) for matrix in (*self._inputs, self._output))


class _Piece(NamedTuple):
    """Copy `length` units to position `to`, from position `old` of the existing slices, or (None) from unit `start` of
    the source.
    """

    to: int
    old: int | None
    start: int
    length: int


def hold_block(
    block: Block, ranges: Ranges, hidden_size: int, source: WeightSource, old: HeldBlock | None = None
) -> HeldBlock:
    """Return the slices of a block.  Parts already in `old` are copied, and only the rest is read.

    Returns `old` itself if it has exactly these slices.
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
        biases.append(torch.zeros(rows) if any(cut.has_bias for cut in group) else None)
        before = (0, None, None) if old is None else (old.count, old.inputs[index], old.biases[index])
        _fill(inputs[-1], biases[-1], group, pieces, source, *before)
    output = torch.empty(hidden_size, block.output.width * count)
    old_slices = (0, None, None) if old is None else (old.count, old.output.t(), None)
    _fill(output.t(), None, (block.output,), pieces, source, *old_slices, is_output=True)
    return HeldBlock(ranges=ranges, count=count, inputs=tuple(inputs), biases=tuple(biases), output=output)


def hold_connection(
    block: Block, hidden_size: int, source: WeightSource, previous: Connection | None = None
) -> Connection:
    """Return the undivided parameters of a block.  previous: the parameters of the block before, whose norm may be the
    same one.
    """
    norm = None if previous is None else previous.norm
    if norm is None or norm.layout != block.norm:
        norm = None if block.norm is None else hold_norm(block.norm, source)
    return Connection(
        bias=_vector(block.output.bias, hidden_size, source),
        norm=norm,
        output_norm=None if block.output_norm is None else hold_norm(block.output_norm, source),
        head_norms=tuple(hold_norm(norm, source) for norm in block.head_norms),
        scale=block.facts.residual_scale,
    )


def hold_norm(layout: NormLayout, source: WeightSource) -> Norm:
    """Return a norm with its parameters."""
    weight, shift = (_vector(name, layout.width, source) for name in (layout.weight, layout.bias))
    return Norm(layout=layout, weight=weight, shift=shift)


def _vector(name: str | None, width: int, source: WeightSource) -> Tensor | None:
    if not name:
        return None
    vector = torch.empty(width)
    source.fill(vector, name, (0, width))
    return vector


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
    """Fill a matrix (sum of the cuts' widths x count, d), with the cuts stacked as rows, and its bias, from old slices
    or the source.
    """
    count, hidden_size = sum(piece.length for piece in pieces), matrix.shape[1]
    top = old_top = 0
    for cut in cuts:
        for piece in pieces:
            to = slice(top + piece.to * cut.width, top + (piece.to + piece.length) * cut.width)
            if piece.old is not None and old_matrix is not None:
                old_rows = slice(old_top + piece.old * cut.width, old_top + (piece.old + piece.length) * cut.width)
                matrix[to] = old_matrix[old_rows]
                if bias is not None and old_bias is not None:
                    bias[to] = old_bias[old_rows]
                continue
            first = to.start
            for span in cut.spans(piece.start, piece.start + piece.length):
                rows = slice(first, first + span[1] - span[0])
                first = rows.stop
                if cut.is_transposed == is_output:
                    source.fill(matrix[rows], cut.weight, span)
                else:
                    source.fill(matrix[rows].t(), cut.weight, (0, hidden_size), span)
                if bias is not None and cut.bias is not None:
                    source.fill(bias[rows], cut.bias, span)
        top, old_top = top + cut.width * count, old_top + cut.width * old_count


def _pieces(ranges: Ranges, old: Ranges) -> Iterator[_Piece]:
    """Split the ranges into runs of units that are copied or read together."""
    old_places = {unit: place for place, unit in enumerate(units_of(old))}

    def offsets(placed: tuple[int, int]) -> tuple[int, int | None]:
        to, unit = placed
        return unit - to, unit - old_places[unit] if unit in old_places else None

    for _, run in groupby(enumerate(units_of(ranges)), offsets):
        (to, start), *others = run
        yield _Piece(to, old_places.get(start), start, 1 + len(others))


What = Literal["hidden", "last", "all"]
"""The requested output: final hidden states, logits of each sample's last token, or logits of all tokens."""


class Ends:
    """The embeddings of all stacks and the head."""

    def __init__(self, layout: ModelLayout, source: WeightSource) -> None:
        self.layout = layout
        self._tensors: dict[str, nn.Parameter] = {}
        paths = (
            [layout.family.embedding]
            if layout.family.decoder is None
            else [layout.family.embedding, layout.family.decoder.embedding]
        )
        self.embeddings = [
            self._filled(modules, places, source) for modules, places in zip(layout.embeddings, paths, strict=True)
        ]
        self.output_projection = self._read(layout.output_projection, source) if layout.output_projection else None
        self.scale = layout.family.head_scale(layout.config)
        self.weight = self._head(source)
        bias = layout.family.head_bias
        has_bias = self.weight is not None and bias and source.shape(bias) is not None
        self.bias = self._read(bias, source).flatten() if has_bias else None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights.  A head tied to the word embedding counts once."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def embed(self, stack: int, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the first hidden states (n, t, d) of token ids (n, t), or of an image's patches (n, t, values).

        positions: (t,) of the tokens; None: they begin at 0.
        """
        modules = self.embeddings[stack]
        if stack == 0:
            return embed(self.layout.family, self.layout.config, modules, ids, positions)
        return embed_words(modules, ids, positions)

    def head(self, hidden: Tensor, output: What = "hidden") -> Tensor:
        """Return the requested output for the last stack's final hidden states (n, t, d).

        Raises ConfigError if logits are requested from a model without a language model head.
        """
        if output == "last":
            hidden = hidden[:, -1]
        if self.output_projection is not None:
            hidden = F.linear(hidden, self.output_projection)
        if output == "hidden":
            return hidden
        if self.weight is None:
            raise ConfigError(
                f"The next word of '{self.layout.name}' was asked for.",
                "It has no language model head.",
                f"Ask for hidden states, or choose a model that generates ({generating_families()}).",
            )
        return F.linear(hidden if self.scale == 1.0 else hidden * self.scale, self.weight, self.bias)

    def _head(self, source: WeightSource) -> Tensor | None:
        layout = self.layout
        if not layout.generates:
            return None
        if source.shape("lm_head.weight") is not None:
            return self._read("lm_head.weight", source)
        return words_of(self.embeddings[-1]).weight if layout.is_tied or source.words_stand_in else None

    def _filled(self, modules: nn.ModuleDict, paths: Any, source: WeightSource) -> dict[str, nn.Module]:
        filled: dict[str, nn.Module] = {}
        for role, meta in modules.items():
            root = copy.deepcopy(meta).eval()
            for path, module in root.named_modules():
                prefix = f"{paths[role]}.{path}".rstrip(".")
                for name in list(dict(module.named_parameters(recurse=False))):
                    module.register_parameter(name, self._read(f"{prefix}.{name}", source))
            filled[role] = root
        return filled

    def _read(self, name: str, source: WeightSource) -> nn.Parameter:
        first = self.layout.tied.get(name)
        if first is not None and source.is_same(name, first):
            return self._read(first, source)
        if name not in self._tensors:
            shape = source.shape(name)
            assert shape is not None, name
            tensor = torch.empty(shape)
            source.fill(tensor, name, (0, shape[0]))
            self._tensors[name] = nn.Parameter(tensor, requires_grad=False)
        return self._tensors[name]
