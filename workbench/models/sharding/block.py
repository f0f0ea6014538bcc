"""The blocks of a transformer layer: an attention, a cross-attention or a feed-forward network, and how each is cut and
computed.

An attention is cut by units (groups of heads that share keys and values), a feed-forward network by columns (Galaxy+,
section III-B; Confidant, section 3.3; columns as in Megatron-LM).  Any slice of a block gives a partial product (n, t,
d) without the output's bias.
The connection after the block adds up all partial products.  LayerFacts and Block describe the differences between
families as data.
The weights of a slice are held by held.py, which copies them for inference, or read by trained.py from the modules that
are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["attention", "cross_attention", "feed_forward"]
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, (1 or n, 1, t, angles) each.  They turn the first 2 x angles channels of a
head."""

_TANH = "gelu_pytorch_tanh"
_SAME = {"gelu_new": _TANH, "gelu_fast": _TANH}
"""transformers' equivalent GELU functions, of which one runs as one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One projection divided by units (or columns): unit i is `width` rows (of an output: columns) from offset +
    stride * i on.

    module: its path.  stride: 0 is the width: units follow each other.  is_transposed: stored as (in, out), like
    GPT-2's Conv1D.  An output's bias is not divided.
    """

    module: str
    has_bias: bool
    width: int
    offset: int = 0
    stride: int = 0
    is_transposed: bool = False

    @property
    def weight(self) -> str:
        """Return the name of its matrix."""
        return f"{self.module}.weight"

    @property
    def bias(self) -> str | None:
        """Return the name of its bias, None if it has none."""
        return f"{self.module}.bias" if self.has_bias else None

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of rows of units (or columns) [start, stop), in order."""
        if not self.stride:
            return [(self.offset + start * self.width, self.offset + stop * self.width)]
        tops = (self.offset + unit * self.stride for unit in range(start, stop))
        return [(top, top + self.width) for top in tops]

    def rows(self, start: int, stop: int) -> slice | list[int]:
        """Return the index of the rows of units (or columns) [start, stop)."""
        spans = self.spans(start, stop)
        return slice(*spans[0]) if len(spans) == 1 else [row for span in spans for row in range(*span)]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayout:
    """The names of a norm's parameters; '' for missing ones.

    width: number of channels.  is_rms: no mean is subtracted.  adds_one: it multiplies by 1 + weight.
    """

    weight: str
    bias: str
    width: int
    eps: float
    is_rms: bool
    adds_one: bool

    @property
    def names(self) -> set[str]:
        """Return the names of its parameters."""
        return {self.weight, self.bias} - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """Properties that all layers of a stack share.

    keys_per_unit: heads of keys and values in a unit: 1, or all where a norm over all heads keeps them together.
    activation: name of the feed-forward network's activation function.  is_pre_norm: the norm comes before a block, not
    after it.  is_parallel: both blocks of a layer read the same residual stream.  residual_scale: factor of what a
    block adds.
    """

    num_units: int
    heads_per_unit: int
    keys_per_unit: int
    head_size: int
    is_causal: bool
    is_pre_norm: bool
    is_parallel: bool
    residual_scale: float
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block.

    number, layer: its number and its layer's, counted through all stacks.  stack: 0, or 1 for a decoder.  is_last:
    whether it is the last block of its stack.

    inputs: groups of cuts, each one matmul (attention: query, key and value; cross-attention: query, and key with
    value; feed-forward: gate and up).
    norm: before the block, or after the residual addition; None for none.  output_norm: normalizes what the block adds,
    None for none.  head_norms: norms of queries and keys, empty for none.
    pattern, window, has_rotary: the layer's pattern of attention, its window (0: none), and whether queries and keys
    are turned.  scale: factor of the attention scores.
    """

    number: int
    kind: Kind
    layer: int
    stack: int
    is_last: bool
    inputs: tuple[tuple[Cut, ...], ...]
    output: Cut
    norm: NormLayout | None
    output_norm: NormLayout | None
    head_norms: tuple[NormLayout, ...]
    facts: LayerFacts
    pattern: str
    window: int
    has_rotary: bool
    scale: float

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return all projections that read the block's input."""
        return tuple(cut for group in self.inputs for cut in group)

    @property
    def norms(self) -> tuple[NormLayout, ...]:
        """Return all norms of the block."""
        places = (self.norm, self.output_norm, *self.head_norms)
        return tuple(norm for norm in places if norm is not None)

    @property
    def undivided(self) -> set[str]:
        """Return the names of the parameters that every device with a part of the block has: norms, and the output's
        bias.
        """
        return {self.output.bias or ""}.union(*(norm.names for norm in self.norms)) - {""}

    def unit_size(self, hidden_size: int) -> int:
        """Return the number of values in one unit or column: its rows of the inputs, their biases, and its columns of
        the output.
        """
        return sum(cut.width * (hidden_size + cut.has_bias) for cut in self.cuts) + self.output.width * hidden_size

    def heads(self, projected: Tensor) -> Tensor:
        """Return the heads of a projection (n, t, heads x head size) as a view (n, heads, t, head size)."""
        count, length, width = projected.shape
        size = self.facts.head_size
        return projected.view(count, length, width // size, size).transpose(1, 2)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool) -> Tensor:
        """Return the attention's context, (n, queries, heads x head size).

        queries: (n, heads, q, head size).  keys, values: (n, heads of keys, k, head size).
        """
        count, heads, length, head_size = queries.shape
        if length == 1:  # all queries of a group attend to the same keys, so they are treated like tokens
            queries, is_causal = queries.reshape(count, keys.shape[1], -1, head_size), False
        context = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scale,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return context.reshape(count, heads, length, head_size).transpose(1, 2).reshape(count, length, -1)

    def activate(self, products: Sequence[Tensor]) -> Tensor:
        """Return the activations (n, t, columns) of a feed-forward network's products: gate and up, or up alone."""
        active = _activation(self.facts.activation)(products[0])
        if len(products) == 1:
            return active
        return active * products[1] if torch.is_grad_enabled() else active.mul_(products[1])


@cache
def _activation(name: str) -> Any:
    from transformers.activations import get_activation

    return get_activation(_SAME.get(name, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm with its parameters, None for missing ones.  weight, shift: (width,)."""

    layout: NormLayout
    weight: Tensor | None
    shift: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters that are there."""
        return tuple(tensor for tensor in (self.weight, self.shift) if tensor is not None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the normalised last dimension of hidden states (..., width)."""
        weight, layout = self.weight, self.layout
        if weight is not None and layout.adds_one:
            weight = weight + 1
        if layout.is_rms:
            return F.rms_norm(hidden, hidden.shape[-1:], weight, layout.eps)
        return F.layer_norm(hidden, hidden.shape[-1:], weight, self.shift, layout.eps)

    def of_heads(self, heads: Tensor) -> Tensor:
        """Return normalised heads (n, heads, t, head size): each by itself, or all heads of a token together."""
        if self.layout.width == heads.shape[-1]:
            return self(heads)
        count, number, length, size = heads.shape
        tokens = self(heads.transpose(1, 2).reshape(count, length, number * size))
        return tokens.view(count, length, number, size).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The undivided parameters of a block: its output bias, (d,), and its norms (see Block).

    scale: factor of what the block adds to the residual stream.
    """

    bias: Tensor | None
    norm: Norm | None
    output_norm: Norm | None
    head_norms: tuple[Norm, ...]
    scale: float

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return bias and parameters of norms."""
        norms = (norm for norm in (self.norm, self.output_norm, *self.head_norms) if norm is not None)
        biases = () if self.bias is None else (self.bias,)
        return (*biases, *(tensor for norm in norms for tensor in norm.tensors))

    def add(self, total: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream (n, t, d) after a block.  total: the sum of all partial products."""
        if self.output_norm is None and self.scale == 1.0:
            added = total + residual
            return added if self.bias is None else added.add_(self.bias)
        total = total if self.bias is None else total + self.bias
        total = total if self.output_norm is None else self.output_norm(total)
        return torch.add(residual, total, alpha=self.scale)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return the norm of hidden states (n, t, d); unchanged if the block has none there."""
        return hidden if self.norm is None else self.norm(hidden)

    def turned(self, queries: Tensor, keys: Tensor, rotary: Rotary | None, keys_rotary: Rotary | None) -> list[Tensor]:
        """Return queries and keys (n, heads, t, head size), normalised and turned to their positions."""
        if self.head_norms:
            queries, keys = (norm.of_heads(part) for norm, part in zip(self.head_norms, (queries, keys), strict=True))
        return [turned(queries, rotary), turned(keys, keys_rotary)]


def rotary_of(cosines: Tensor, sines: Tensor) -> Rotary:
    """Return rotary positions from transformers' tables (1 or n, t, 2 x angles), whose second half repeats
    the first.
    """
    half = cosines.shape[-1] // 2
    return cosines[:, None, :, :half], sines[:, None, :, :half]


def turned(heads: Tensor, rotary: Rotary | None) -> Tensor:
    """Return heads (n, heads, t, head size) of queries or keys, turned to their positions; unchanged without rotary
    positions.
    """
    if rotary is None:
        return heads
    cosines, sines = rotary
    half = cosines.shape[-1]
    first, second, rest = heads.split((half, half, heads.shape[-1] - 2 * half), dim=-1)
    halves = (first * cosines).addcmul_(second, sines, value=-1), (second * cosines).addcmul_(first, sines)
    return torch.cat((*halves, rest), dim=-1)
