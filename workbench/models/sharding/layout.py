"""A model as blocks in order, and which rows or columns of which matrices belong to an attention unit or a column (Galaxy+, III-B).

Block B of a model is an attention, a cross-attention or a feed-forward network; they are counted through all layers of all stacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from workbench.core.inference import StackShape
from workbench.models.families import Family

Kind = Literal["attention", "cross_attention", "feed_forward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One projection that is cut by units (or columns): unit i is rows (of an output: columns) offset + width * [i, i + 1).

    weight, bias: names of parameters, bias None if there is none (an output's bias is not cut).
    is_transposed: stored (in, out), as GPT-2's Conv1D does.
    """

    weight: str
    bias: str | None
    width: int
    offset: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayout:
    """A norm by the names of its parameters; '' where it has none.  is_rms: no mean is taken away (Llama, T5)."""

    weight: str
    bias: str
    eps: float
    is_rms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block.  number, layer: counted through all stacks.  stack: 0, or 1 for a decoder.  is_last: of its stack.

    inputs: groups of cuts, each one matrix product (attention: query, key and value; cross-attention: query, and key with value;
    feed-forward: gate and up).  scale: of the attention's scores.
    """

    number: int
    kind: Kind
    layer: int
    stack: int
    is_last: bool
    inputs: tuple[tuple[Cut, ...], ...]
    output: Cut
    norm: NormLayout
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """One stack.  num_units: groups of heads that share keys and values; group_size: query heads in one.

    position_bias: name of T5's table, '' without.  final: norm behind the last block, None without.
    """

    num_layers: int
    num_units: int
    group_size: int
    head_size: int
    columns: int
    is_gated: bool
    is_causal: bool
    is_pre_norm: bool
    position_bias: str
    final: NormLayout | None
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """What is known of a model without its weights.

    sizes: parameters by name -> shape, of the base model.  stored_names: those under which a checkpoint's files may keep each.
    tied: the first name of every parameter that has several by the configuration.
    embeddings: of each stack, modules by role, without weights.  rotary: makes the tables of rotary positions, None without.
    activation: its name in transformers.  has_head_bias: the language model head's.
    output_projection: name of OPT-350m's matrix behind the last layer, '' without.
    max_length: tokens that its table of positions has room for, 0 without one.
    """

    name: str
    config: Any
    family: Family
    blocks: tuple[Block, ...]
    parts: tuple[StackLayout, ...]
    stacks: tuple[StackShape, ...]
    activation: str
    sizes: Mapping[str, tuple[int, ...]]
    stored_names: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    embeddings: tuple[nn.ModuleDict, ...]
    rotary: nn.Module | None
    has_head_bias: bool
    output_projection: str
    max_length: int

    @property
    def family_name(self) -> str:
        """Return the Hugging Face model type."""
        return self.config.model_type

    @property
    def num_layers(self) -> int:
        """Return the layers of all stacks."""
        return sum(part.num_layers for part in self.parts)

    @property
    def hidden_size(self) -> int:
        """Return d."""
        return self.config.hidden_size

    @property
    def has_decoder(self) -> bool:
        """Return whether there are an encoder and a decoder."""
        return len(self.parts) == 2

    @property
    def is_tied(self) -> bool:
        """Return whether the head is the word embedding, as the configuration has it."""
        return bool(getattr(self.config, "tie_word_embeddings", True))

    @property
    def generates(self) -> bool:
        """Return whether the family has a language model head."""
        return self.has_decoder or self.family.is_causal

    @property
    def embedding_names(self) -> set[str]:
        """Return the names of the embeddings' parameters, of all stacks."""
        paths = [*self.family.embedding.values(), *([] if self.family.decoder is None else self.family.decoder.embedding.values())]
        return {name for name in self.sizes for path in paths if name.startswith(f"{path}.")}

    @property
    def names(self) -> set[str]:
        """Return the names of all parameters that are used, but for a head of its own."""
        used = self.embedding_names | {part.position_bias for part in self.parts} | {self.output_projection}
        for block in self.blocks:
            cuts = [cut for group in block.inputs for cut in group] + [block.output]
            used |= {name for cut in cuts for name in (cut.weight, cut.bias or "")} | set(norm_names(block.norm))
        return (used | {name for part in self.parts for name in norm_names(part.final)}) - {""}

    @property
    def head_count(self) -> int:
        """Return the numbers of the head: OPT-350m's projection, a matrix that is not the word embedding, and a bias."""
        own = self.config.vocab_size * (self.hidden_size * (not self.is_tied) + self.has_head_bias) if self.generates else 0
        return own + self.count({self.output_projection} - {""})

    def count(self, names: Iterable[str]) -> int:
        """Return the numbers of these parameters; tied ones count once."""
        return sum(math.prod(self.sizes[name]) for name in {self.tied.get(name, name) for name in names})

    def last_layer(self, stack: int) -> int:
        """Return a stack's last layer, counted through all stacks."""
        return sum(part.num_layers for part in self.parts[: stack + 1]) - 1

    def layer_blocks(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of a layer in order."""
        return tuple(block for block in self.blocks if block.layer == layer)


def shapes_of(layout: ModelLayout, dtype: torch.dtype = torch.float32) -> tuple[StackShape, ...]:
    """Return the stacks as planners see them, with the bytes of weights in `dtype`."""
    firsts = [layout.layer_blocks(layout.blocks[part.first_block].layer) for part in layout.parts]
    return tuple(shape_of(part, blocks, layout.sizes, layout.hidden_size, dtype) for part, blocks in zip(layout.parts, firsts, strict=True))


def norm_names(norm: NormLayout | None) -> Iterator[str]:
    """Return the names of a norm's parameters."""
    if norm is not None:
        yield from (name for name in (norm.weight, norm.bias) if name)


def block_width(block: Block, hidden_size: int) -> int:
    """Return the numbers of one unit or column of a block: its rows of the inputs, their biases, and its columns of the output."""
    cuts = [cut for group in block.inputs for cut in group]
    return sum(cut.width * (hidden_size + (cut.bias is not None)) for cut in cuts) + block.output.width * hidden_size


def connection_width(block: Block, layout: ModelLayout) -> int:
    """Return the numbers of a block's norm and output bias."""
    return _connection_width(block, layout.sizes, layout.hidden_size)


def _connection_width(block: Block, sizes: Mapping[str, tuple[int, ...]], hidden_size: int) -> int:
    return hidden_size * (block.output.bias is not None) + sum(math.prod(sizes[name]) for name in norm_names(block.norm))


def shape_of(
    part: StackLayout, blocks: Sequence[Block], sizes: Mapping[str, tuple[int, ...]], hidden_size: int, dtype: torch.dtype
) -> StackShape:
    """Return a stack's shape from the blocks of one of its layers."""
    one = dtype.itemsize
    held = {"attention": 0, "cross_attention": 0, "feed_forward": 0} | {
        block.kind: one * block_width(block, hidden_size) for block in blocks
    }
    everywhere = sum(_connection_width(block, sizes, hidden_size) for block in blocks)
    return StackShape(
        num_layers=part.num_layers,
        num_units=part.num_units,
        hidden_size=hidden_size,
        columns=part.columns,
        unit_bytes=held["attention"],
        cross_unit_bytes=held["cross_attention"],
        column_bytes=held["feed_forward"],
        layer_bytes=one * everywhere,
        hidden_bytes=one * hidden_size,
        kv_unit_bytes=2 * one * part.head_size,
        has_cross_attention=held["cross_attention"] > 0,
        is_causal=part.is_causal,
    )
