"""A model as a list of blocks, with the rows or columns of each matrix that belong to an attention unit or column (Galaxy+, III-B).

A block is an attention, a cross-attention or a feed-forward network.  Blocks are numbered through all layers of all stacks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from workbench.core.inference import StackShape
from workbench.models.families import Family

Kind = Literal["attention", "cross_attention", "feed_forward"]

ITEM_BYTES = 4
"""Bytes of one weight in memory (float32)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One projection divided by units (or columns): unit i is rows (of an output: columns) offset + width * [i, i + 1).

    weight, bias: names of parameters; bias is None if absent (an output's bias is not divided).
    is_transposed: stored as (in, out), like GPT-2's Conv1D.
    """

    weight: str
    bias: str | None
    width: int
    offset: int = 0
    is_transposed: bool = False


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
class Block:
    """One block.  number, layer: counted through all stacks.  stack: 0, or 1 for a decoder.  is_last: of its stack.

    inputs: groups of cuts, each one matmul (attention: query, key and value; cross-attention: query, and key with value;
    feed-forward: gate and up).  scale: of the attention scores.
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

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return all projections that read the block's input."""
        return tuple(cut for group in self.inputs for cut in group)

    def unit_size(self, hidden_size: int) -> int:
        """Return the number of values in one unit or column: its rows of the inputs, their biases, and its columns of the output."""
        return sum(cut.width * (hidden_size + (cut.bias is not None)) for cut in self.cuts) + self.output.width * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """One stack.  shape: its units are groups of heads that share keys and values.

    position_bias: name of T5's table, '' without.  final: norm after the last block, None without.
    """

    shape: StackShape
    is_pre_norm: bool
    position_bias: str
    final: NormLayout | None
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's structure without its weights.

    sizes: parameters by name -> shape, of the base model.  stored_names: names under which a checkpoint's files may store each.
    tied: the first name of every parameter that has several names by the configuration.
    embeddings: of each stack, modules by role, without weights.  rotary: makes the tables of rotary positions, None without.
    max_length: number of tokens in its position table, 0 without one.
    """

    name: str
    config: Any
    family: Family
    blocks: tuple[Block, ...]
    parts: tuple[StackLayout, ...]
    sizes: Mapping[str, tuple[int, ...]]
    stored_names: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    embeddings: tuple[nn.ModuleDict, ...]
    rotary: nn.Module | None
    max_length: int

    @property
    def stacks(self) -> tuple[StackShape, ...]:
        """Return the stacks' shapes."""
        return tuple(part.shape for part in self.parts)

    @property
    def family_name(self) -> str:
        """Return the Hugging Face model type."""
        return self.config.model_type

    @property
    def num_layers(self) -> int:
        """Return the number of layers in all stacks."""
        return sum(shape.num_layers for shape in self.stacks)

    @property
    def hidden_size(self) -> int:
        """Return d."""
        return self.config.hidden_size

    @property
    def has_decoder(self) -> bool:
        """Return whether the model is an encoder-decoder."""
        return len(self.parts) == 2

    @property
    def is_tied(self) -> bool:
        """Return whether the configuration ties the head to the word embedding."""
        return bool(getattr(self.config, "tie_word_embeddings", True))

    @property
    def generates(self) -> bool:
        """Return whether the family has a language model head."""
        return self.has_decoder or self.family.is_causal

    @property
    def output_projection(self) -> str:
        """Return the name of OPT-350m's matrix after the last layer.  '' without one."""
        return "decoder.project_out.weight" if "decoder.project_out.weight" in self.sizes else ""

    @property
    def embedding_names(self) -> set[str]:
        """Return the names of the embeddings' parameters in all stacks."""
        paths = [*self.family.embedding.values(), *([] if self.family.decoder is None else self.family.decoder.embedding.values())]
        return {name for name in self.sizes for path in paths if name.startswith(f"{path}.")}

    @property
    def names(self) -> set[str]:
        """Return the names of all parameters used, except a separate head's."""
        used = self.embedding_names | {part.position_bias for part in self.parts} | {self.output_projection}
        for block in self.blocks:
            used |= {name for cut in (*block.cuts, block.output) for name in (cut.weight, cut.bias or "")} | block.norm.names
        return used.union(*(part.final.names for part in self.parts if part.final)) - {""}

    @property
    def head_count(self) -> int:
        """Return the number of values in the head: OPT-350m's projection, a matrix that is not the word embedding, and a bias."""
        width = self.hidden_size * (not self.is_tied) + self.family.has_head_bias
        return (self.config.vocab_size * width if self.generates else 0) + self.count({self.output_projection} - {""})

    @property
    def end_bytes(self) -> tuple[int, int]:
        """Return the bytes before and after the model's layers, which the first device of a plan stores.

        Before: the embeddings of all stacks and T5's tables of relative positions.  After: the stacks' final norms and the language model
        head, unless the configuration ties it to the word embedding.
        """
        tables = {part.position_bias for part in self.parts} - {""}
        norms: set[str] = set().union(*(part.final.names for part in self.parts if part.final))
        return ITEM_BYTES * self.count(self.embedding_names | tables), ITEM_BYTES * (self.count(norms) + self.head_count)

    def count(self, names: Iterable[str]) -> int:
        """Return the number of values in these parameters.  Tied ones count once."""
        return sum(math.prod(self.sizes[name]) for name in {self.tied.get(name, name) for name in names})

    def last_layer(self, stack: int) -> int:
        """Return the number of a stack's last layer, counted through all stacks."""
        return sum(shape.num_layers for shape in self.stacks[: stack + 1]) - 1

    def layer_blocks(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of a layer in order."""
        return tuple(block for block in self.blocks if block.layer == layer)
