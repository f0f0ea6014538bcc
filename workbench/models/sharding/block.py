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
from torch import Tensor, nn

from workbench.models.families import Family, Part, layer_paths

Kind = Literal["attention", "cross_attention", "feed_forward"]
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, (1 or n, 1, t, angles) each.  They turn the first 2 x angles channels of a
head."""

_ROLES: dict[Kind, tuple[tuple[tuple[str, ...], ...], str]] = {
    "attention": ((("query", "key", "value"),), "output"),
    "cross_attention": ((("cross_query",), ("cross_key", "cross_value")), "cross_output"),
    "feed_forward": ((("gate", "up"),), "down"),
}
"""The projections of a block by role: groups of inputs, each computed as one matmul, and the output."""
_FUSED = ("query", "key", "value")
_TANH = "gelu_pytorch_tanh"
_SAME = {"gelu_new": _TANH, "gelu_fast": _TANH}
"""transformers' equivalent GELU functions, of which one runs as one kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One projection divided by units (or columns): unit i is rows (of an output: columns) offset + width * [i, i + 1).

    module: its path.  is_transposed: stored as (in, out), like GPT-2's Conv1D.  An output's bias is not divided.
    """

    module: str
    has_bias: bool
    width: int
    offset: int = 0
    is_transposed: bool = False

    @property
    def weight(self) -> str:
        """Return the name of its matrix."""
        return f"{self.module}.weight"

    @property
    def bias(self) -> str | None:
        """Return the name of its bias, None if it has none."""
        return f"{self.module}.bias" if self.has_bias else None

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows of units (or columns) [start, stop)."""
        return self.offset + start * self.width, self.offset + stop * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayout:
    """The names of a norm's parameters; '' for missing ones.  is_rms: no mean is subtracted (Llama, T5)."""

    weight: str
    bias: str
    eps: float
    is_rms: bool

    @property
    def names(self) -> set[str]:
        """Return the names of its parameters."""
        return {self.weight, self.bias} - {""}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What all layers of a stack have in common.

    activation: name of the feed-forward network's activation function.  is_pre_norm: the norm comes before a block, not
    after it.
    """

    num_units: int
    heads_per_unit: int
    head_size: int
    is_causal: bool
    is_pre_norm: bool
    activation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block.

    number, layer: its number and its layer's, counted through all stacks.  stack: 0, or 1 for a decoder.  is_last:
    whether it is the last block of its stack.

    inputs: groups of cuts, each one matmul (attention: query, key and value; cross-attention: query, and key with
    value; feed-forward: gate and up).  scale: of the attention scores.
    """

    number: int
    kind: Kind
    layer: int
    stack: int
    is_last: bool
    inputs: tuple[tuple[Cut, ...], ...]
    output: Cut
    norm: NormLayout
    facts: LayerFacts
    scale: float = 1.0

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return all projections that read the block's input."""
        return tuple(cut for group in self.inputs for cut in group)

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

        queries: (n, heads, q, head size).  keys, values: (n, units, k, head size).
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
class Connection:
    """The parameters between two blocks: the output bias of the block before, and a norm, both undivided.

    bias, weight, shift: (d,).
    """

    norm: NormLayout
    bias: Tensor | None
    weight: Tensor | None
    shift: Tensor | None

    @property
    def nbytes(self) -> int:
        """Return the bytes of bias and norm."""
        return sum(tensor.nbytes for tensor in (self.bias, self.weight, self.shift) if tensor is not None)

    def add(self, total: Tensor, residual: Tensor) -> Tensor:
        """Return the residual stream (n, t, d) after a block.  total: the sum of all partial products."""
        added = total + residual
        return added if self.bias is None else added.add_(self.bias)

    def normalize(self, hidden: Tensor) -> Tensor:
        """Return the norm of hidden states (n, t, d)."""
        if self.norm.is_rms:
            return F.rms_norm(hidden, hidden.shape[-1:], self.weight, self.norm.eps)
        return F.layer_norm(hidden, hidden.shape[-1:], self.weight, self.shift, self.norm.eps)


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


