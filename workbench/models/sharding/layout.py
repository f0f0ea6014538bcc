"""A model as a list of blocks (see block.py), numbered through all layers of all stacks (Galaxy+, section III-B).

A shard is the part of each layer that a position of a plan has: partitions A and B of Table III.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.names import FP32_BYTES
from workbench.models.family import Family
from workbench.models.sharding.block import Block, NormLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StackLayout:
    """One stack.

    shape: its units are groups of heads that share keys and values.

    position_bias: name of T5's table, '' for other families.  final: norm after the last block, or None.
    """

    shape: StackShape
    position_bias: str
    final: NormLayout | None
    first_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutFacts:
    """The fields of a ModelLayout that planners need.  end_bytes: see there."""

    stacks: tuple[StackShape, ...]
    end_bytes: tuple[int, int]
    max_length: int

    @property
    def has_decoder(self) -> bool:
        """Return whether the model is an encoder-decoder."""
        return len(self.stacks) == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayout:
    """A model's structure without its weights.

    sizes: parameters by name -> shape, of the base model.  stored_names: names under which a checkpoint's files may
    store each.
    tied: the first name of every parameter that has several names by the configuration.
    embeddings: each stack's modules by role, without weights.  rotary: makes the tables of rotary positions; None for
    families without them.
    max_length: number of tokens in its position table, 0 if it has none.
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
        return self.family.generates

    @property
    def output_projection(self) -> str:
        """Return the name of a matrix between the last layer and the head, '' for models without it."""
        name = f"{self.family.head_projection}.weight"
        return name if name in self.sizes else ""

    @property
    def embedding_names(self) -> set[str]:
        """Return the names of the embeddings' parameters in all stacks."""
        paths = [
            *self.family.embedding.values(),
            *([] if self.family.decoder is None else self.family.decoder.embedding.values()),
        ]
        return {name for name in self.sizes for path in paths if name.startswith(f"{path}.")}

    @property
    def names(self) -> set[str]:
        """Return the names of all parameters used, except a separate head's."""
        used_names = self.embedding_names | {part.position_bias for part in self.parts} | {self.output_projection}
        for block in self.blocks:
            used_names |= {
                name for cut in (*block.cuts, block.output) for name in (cut.weight, cut.bias or "")
            } | block.undivided
        return used_names.union(*(part.final.names for part in self.parts if part.final)) - {""}

    @property
    def head_count(self) -> int:
        """Return the number of values in the head: OPT-350m's projection, a matrix that is not the word embedding, and
        a bias.
        """
        width = self.hidden_size * (not self.is_tied) + bool(self.family.head_bias)
        return (self.config.vocab_size * width if self.generates else 0) + self.count({self.output_projection} - {""})

    @property
    def end_bytes(self) -> tuple[int, int]:
        """Return the bytes before and after the model's layers, which the first device of a plan stores.

        Before: the embeddings of all stacks and T5's tables of relative positions.  After: the stacks' final norms and
        the language model head, unless the configuration ties it to the word embedding.
        """
        tables = {part.position_bias for part in self.parts} - {""}
        norms: set[str] = set().union(*(part.final.names for part in self.parts if part.final))
        return FP32_BYTES * self.count(self.embedding_names | tables), FP32_BYTES * (
            self.count(norms) + self.head_count
        )

    def count(self, names: Iterable[str]) -> int:
        """Return the number of values in these parameters.  Tied ones count once."""
        return sum(math.prod(self.sizes[name]) for name in {self.tied.get(name, name) for name in names})

    def first_layers(self, count: int) -> ModelLayout:
        """Return the layout of a model that ends after `count` layers, an encoder-decoder's after as many of its
        decoder.  Raises ConfigError unless it is shorter.
        """
        *before, part = self.parts
        if not 0 < count < part.shape.num_layers:
            raise ConfigError(
                f"The first {count} layers of '{self.name}' were asked for.",
                f"It has {part.shape.num_layers}.",
                "Ask for fewer.",
            )
        last = self.num_layers - part.shape.num_layers + count - 1
        blocks = [block for block in self.blocks if block.layer <= last]
        blocks[-1] = replace(blocks[-1], is_last=True)
        shortened = replace(part, shape=replace(part.shape, num_layers=count))
        return replace(self, blocks=tuple(blocks), parts=(*before, shortened))

    def last_layer(self, stack: int) -> int:
        """Return the number of a stack's last layer, counted through all stacks."""
        return sum(shape.num_layers for shape in self.stacks[: stack + 1]) - 1


