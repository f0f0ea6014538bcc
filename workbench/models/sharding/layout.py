"""A model as blocks in order, and which rows or columns of which matrices belong to an attention unit or a column (Galaxy+, III-B).

Block B of a model is an attention, a cross-attention or a feed-forward network; they are counted through all layers of all stacks.
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
"""Of one weight as it is held: float32."""


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

    @property
    def names(self) -> set[str]:
        """Return the names of its parameters."""
        return {self.weight, self.bias} - {""}


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

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Return the projections that read the block's input."""
        return tuple(cut for group in self.inputs for cut in group)

    def unit_size(self, hidden_size: int) -> int:
        """Return the numbers of one unit or column: its rows of the inputs, their biases, and its columns of the output."""
        return sum(cut.width * (hidden_size + (cut.bias is not None)) for cut in self.cuts) + self.output.width * hidden_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """One stack.  shape: as planners see it; its units are groups of heads that share keys and values.  group_size: query heads in one.

    position_bias: name of T5's table, '' without.  final: norm behind the last block, None without.
    """

    shape: StackShape
    group_size: int
    head_size: int
    is_gated: bool
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
    max_length: tokens that its table of positions has room for, 0 without one.
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
        """Return the stacks as planners see them."""
        return tuple(part.shape for part in self.parts)

    @property
    def family_name(self) -> str:
        """Return the Hugging Face model type."""
        return self.config.model_type

    @property
    def num_layers(self) -> int:
        """Return the layers of all stacks."""
        return sum(shape.num_layers for shape in self.stacks)

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
    def output_projection(self) -> str:
        """Return the name of OPT-350m's matrix behind the last layer, '' without."""
        return "decoder.project_out.weight" if "decoder.project_out.weight" in self.sizes else ""

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
            used |= {name for cut in (*block.cuts, block.output) for name in (cut.weight, cut.bias or "")} | block.norm.names
        return used.union(*(part.final.names for part in self.parts if part.final)) - {""}

    @property
    def head_count(self) -> int:
        """Return the numbers of the head: OPT-350m's projection, a matrix that is not the word embedding, and a bias."""
        width = self.hidden_size * (not self.is_tied) + self.family.has_head_bias
        return (self.config.vocab_size * width if self.generates else 0) + self.count({self.output_projection} - {""})

    @property
    def end_bytes(self) -> tuple[int, int]:
        """Return the bytes of the model's front and back, which the first device of a plan holds.

        In front: the embeddings of all stacks and T5's tables of relative positions.  Behind: the norms behind the stacks and the
        language model head, where the configuration does not tie it to the word embedding.
        """
        tables = {part.position_bias for part in self.parts} - {""}
        norms: set[str] = set().union(*(part.final.names for part in self.parts if part.final))
        return ITEM_BYTES * self.count(self.embedding_names | tables), ITEM_BYTES * (self.count(norms) + self.head_count)

    def count(self, names: Iterable[str]) -> int:
        """Return the numbers of these parameters; tied ones count once."""
        return sum(math.prod(self.sizes[name]) for name in {self.tied.get(name, name) for name in names})

    def connection_size(self, block: Block) -> int:
        """Return the numbers of a block's norm and output bias."""
        return self.hidden_size * (block.output.bias is not None) + self.count(block.norm.names)

    def last_layer(self, stack: int) -> int:
        """Return a stack's last layer, counted through all stacks."""
        return sum(shape.num_layers for shape in self.stacks[: stack + 1]) - 1

    def layer_blocks(self, layer: int) -> tuple[Block, ...]:
        """Return the blocks of a layer in order."""
        return tuple(block for block in self.blocks if block.layer == layer)
