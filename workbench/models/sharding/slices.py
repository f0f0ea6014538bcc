"""Which attention units and feed-forward columns a position holds (Galaxy+, section III-B; partitions A and B of Table III)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, StackShape

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges [start, stop), none of them empty, no two overlapping, in the order in which they are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlices:
    """What one device holds of one layer.

    units: of the attention (and the cross-attention).  columns: of the feed-forward network, all of them under scheme 2.
    own_columns: the first so many held columns are the device's part when the layer is cut by columns, as it is while decoding.
    """

    units: Ranges = ()
    columns: Ranges = ()
    own_columns: int = 0

    @property
    def is_empty(self) -> bool:
        """Return whether nothing of the layer is held."""
        return not (self.units or self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """What one device holds of a model: slices of every layer, counted through all stacks.

    has_ends: embedding and head.  connects_all: norms and output biases of all layers are held, not only of those with slices.
    """

    layers: tuple[LayerSlices, ...]
    has_ends: bool = False
    connects_all: bool = True


def size(ranges: Ranges) -> int:
    """Return how many things the ranges name."""
    return sum(stop - start for start, stop in ranges)


def shard_spec(
    plan: InferencePlan, position: int, stacks: Sequence[StackShape], *, held: Sequence[ShardSpec | None] | None = None
) -> ShardSpec:
    """Return what a position of a plan holds.

    stacks: of the model.  held: what the device at each position of the plan holds now, None where nothing; the new ranges keep as much
    of it as can be.  Every position has to be given the same `held`.  A position without tokens holds only its columns under scheme 2 too.
    Raises ConfigError if the plan's partition is not the model's, or the position is not in the plan.
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


def deal(total: int, counts: Sequence[int], held: Sequence[Ranges] | None = None) -> list[Ranges]:
    """Return which of `total` things each position gets, `counts` of them; neighbours stay together where they can.

    held: what each has now.  Each keeps as much of it as its count allows; who holds least chooses first.
    """
    free: Ranges = ((0, total),) if total else ()
    kept: list[Ranges] = [() for _ in counts]
    if held is not None:
        for index in sorted(range(len(counts)), key=lambda index: (size(held[index]), index)):
            kept[index] = _take(_common(held[index], free), counts[index])[0]
            free = _without(free, kept[index])
    for index, count in enumerate(counts):
        more, free = _take(free, count - size(kept[index]))
        kept[index] = _merged((*kept[index], *more))
    return kept


def _slices(
    plan: InferencePlan, position: int, stack: StackShape, before: Sequence[LayerSlices | None] | None, *, is_whole: bool
) -> LayerSlices:
    units, columns = plan.cut(stack)
    had = None if before is None else [layer or LayerSlices() for layer in before]
    own = deal(stack.columns, columns, None if had is None else [_first(layer.columns, layer.own_columns) for layer in had])[position]
    rest = _without(((0, stack.columns),), own) if is_whole else ()
    return LayerSlices(
        units=deal(stack.num_units, units, None if had is None else [layer.units for layer in had])[position],
        columns=own + rest,
        own_columns=size(own),
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


def _first(ranges: Ranges, count: int) -> Ranges:
    return _take(ranges, count)[0]


def _take(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """Cut the first `count` things off."""
    taken: list[tuple[int, int]] = []
    left: list[tuple[int, int]] = []
    for start, stop in ranges:
        middle = min(stop, start + max(0, count))
        count -= middle - start
        taken += [(start, middle)] if middle > start else []
        left += [(middle, stop)] if stop > middle else []
    return tuple(taken), tuple(left)


def _common(ranges: Ranges, others: Ranges) -> Ranges:
    """Return what both have, in ascending order."""
    found = [(max(start, other), min(stop, end)) for start, stop in ranges for other, end in others]
    return tuple(sorted((start, stop) for start, stop in found if start < stop))


def _without(ranges: Ranges, others: Ranges) -> Ranges:
    left: Ranges = ranges
    for other, end in others:
        pieces = [piece for start, stop in left for piece in ((start, min(stop, other)), (max(start, end), stop))]
        left = tuple((start, stop) for start, stop in pieces if start < stop)
    return left


def _merged(ranges: Ranges) -> Ranges:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], stop
        else:
            merged.append((start, stop))
    return tuple(merged)