Ranges = tuple[tuple[int, int], ...]
"""Half-open, non-empty, non-overlapping ranges [start, stop), in memory order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlices:
    """One device's slices of one layer.

    units: ranges of units of the attention (and the cross-attention).  columns: ranges of columns of the feed-forward
    network, all of them under scheme 2.
    own_columns: number of leading columns that are the device's part when the layer is divided by columns, as during
    decoding.
    """

    units: Ranges = ()
    columns: Ranges = ()
    own_columns: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether the device has no slice of the layer."""
        return not (self.units or self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """One device's part of a model: slices of every layer, counted through all stacks.

    has_ends: whether it has embedding and head.  connects_all: whether it has norms and output biases of all layers,
    not only of those with slices.
    """

    layers: tuple[LayerSlices, ...]
    has_ends: bool = False
    connects_all: bool = True


def size(ranges: Ranges) -> int:
    """Return the number of units (or columns) in the ranges."""
    return sum(stop - start for start, stop in ranges)


def units_of(ranges: Ranges) -> list[int]:
    """Return the units in the ranges, in order."""
    return [unit for start, stop in ranges for unit in range(start, stop)]


def _ranges_of(units: Sequence[int]) -> Ranges:
    ranges: list[tuple[int, int]] = []
    for unit in units:
        if ranges and ranges[-1][1] == unit:
            ranges[-1] = ranges[-1][0], unit + 1
        else:
            ranges.append((unit, unit + 1))
    return tuple(ranges)


def whole_layers(stacks: Sequence[StackShape]) -> tuple[LayerSlices, ...]:
    """Return the slices of a device that has all layers of a model."""
    return tuple(
        LayerSlices(units=((0, shape.num_units),), columns=((0, shape.columns),), own_columns=shape.columns)
        for shape in stacks
        for _ in range(shape.num_layers)
    )


def shard_spec(
    plan: InferencePlan,
    position: int,
    stacks: Sequence[StackShape],
    *,
    old_specs: Sequence[ShardSpec | None] | None = None,
) -> ShardSpec:
    """Return the slices for a position of a plan.

    stacks: the shape of each stack of the model.  old_specs: the current slices of the device at each position, None
    where empty; the new ranges keep as much of them as possible.  All positions must get the same `old_specs`.  A
    position without tokens has only its own columns, even under scheme 2.
    """
    if plan.paradigm in ("pipeline", "sequence"):
        is_pipeline, every = plan.paradigm == "pipeline", whole_layers(stacks)
        start = sum(plan.layers[:position])
        mine = range(start, start + plan.layers[position]) if is_pipeline else range(len(every))
        held_layers = tuple(layer if index in mine else LayerSlices() for index, layer in enumerate(every))
        return ShardSpec(layers=held_layers, has_ends=position == 0, connects_all=not is_pipeline)
    layers: list[LayerSlices] = []
    slices_by_key: dict[object, LayerSlices] = {}
    for stack in stacks:
        for _ in range(stack.num_layers):
            index = len(layers)
            before = (
                None if old_specs is None else tuple(None if spec is None else spec.layers[index] for spec in old_specs)
            )
            is_whole = bool(plan.schemes) and plan.schemes[index] == 2 and plan.shares[position] > 0
            key = (id(stack), is_whole, before)
            if key not in slices_by_key:
                slices_by_key[key] = _slices(plan, position, stack, before, is_whole=is_whole)
            layers.append(slices_by_key[key])
    return ShardSpec(layers=tuple(layers), has_ends=position == 0, connects_all=plan.takes_part(position))


def deal(total: int, counts: Sequence[int], owned: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """Distribute `total` units over the positions by `counts`, ascending.  Neighbouring units stay together where
    possible.

    owned: each position's current units.  A position keeps as many of them as its count allows; the one with the fewest
    chooses first.
    """
    free = set(range(total))
    dealt: list[list[int]] = [[] for _ in counts]
    if owned is not None:
        for index in sorted(range(len(counts)), key=lambda index: (len(owned[index]), index)):
            dealt[index] = sorted(free.intersection(owned[index]))[: counts[index]]
            free.difference_update(dealt[index])
    undealt = sorted(free)
    for index, count in enumerate(counts):
        more = max(0, count - len(dealt[index]))
        dealt[index], undealt = sorted(dealt[index] + undealt[:more]), undealt[more:]
    return dealt


def _slices(
    plan: InferencePlan,
    position: int,
    stack: StackShape,
    before: Sequence[LayerSlices | None] | None,
    *,
    is_whole: bool,
) -> LayerSlices:
    units, columns = plan.cut(stack)
    previous = None if before is None else [layer or LayerSlices() for layer in before]
    own_columns = deal(
        stack.columns,
        columns,
        None if previous is None else [units_of(layer.columns)[: layer.own_columns] for layer in previous],
    )[position]
    rest = sorted(set(range(stack.columns)).difference(own_columns)) if is_whole else []
    return LayerSlices(
        units=_ranges_of(
            deal(stack.num_units, units, None if previous is None else [units_of(layer.units) for layer in previous])[
                position
            ]
        ),
        columns=_ranges_of(own_columns) + _ranges_of(rest),
        own_columns=len(own_columns),
    )
