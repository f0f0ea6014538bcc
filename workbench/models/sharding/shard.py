"""One device's part of a model: slices of blocks, with their operations on tiles of tokens (Galaxy+, section III-B).

Tensors are (n, tokens, width).  Devices only exchange a block's input and its partial product, both d wide.
Call it under torch.inference_mode().
A shard is loaded from disk by its own weights; another shard reads only the missing ones (Galaxy+, section III-E).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.names import FP32_BYTES
from workbench.models.sharding.block import Block, Connection, Norm
from workbench.models.sharding.building import WeightSource
from workbench.models.sharding.held import Ends, HeldBlock, Int4Block, What, hold_block, hold_connection, hold_norm
from workbench.models.sharding.layout import ModelLayout, Ranges, ShardSpec, size
from workbench.models.sharding.run import KeyValueCache, Positions, Run


class ModelShard:
    """One device's weights of a model and the computation with them.

    held, connections: by block number.  finals: the norm after each stack.  tables: T5's position table of each stack.
    """

    def __init__(
        self,
        layout: ModelLayout,
        spec: ShardSpec,
        source: WeightSource,
        old: ModelShard | None = None,
        *,
        release: bool = False,
    ) -> None:
        """Load a shard.  This reads nothing else from the source, and needs extra memory only for rows of one matrix.

        old: the shard of another plan on the same device.  Identical blocks are shared, and existing slices are copied.
        release: free each old block once its replacement exists, so that at most one block is in memory twice; the old
        shard then becomes unusable.  Otherwise the old shard keeps working, even from another thread during the reload.
        """
        self.layout, self.spec, self._blocks = layout, spec, layout.blocks
        self.held: dict[int, HeldBlock] = {}
        self.connections: dict[int, Connection] = {}
        for block in layout.blocks:
            number, old_block = block.number, None if old is None else old.held.get(block.number)
            self.held[number] = hold_block(block, _ranges(block, spec), layout.hidden_size, source, old_block)
            if _connects(spec, block.layer):
                connection = None if old is None else old.connections.get(number)
                self.connections[number] = connection or hold_connection(
                    block, layout.hidden_size, source, self.connections.get(number - 1)
                )
            if release and old is not None:
                old.held.pop(number, None)
        self.finals: list[Norm | None] = []
        self.tables: list[Tensor | None] = []
        for index, part in enumerate(layout.parts):
            final, table = (None, None) if old is None else (old.finals[index], old.tables[index])
            if part.final is None or not _connects(spec, layout.last_layer(index)):
                self.finals.append(None)
            else:
                self.finals.append(final or hold_norm(part.final, source))
            if table is None and part.position_bias:  # whole, because it has only a few KB
                table = torch.empty(layout.sizes[part.position_bias])
                source.fill(table, part.position_bias, (0, len(table)))
            self.tables.append(table)
        self.positions = Positions(layout, tuple(self.tables))
        ends = None if old is None or not spec.has_ends else old.ends
        self.ends: Ends | None = ends or (Ends(layout, source) if spec.has_ends else None)

    def in_int4(self) -> ModelShard:
        """Return the shard with the matrices of its blocks stored in 4 bits; it shares all else with this one."""
        shard: Any = copy(self)
        shard.held = {number: Int4Block(block) for number, block in self.held.items()}
        return shard

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the device's weights."""
        blocks = sum(block.nbytes for block in self.held.values())
        parts = (part for part in (*self.connections.values(), *self.finals) if part is not None)
        connections = sum({id(tensor): tensor.nbytes for part in parts for tensor in part.tensors}.values())
        tables = sum(table.nbytes for table in self.tables if table is not None)
        return blocks + connections + tables + (0 if self.ends is None else self.ends.nbytes)

    # One request.

    def begin(self, length: int, *, target_length: int = 1, cache: KeyValueCache | None = None) -> Run:
        """Return the state for the attention of one request, the same on every device.

        length, target_length: number of tokens in the first and in the second stack.  cache: stores keys and values for
        `decode`.
        """
        lengths = (length, target_length) if self.layout.has_decoder else (length,)
        if cache is not None:
            cache.begin(lengths[-1])
        return Run(lengths=lengths, rotary=self.positions.rotary(length), cache=cache)

    def embed(self, stack: int, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the first residual stream (n, t, d) of a stack (see `Ends.embed`)."""
        assert self.ends is not None, "only the first device of a plan embeds"
        return self.ends.embed(stack, ids, positions)

    def enter(self, number: int, residual: Tensor) -> Tensor:
        """Return the input of a block: the residual stream, normalised in pre-norm stacks."""
        return self.connections[number].normalize(residual) if self._blocks[number].facts.is_pre_norm else residual

    def head(self, hidden: Tensor, output: What = "hidden") -> Tensor:
        """Return final hidden states or logits (see `Ends.head`)."""
        assert self.ends is not None, "only the first device of a plan has a head"
        return self.ends.head(hidden, output)

    # Attention.

    def qkv(self, number: int, hidden: Tensor) -> Tensor:
        """Return queries, keys and values of the own units, concatenated: (n, t, (group + 2) x units x head size).

        For a cross-attention it returns only the queries, (n, s, units x head size).
        """
        slices = self.held[number]
        return F.linear(hidden, slices.inputs[0], slices.biases[0])

    def attend(
        self, number: int, tiles: Sequence[Tensor], run: Run, start: int | None = None, stop: int | None = None
    ) -> Tensor:
        """Return the own units' context (n, stop - start, group x units x head size) for queries [start, stop), by
        default all.

        tiles: qkv of all tokens, in order.  Shared work is done only once, however many calls for parts follow.
        Rows are not divided.
        """
        block = self._blocks[number]
        if run.projected is None or run.projected[0] != number:
            heads, key_heads = self._counts(number)
            queries, keys, values = block.heads(_joined(tiles)).split((heads, key_heads, key_heads), dim=1)
            rotary = run.rotary_of(block)
            queries, keys = self.connections[number].turned(queries, keys, rotary, rotary)
            if run.rows:
                return self._attend_rows(number, queries, keys, values, run.rows)
            if run.cache is not None and block.facts.is_causal:
                run.cache.keep(number, keys, values, grows=True)
            run.projected = number, (queries, keys, values)
        queries, keys, values = run.projected[1]
        first, last = start or 0, queries.shape[2] if stop is None else stop
        return self._attended(number, queries[:, :, first:last], keys, values, run, first, last)

    def _attend_rows(self, number: int, queries: Tensor, keys: Tensor, values: Tensor, rows: Sequence[Run]) -> Tensor:
        """Return the context of each row, which attends to the tokens of its own text."""
        contexts = []
        for index, row in enumerate(rows):
            assert row.cache is not None
            of_row, stop = slice(index, index + 1), row.past + 1
            keys_values = row.cache.extend(number, keys[:, :, of_row], values[:, :, of_row], row.past)
            contexts.append(self._attended(number, queries[:, :, of_row], *keys_values, row, row.past, stop))
        return _joined(contexts)

    def keys_values(self, number: int, projected: Tensor) -> Tensor:
        """Return contiguous keys and values of a qkv tile, which devices exchange under sequence parallelism."""
        heads, _ = self._counts(number)
        return projected[..., heads * self._blocks[number].facts.head_size :].contiguous()

    def attend_own(self, number: int, own_hidden: Tensor, tiles: Sequence[Tensor], run: Run, start: int) -> Tensor:
        """Return the context of only the own tokens, which begin at `start` (sequence parallelism).

        own_hidden: qkv of the own tokens.  tiles: keys and values of all tokens, in order, from `keys_values`.
        """
        block, stop = self._blocks[number], start + own_hidden.shape[1]
        heads, key_heads = self._counts(number)
        rotary = run.rotary_of(block)
        own_rotary = None if rotary is None else (rotary[0][:, :, start:stop], rotary[1][:, :, start:stop])
        queries = block.heads(own_hidden)[:, :heads]
        keys, values = block.heads(_joined(tiles)).split((key_heads, key_heads), dim=1)
        queries, keys = self.connections[number].turned(queries, keys, own_rotary, rotary)
        return self._attended(number, queries, keys, values, run, start, stop)

    def _attended(
        self, number: int, queries: Tensor, keys: Tensor, values: Tensor, run: Run, start: int, stop: int
    ) -> Tensor:
        """Return the context for queries [start, stop) with all tokens' keys and values."""
        block = self._blocks[number]
        if block.facts.is_causal:
            keys, values = keys[:, :, :stop], values[:, :, :stop]
        mask = self.positions.mask(block, self.held[number].ranges, run, start, stop)
        is_causal = block.facts.is_causal and mask is None and not run.past
        return block.attend(queries, keys, values, mask, is_causal=is_causal)

    def cross_keys_values(self, number: int, memory: Tensor) -> Tensor:
        """Return the own units' keys and values (n, t, 2 x units x head size) for the encoder's output."""
        slices = self.held[number]
        return F.linear(memory, slices.inputs[1], slices.biases[1])

    def cross_attend(self, number: int, queries: Sequence[Tensor], keys_values: Sequence[Tensor], run: Run) -> Tensor:
        """Return the own units' context (n, s, units x head size) for these queries.

        keys_values: keys and values of all encoder tokens; of rows they are cached.
        """
        block = self._blocks[number]
        if run.rows:
            heads = block.heads(_joined(queries)).split(1, dim=2)
            keys_values_of_rows = [row.cache.cross_keys_values(number) for row in run.rows if row.cache is not None]
            parts = [
                block.attend(head, *pair, None, is_causal=False)
                for head, pair in zip(heads, keys_values_of_rows, strict=True)
            ]
            return _joined(parts)
        if run.projected is None or run.projected[0] != number:
            run.projected = number, block.heads(_joined(keys_values)).chunk(2, dim=1)
            if run.cache is not None:
                run.cache.keep(number, *run.projected[1], grows=False)
        keys, values = run.projected[1]
        return block.attend(block.heads(_joined(queries)), keys, values, None, is_causal=False)

    def out(self, number: int, context: Tensor) -> Tensor:
        """Return the partial product (n, t, d) of a block's output matrix, without its bias."""
        return F.linear(context, self.held[number].output)

    # Feed-forward network.

    def up(self, number: int, hidden: Tensor, *, is_divided: bool = False) -> Tensor:
        """Return the activations (n, t, columns) of the device's columns.

        is_divided: whether to compute only its part if the layer is divided by columns, even if the device has all
        columns (scheme 2).
        """
        slices, block = self.held[number], self._blocks[number]
        matrix, bias, own_columns = slices.inputs[0], slices.biases[0], self.spec.layers[block.layer].own_columns
        if not is_divided or own_columns == slices.count:
            return block.activate(F.linear(hidden, matrix, bias).chunk(len(block.cuts), dim=-1))
        # Other devices' columns are stored after the own ones, in both gate and up.
        tops = range(0, len(matrix), slices.count)
        return block.activate(
            [
                F.linear(
                    hidden, matrix[top : top + own_columns], None if bias is None else bias[top : top + own_columns]
                )
                for top in tops
            ]
        )

    def down(self, number: int, activations: Tensor) -> Tensor:
        """Return the partial product (n, t, d), without the bias, of the leading columns that have activations."""
        return F.linear(activations, self.held[number].output[:, : activations.shape[-1]])

    # Connection.

    def connect(self, number: int, total: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the next block's input (n, t, d) after a block (Galaxy+ Eq. 4).

        total: the sum of all devices' partial products.  After a stack's last block the second is the stack's final
        hidden state.  Before a block on another device it is not normalised (see enter).
        """
        block, connection = self._blocks[number], self.connections[number]
        added = connection.add(total, residual)
        if not block.facts.is_pre_norm:
            hidden = connection.normalize(added)
            return hidden, self._finish(block.stack, hidden) if block.is_last else hidden
        if block.is_last:
            return added, self._finish(block.stack, added)
        following = self.connections.get(number + 1)
        source = residual if block.facts.is_parallel and block.kind == "attention" else added
        return added, source if following is None else following.normalize(source)

    # Token by token.

    def new_cache(self, capacity: int) -> KeyValueCache:
        """Return an empty cache for `begin`.  Raises ConfigError if the model has fewer positions than `capacity`."""
        if self.layout.max_length and capacity > self.layout.max_length:
            raise ConfigError(
                f"A text of {capacity} tokens was asked of '{self.layout.name}'.",
                f"The model knows {self.layout.max_length} positions.",
                "Shorten the prompt, or ask for fewer tokens.",
            )
        return KeyValueCache(capacity)

    def _counts(self, number: int) -> tuple[int, int]:
        """Return the numbers of heads, and of heads of keys and values, in the device's slice of an attention."""
        units, facts = self.held[number].count, self._blocks[number].facts
        return units * facts.heads_per_unit, units * facts.keys_per_unit

    def _finish(self, stack: int, hidden: Tensor) -> Tensor:
        final = self.finals[stack]
        return hidden if final is None else final(hidden)


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tuple(tiles), dim=1)


def added_bytes(layout: ModelLayout, spec: ShardSpec, old: ShardSpec | None) -> int:
    """Return the extra bytes for `spec` while a device also keeps `old` (None: nothing)."""
    old_parts = {} if old is None else _parts(layout, old)
    return FP32_BYTES * sum(count for part, count in _parts(layout, spec).items() if part not in old_parts)


def _parts(layout: ModelLayout, spec: ShardSpec) -> dict[object, int]:
    """Return the number of values in each part of a shard: a block's slices, its connection, the stacks' final norms,
    tables and ends.
    """
    parts: dict[object, int] = {}
    undivided: set[str] = set()
    for block in layout.blocks:
        ranges = _ranges(block, spec)
        parts["block", block.number, ranges] = size(ranges) * block.unit_size(layout.hidden_size)
        if _connects(spec, block.layer):
            parts["connection", block.number] = layout.count(block.undivided - undivided)
            undivided |= block.undivided
    for index, part in enumerate(layout.parts):
        if part.final is not None and _connects(spec, layout.last_layer(index)):
            parts["final", index] = layout.count(part.final.names)
        if part.position_bias:
            parts["table", index] = layout.count([part.position_bias])
    if spec.has_ends:
        parts["ends"] = layout.count(layout.embedding_names) + layout.head_count
    return parts


def _ranges(block: Block, spec: ShardSpec) -> Ranges:
    slices = spec.layers[block.layer]
    return slices.columns if block.kind == "feed_forward" else slices.units


def _connects(spec: ShardSpec, layer: int) -> bool:
    return spec.connects_all or not spec.layers[layer].is_empty
