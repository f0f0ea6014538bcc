"""Assign attention units and feed-forward columns to positions (Galaxy+, section III-B; partitions A and B of Table III)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, StackShape

Ranges = tuple[tuple[int, int], ...]
"""Half-open, non-empty, non-overlapping ranges [start, stop), in memory order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlices:
    """One device's slices of one layer.

    units: of the attention (and the cross-attention).  columns: of the feed-forward network, all of them under scheme 2.
    own_columns: number of leading columns that are the device's part when the layer is divided by columns, as during decoding.
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

    has_ends: whether it has embedding and head.  connects_all: whether it has norms and output biases of all layers, not only of those
    with slices.
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


def shard_spec(
    plan: InferencePlan, position: int, stacks: Sequence[StackShape], *, held: Sequence[ShardSpec | None] | None = None
) -> ShardSpec:
    """Return the slices for a position of a plan.

    stacks: of the model.  held: the current slices of the device at each position of the plan, None where empty; the new ranges keep as
    much of them as possible.  All positions must get the same `held`.  A position without tokens has only its own columns, even under
    scheme 2.  Raises ConfigError if the plan's partition does not fit the model, or the position is not in the plan.
    """
    if not 0 <= position < plan.num_positions:
        raise ConfigError(
            f"The shard of position {position} was asked for.", f"The plan has {plan.num_positions} positions.", "Ask for one of those."
        )
    num_layers = sum(stack.num_layers for stack in stacks)
    if plan.paradigm == "pipeline":
        return _pipeline_spec(plan, position, stacks, num_layers)
    if plan.paradigm == "sequence":
        whole = tuple(_whole(stack) for stack in stacks for _ in range(stack.num_layers))
        return ShardSpec(layers=whole, has_ends=position == 0)
    _check(plan, stacks[0], num_layers)
    layers: list[LayerSlices] = []
    known: dict[object, LayerSlices] = {}
    for stack in stacks:
        for _ in range(stack.num_layers):
            index = len(layers)
            before = None if held is None else tuple(None if spec is None else spec.layers[index] for spec in held)
            is_whole = bool(plan.schemes) and plan.schemes[index] == 2 and plan.shares[position] > 0
            key = (id(stack), is_whole, before)
            if key not in known:
                known[key] = _slices(plan, position, stack, before, is_whole=is_whole)
            layers.append(known[key])
    computes = position == 0 or not plan.shares or plan.shares[position] > 0
    return ShardSpec(layers=tuple(layers), has_ends=position == 0, connects_all=computes or not all(one.is_empty for one in layers))


def deal(total: int, counts: Sequence[int], held: Sequence[Sequence[int]] | None = None) -> list[list[int]]:
    """Distribute `total` units over the positions by `counts`, ascending.  Neighbouring units stay together where possible.

    held: each position's current units.  A position keeps as many of them as its count allows; the one with the fewest chooses first.
    """
    free = set(range(total))
    kept: list[list[int]] = [[] for _ in counts]
    if held is not None:
        for index in sorted(range(len(counts)), key=lambda index: (len(held[index]), index)):
            kept[index] = sorted(free.intersection(held[index]))[: counts[index]]
            free.difference_update(kept[index])
    left = sorted(free)
    for index, count in enumerate(counts):
        more = max(0, count - len(kept[index]))
        kept[index], left = sorted(kept[index] + left[:more]), left[more:]
    return kept


def _slices(
    plan: InferencePlan, position: int, stack: StackShape, before: Sequence[LayerSlices | None] | None, *, is_whole: bool
) -> LayerSlices:
    units, columns = plan.cut(stack)
    had = None if before is None else [layer or LayerSlices() for layer in before]
    own = deal(stack.columns, columns, None if had is None else [units_of(layer.columns)[: layer.own_columns] for layer in had])[position]
    rest = sorted(set(range(stack.columns)).difference(own)) if is_whole else []
    return LayerSlices(
        units=_ranges_of(deal(stack.num_units, units, None if had is None else [units_of(layer.units) for layer in had])[position]),
        columns=_ranges_of(own) + _ranges_of(rest),
        own_columns=len(own),
    )


def _pipeline_spec(plan: InferencePlan, position: int, stacks: Sequence[StackShape], num_layers: int) -> ShardSpec:
    if sum(plan.layers) != num_layers:
        raise ConfigError(
            f"A pipeline of {plan.layers} layers was asked for.", f"The model has {num_layers}.", "Give each layer to one device."
        )
    start = sum(plan.layers[:position])
    mine = range(start, start + plan.layers[position])
    every = [stack for stack in stacks for _ in range(stack.num_layers)]
    layers = tuple(_whole(stack) if index in mine else LayerSlices() for index, stack in enumerate(every))
    return ShardSpec(layers=layers, has_ends=position == 0, connects_all=False)


def _whole(stack: StackShape) -> LayerSlices:
    return LayerSlices(units=((0, stack.num_units),), columns=((0, stack.columns),), own_columns=stack.columns)


def _check(plan: InferencePlan, stack: StackShape, num_layers: int) -> None:
    for name, found, wanted in (("attention units", plan.units, stack.num_units), ("columns", plan.columns, stack.columns)):
        if sum(found) != wanted:
            raise ConfigError(
                f"A partition {found} of the {name} on {plan.num_positions} devices was asked for.",
                f"The model has {wanted} {name}, the partition {sum(found)}.",
                "Let the parts add up; a device may get none.",
            )
    if plan.paradigm == "hybrid" and len(plan.schemes) != num_layers:
        raise ConfigError(
            f"A plan with schemes for {len(plan.schemes)} layers was asked for.", f"The model has {num_layers}.", "Give one for each layer."
        )
