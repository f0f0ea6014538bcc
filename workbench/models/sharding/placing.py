"""Fill a shard from disk, and change what a device holds by reading only what it lacks (Galaxy+, sections III-B and III-E)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.sharding.ends import Ends
from workbench.models.sharding.held import Connection, HeldBlock, hold_block, hold_connection, missing_units, read_vector
from workbench.models.sharding.layout import Block, ModelLayout, StackLayout
from workbench.models.sharding.shard import ModelShard
from workbench.models.sharding.slices import LayerSlices, Ranges, ShardSpec
from workbench.models.sharding.weights import WeightSource


def load_shard(layout: ModelLayout, spec: ShardSpec, source: WeightSource, *, separator_id: int | None = None) -> ModelShard:
    """Return what a position holds, read from the source: nothing else is read, or held for a moment but the rows of one matrix.

    separator_id: the token after which a second text begins, for families with token types.
    """
    return _place(layout, spec, source, None, separator_id=separator_id, release=False)


def reload_shard(shard: ModelShard, spec: ShardSpec, source: WeightSource, *, release: bool = False) -> ModelShard:
    """Return the shard of another plan on the same device: blocks that are the same are shared, slices held already are copied.

    release: give each block of the old shard back as soon as its successor stands, so that no more than one is held twice; the old shard
    cannot be used any more.  Without it the old shard goes on working, and may from another thread while this one reads.
    """
    separator_id = None if shard.ends is None else shard.ends.separator_id
    return _place(shard.layout, spec, source, shard, separator_id=separator_id, release=release)


def missing_bytes(shard: ModelShard, spec: ShardSpec) -> int:
    """Return the bytes of units and columns, as they are held, that `reload_shard` would read (norms and ends not counted)."""
    total = 0
    for block in shard.layout.blocks:
        old = shard.held.get(block.number)
        count = missing_units(_ranges(block, spec.layers[block.layer]), () if old is None else old.ranges)
        widths = sum(cut.width * (shard.layout.hidden_size + (cut.bias is not None)) for group in block.inputs for cut in group)
        total += count * (widths + block.output.width * shard.layout.hidden_size) * shard.dtype.itemsize
    return total


def _place(
    layout: ModelLayout, spec: ShardSpec, source: WeightSource, old: ModelShard | None, *, separator_id: int | None, release: bool
) -> ModelShard:
    held: dict[int, HeldBlock] = {}
    connections: dict[int, Connection] = {}
    for block in layout.blocks:
        slices = spec.layers[block.layer]
        before = None if old is None else old.held.get(block.number)
        held[block.number] = hold_block(block, _ranges(block, slices), layout.hidden_size, source, before)
        if spec.connects_all or not slices.is_empty:
            known = None if old is None else old.connections.get(block.number)
            connections[block.number] = known or hold_connection(block, layout.hidden_size, source)
        if release and old is not None:
            old.held.pop(block.number, None)
    ends = None
    if spec.has_ends:
        ends = Ends(layout, source, separator_id) if old is None or old.ends is None else old.ends
    return ModelShard(
        layout,
        spec,
        held=held,
        connections=connections,
        finals=tuple(_final(layout, spec, part, index, source, old) for index, part in enumerate(layout.parts)),
        tables=tuple(_table(layout, part, index, source, old) for index, part in enumerate(layout.parts)),
        ends=ends,
        dtype=source.dtype,
    )


def _ranges(block: Block, slices: LayerSlices) -> Ranges:
    return slices.columns if block.kind == "feed_forward" else slices.units


def _final(
    layout: ModelLayout, spec: ShardSpec, part: StackLayout, index: int, source: WeightSource, old: ModelShard | None
) -> Connection | None:
    """Return the norm behind a stack, where the device connects its last layer."""
    last = max(block.layer for block in layout.blocks if block.stack == index)
    if part.final is None or not (spec.connects_all or not spec.layers[last].is_empty):
        return None
    if old is not None and old.finals[index] is not None:
        return old.finals[index]
    weight, shift = (read_vector(name, layout.hidden_size, source) for name in (part.final.weight, part.final.bias))
    return Connection(bias=None, weight=weight, shift=shift, norm=part.final)


def _table(layout: ModelLayout, part: StackLayout, index: int, source: WeightSource, old: ModelShard | None) -> Tensor | None:
    """Return T5's table of relative positions, whole: it is a few KB."""
    if not part.position_bias:
        return None
    if old is not None:
        return old.tables[index]
    shape = layout.sizes[part.position_bias]
    table = torch.empty(shape, dtype=source.dtype)
    source.fill(table, part.position_bias, (0, shape[0]))
    return table
