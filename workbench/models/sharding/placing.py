"""Load a shard from disk, and move to another shard by reading only the missing weights (Galaxy+, sections III-B and III-E)."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.sharding.building import WeightSource
from workbench.models.sharding.held import Connection, Ends, HeldBlock, hold_block, hold_connection
from workbench.models.sharding.layout import ITEM_BYTES, Block, ModelLayout
from workbench.models.sharding.shard import ModelShard
from workbench.models.sharding.slices import Ranges, ShardSpec, size


def load_shard(layout: ModelLayout, spec: ShardSpec, source: WeightSource, *, separator_id: int | None = None) -> ModelShard:
    """Load the shard of a position from the source.  This reads nothing else, and needs extra memory only for rows of one matrix.

    separator_id: the token that starts a second text, for families with token types.
    """
    return _place(layout, spec, source, None, separator_id=separator_id, release=False)


def reload_shard(shard: ModelShard, spec: ShardSpec, source: WeightSource, *, release: bool = False) -> ModelShard:
    """Return the shard of another plan on the same device.  Identical blocks are shared, and existing slices are copied.

    release: free each old block once its replacement exists, so that at most one block is in memory twice; the old shard then becomes
    unusable.  Without it the old shard keeps working, even from another thread during the reload.
    """
    return _place(shard.layout, spec, source, shard, separator_id=shard.separator_id, release=release)


def added_bytes(layout: ModelLayout, spec: ShardSpec, old: ShardSpec | None) -> int:
    """Return the extra bytes for `spec` while a device also keeps `old` (None: nothing)."""
    known = {} if old is None else _parts(layout, old)
    return ITEM_BYTES * sum(count for part, count in _parts(layout, spec).items() if part not in known)


def _parts(layout: ModelLayout, spec: ShardSpec) -> dict[object, int]:
    """Return the number of values in each part of a shard: a block's slices, its connection, the stacks' final norms, tables and ends."""
    parts: dict[object, int] = {}
    for block in layout.blocks:
        ranges = _ranges(block, spec)
        parts["block", block.number, ranges] = size(ranges) * block.unit_size(layout.hidden_size)
        if _connects(spec, block.layer):
            bias = layout.hidden_size * (block.output.bias is not None)
            parts["connection", block.number] = bias + layout.count(block.norm.names)
    for index, part in enumerate(layout.parts):
        if part.final is not None and _connects(spec, layout.last_layer(index)):
            parts["final", index] = layout.count(part.final.names)
        if part.position_bias:
            parts["table", index] = layout.count([part.position_bias])
    if spec.has_ends:
        parts["ends"] = layout.count(layout.embedding_names) + layout.head_count
    return parts


def _place(
    layout: ModelLayout, spec: ShardSpec, source: WeightSource, old: ModelShard | None, *, separator_id: int | None, release: bool
) -> ModelShard:
    held: dict[int, HeldBlock] = {}
    connections: dict[int, Connection] = {}
    for block in layout.blocks:
        number = block.number
        held[number] = hold_block(block, _ranges(block, spec), layout.hidden_size, source, None if old is None else old.held.get(number))
        if _connects(spec, block.layer):
            known = None if old is None else old.connections.get(number)
            connections[number] = known or hold_connection(block.norm, block.output.bias, layout.hidden_size, source)
        if release and old is not None:
            old.held.pop(number, None)
    finals: list[Connection | None] = []
    tables: list[Tensor | None] = []
    for index, part in enumerate(layout.parts):
        final = None if old is None else old.finals[index]
        if part.final is None or not _connects(spec, layout.last_layer(index)):
            finals.append(None)
        else:
            finals.append(final or hold_connection(part.final, None, layout.hidden_size, source))
        table = None if old is None else old.tables[index]
        if table is None and part.position_bias:  # whole, because it has only a few KB
            table = torch.empty(layout.sizes[part.position_bias])
            source.fill(table, part.position_bias, (0, len(table)))
        tables.append(table)
    ends = None if old is None or not spec.has_ends else old.ends
    return ModelShard(
        layout,
        spec,
        held=held,
        connections=connections,
        finals=tuple(finals),
        tables=tuple(tables),
        ends=ends or (Ends(layout, source, separator_id) if spec.has_ends else None),
        separator_id=separator_id,
    )


def _ranges(block: Block, spec: ShardSpec) -> Ranges:
    slices = spec.layers[block.layer]
    return slices.columns if block.kind == "feed_forward" else slices.units


def _connects(spec: ShardSpec, layer: int) -> bool:
    return spec.connects_all or not spec.layers[layer].is_empty
