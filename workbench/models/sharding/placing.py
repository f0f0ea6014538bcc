"""Fill a shard from disk, and change what a device holds by reading only what it lacks (Galaxy+, sections III-B and III-E)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.sharding.ends import Ends
from workbench.models.sharding.held import Connection, HeldBlock, hold_block, hold_connection, missing_units, read_vector
from workbench.models.sharding.layout import Block, ModelLayout, StackLayout, block_width, connection_width, norm_names
from workbench.models.sharding.shard import ModelShard
from workbench.models.sharding.slices import LayerSlices, Ranges, ShardSpec, size
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
    return _place(shard.layout, spec, source, shard, separator_id=shard.separator_id, release=release)


def missing_bytes(shard: ModelShard, spec: ShardSpec) -> int:
    """Return the bytes, as they are held, that `reload_shard` would read: of units and columns, norms, and ends."""
    layout, total = shard.layout, 0
    for block in layout.blocks:
        slices, old = spec.layers[block.layer], shard.held.get(block.number)
        count = missing_units(_ranges(block, slices), () if old is None else old.ranges)
        total += count * block_width(block, layout.hidden_size)
        if _connects(spec, slices) and block.number not in shard.connections:
            total += connection_width(block, layout)
    for index, part in enumerate(layout.parts):
        if part.final is not None and shard.finals[index] is None and _connects(spec, spec.layers[layout.last_layer(index)]):
            total += layout.count(norm_names(part.final))
    if spec.has_ends and shard.ends is None:
        total += layout.count(layout.embedding_names) + layout.head_count
    return total * shard.dtype.itemsize


def added_bytes(layout: ModelLayout, spec: ShardSpec, old: ShardSpec | None, itemsize: int = 4) -> int:
    """Return the bytes that a device holds for `spec` beside what it holds for `old`, as long as it keeps both (None: nothing)."""
    total = 0
    for block in layout.blocks:
        slices = spec.layers[block.layer]
        before = None if old is None else old.layers[block.layer]
        if before is None or _ranges(block, slices) != _ranges(block, before):
            total += size(_ranges(block, slices)) * block_width(block, layout.hidden_size)
        if _connects(spec, slices) and not (old is not None and before is not None and _connects(old, before)):
            total += connection_width(block, layout)
    for index, part in enumerate(layout.parts):
        last = layout.last_layer(index)
        if part.final is not None and _connects(spec, spec.layers[last]) and not (old is not None and _connects(old, old.layers[last])):
            total += layout.count(norm_names(part.final))
        if part.position_bias and old is None:
            total += layout.count([part.position_bias])
    if spec.has_ends and not (old is not None and old.has_ends):
        total += layout.count(layout.embedding_names) + layout.head_count
    return total * itemsize


def _place(
    layout: ModelLayout, spec: ShardSpec, source: WeightSource, old: ModelShard | None, *, separator_id: int | None, release: bool
) -> ModelShard:
    held: dict[int, HeldBlock] = {}
    connections: dict[int, Connection] = {}
    for block in layout.blocks:
        slices = spec.layers[block.layer]
        before = None if old is None else old.held.get(block.number)
        held[block.number] = hold_block(block, _ranges(block, slices), layout.hidden_size, source, before)
        if _connects(spec, slices):
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
        separator_id=separator_id,
    )


def _ranges(block: Block, slices: LayerSlices) -> Ranges:
    return slices.columns if block.kind == "feed_forward" else slices.units


def _connects(spec: ShardSpec, slices: LayerSlices) -> bool:
    return spec.connects_all or not slices.is_empty


def _final(
    layout: ModelLayout, spec: ShardSpec, part: StackLayout, index: int, source: WeightSource, old: ModelShard | None
) -> Connection | None:
    """Return the norm behind a stack, where the device connects its last layer."""
    if part.final is None or not _connects(spec, spec.layers[layout.last_layer(index)]):
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