def layer_blocks(
    config: Any,
    family: Family,
    part: Part,
    layer: nn.Module,
    *,
    path: str = "",
    index: int = 0,
    layer_number: int = 0,
    block_number: int = 0,
    is_decoder: bool = False,
    is_last: bool = False,
) -> list[Block]:
    """Return the blocks of layer `index` of a stack.

    part: the stack's description.  layer: its module, also with LoRA inside.  path: the layer's path in the model,
    ending with a dot.
    layer_number, block_number: numbers of the layer and of its first block, counted through all stacks.
    is_last: whether the layer is the last of its stack.
    """
    paths = layer_paths(part, layer)
    modules = {role: original(layer.get_submodule(module_path)) for role, module_path in paths.items()}
    heads = (getattr(config, "decoder_attention_heads", None) if is_decoder else None) or config.num_attention_heads
    num_units = (None if is_decoder else getattr(config, "num_key_value_heads", None)) or heads
    head_size = modules["output"].weight.numel() // config.hidden_size // heads
    is_pre_norm = family.is_pre_norm
    facts = LayerFacts(
        num_units=num_units,
        heads_per_unit=heads // num_units,
        head_size=head_size,
        is_causal=is_decoder or family.is_causal,
        is_pre_norm=bool(getattr(config, is_pre_norm)) if isinstance(is_pre_norm, str) else is_pre_norm,
        activation=getattr(config, family.activation),
    )

    def cut(role: str) -> Cut | None:
        offset, stored = 0, role
        if role not in paths and role in _FUSED:
            offset, stored = _FUSED.index(role) * heads * head_size, "query_key_value"
        if stored not in paths:
            return None
        width = (
            1
            if role in ("gate", "up", "down")
            else head_size * (1 if role.endswith(("key", "value")) else facts.heads_per_unit)
        )
        module = modules[stored]
        return Cut(
            module=f"{path}{paths[stored]}",
            has_bias=module.bias is not None,
            width=width,
            offset=offset,
            is_transposed=not isinstance(module, nn.Linear),
        )

    kinds: tuple[Kind, ...] = (
        ("attention", "feed_forward") if len(part.norms) == 2 else ("attention", "cross_attention", "feed_forward")
    )
    blocks: list[Block] = []
    for kind, norm_path in zip(kinds, part.norms, strict=True):
        groups, role = _ROLES[kind]
        output = cut(role)
        assert output is not None
        blocks.append(
            Block(
                number=block_number + len(blocks),
                kind=kind,
                layer=layer_number,
                stack=int(is_decoder),
                is_last=is_last and kind == "feed_forward",
                inputs=tuple(tuple(piece for entry in group if (piece := cut(entry)) is not None) for group in groups),
                output=output,
                norm=norm_layout(layer.get_submodule(norm_path), f"{path}{norm_path}"),
                facts=facts,
                scale=_attention_scale(config, family, head_size, index),
            )
        )
    return blocks


def _attention_scale(config: Any, family: Family, head_size: int, layer: int) -> float:
    """Return the factor of the attention scores.  GPT-2 can omit the scaling, or also divide by the layer's number."""
    scale = head_size**-0.5 if family.scales_attention and getattr(config, "scale_attn_weights", True) else 1.0
    return scale / (layer + 1) if getattr(config, "scale_attn_by_inverse_layer_idx", False) else scale


def norm_layout(module: Any, path: str) -> NormLayout:
    """Return the layout of a norm at a path."""
    is_rms = not isinstance(module, nn.LayerNorm)
    return NormLayout(
        weight=f"{path}.weight" if module.weight is not None else "",
        bias=f"{path}.bias" if getattr(module, "bias", None) is not None else "",
        eps=module.variance_epsilon if is_rms else module.eps,
        is_rms=is_rms,
    )


def original(module: Any) -> Any:
    """Return the projection inside a module of LoRA, or the module itself."""
    return getattr(module, "base_layer", module)
