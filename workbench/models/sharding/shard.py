"""One device's part of a model: slices of blocks, with their operations on tiles of tokens (Galaxy+, section III-B).

Tensors are (n, tokens, width).  Devices only exchange a block's input and its partial product, both d wide.
Call it under torch.inference_mode().
A shard is loaded from disk by its own weights; another shard reads only the missing ones (Galaxy+, section III-E).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.models.sharding.building import WeightSource
from workbench.models.sharding.held import Connection, Ends, HeldBlock, What, hold_block, hold_connection
from workbench.models.sharding.layout import ITEM_BYTES, Block, ModelLayout, Ranges, ShardSpec, StackLayout, size
from workbench.models.sharding.run import KeyValueCache, Positions, Run, attend, rotate, split_heads

_TANH = "gelu_pytorch_tanh"
"""The one of transformers' equivalent GELU functions that runs as one kernel."""


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
        release: free each old block once its replacement exists, so that at most one block is in memory twice; the old shard then becomes
        unusable.  Without it the old shard keeps working, even from another thread during the reload.
        """
        from transformers.activations import get_activation

        self.layout, self.spec, self._blocks = layout, spec, layout.blocks
        name = getattr(layout.config, layout.family.activation)
        self._activation = get_activation({"gelu_new": _TANH, "gelu_fast": _TANH}.get(name, name))
        self.held: dict[int, HeldBlock] = {}
        self.connections: dict[int, Connection] = {}
        for block in layout.blocks:
            number, known = block.number, None if old is None else old.held.get(block.number)
            self.held[number] = hold_block(block, _ranges(block, spec), layout.hidden_size, source, known)
            if _connects(spec, block.layer):
                connection = None if old is None else old.connections.get(number)
                self.connections[number] = connection or hold_connection(block.norm, block.output.bias, layout.hidden_size, source)
            if release and old is not None:
                old.held.pop(number, None)
        self.finals: list[Connection | None] = []
        self.tables: list[Tensor | None] = []
        for index, part in enumerate(layout.parts):
            final, table = (None, None) if old is None else (old.finals[index], old.tables[index])
            if part.final is None or not _connects(spec, layout.last_layer(index)):
                self.finals.append(None)
            else:
                self.finals.append(final or hold_connection(part.final, None, layout.hidden_size, source))
            if table is None and part.position_bias:  # whole, because it has only a few KB
                table = torch.empty(layout.sizes[part.position_bias])
                source.fill(table, part.position_bias, (0, len(table)))
            self.tables.append(table)
        self.positions = Positions(layout, tuple(self.tables))
        ends = None if old is None or not spec.has_ends else old.ends
        self.ends: Ends | None = ends or (Ends(layout, source) if spec.has_ends else None)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the device's weights."""
        blocks = sum(held.nbytes for held in self.held.values())
        connections = sum(one.nbytes for one in (*self.connections.values(), *self.finals) if one is not None)
        tables = sum(table.nbytes for table in self.tables if table is not None)
        return blocks + connections + tables + (0 if self.ends is None else self.ends.nbytes)

    # One request.

    def begin(self, length: int, *, target_length: int = 1, cache: KeyValueCache | None = None) -> Run:
        """Return the state for the attention of one request, the same on every device.

        length, target_length: number of tokens in the first and in the second stack.  cache: stores keys and values for `decode`.
        """
        lengths = (length, target_length) if self.layout.has_decoder else (length,)
        if cache is not None:
            cache.begin(lengths[-1])
        return Run(lengths=lengths, rotary=self.positions.rotary(length), cache=cache)

    def embed(self, stack: int, ids: Tensor, offset: int = 0) -> Tensor:
        """Return the first residual stream (n, t, d) of a stack (see `Ends.embed`)."""
        assert self.ends is not None, "only the first device of a plan embeds"
        return self.ends.embed(stack, ids, offset)

    def enter(self, number: int, residual: Tensor) -> Tensor:
        """Return the input of a block: the residual stream, normalised in pre-norm stacks."""
        is_pre_norm = self.layout.parts[self._blocks[number].stack].is_pre_norm
        return self._norm(self.connections[number], residual) if is_pre_norm else residual

    def head(self, hidden: Tensor, what: What = "hidden") -> Tensor:
        """Return final hidden states or logits (see `Ends.head`)."""
        assert self.ends is not None, "only the first device of a plan has a head"
        return self.ends.head(hidden, what)

    # Attention.

    def qkv(self, number: int, hidden: Tensor) -> Tensor:
        """Return queries, keys and values of the own units, concatenated: (n, t, (group + 2) x units x head size).

        For a cross-attention only the queries, (n, s, units x head size).
        """
        held = self.held[number]
        return F.linear(hidden, held.inputs[0], held.biases[0])

    def attend(self, number: int, tiles: Sequence[Tensor], run: Run, start: int | None = None, stop: int | None = None) -> Tensor:
        """Return the own units' context (n, stop - start, group x units x head size) for queries [start, stop), by default all.

        tiles: qkv of all tokens, in order.  Shared work is done only once, however many calls for parts follow.
        """
        held, _, part = self._block(number)
        if run.projected is None or run.projected[0] != number:
            projected = _joined(tiles)
            heads = held.count * part.shape.heads_per_unit
            if run.rotary is not None and held.count:
                projected = rotate(projected, heads + held.count, run.rotary, part.shape.head_size)
            queries, keys, values = split_heads(projected, (heads, held.count, held.count), part.shape.head_size)
            if run.cache is not None and run.past:
                keys, values = run.cache.extend(number, keys, values)
            elif run.cache is not None and part.shape.is_causal:
                run.cache.keep(number, keys, values, grows=True)
            run.projected = number, (queries, keys, values)
        queries, keys, values = run.projected[1]
        first, last = run.past if start is None else start, run.past + queries.shape[2] if stop is None else stop
        return self._attended(number, queries[:, :, first - run.past : last - run.past], keys, values, run, first, last)

    def keys_values(self, number: int, projected: Tensor) -> Tensor:
        """Return contiguous keys and values of a qkv tile, which devices exchange under sequence parallelism."""
        part = self.layout.parts[self._blocks[number].stack]
        return projected[..., self.held[number].count * part.shape.heads_per_unit * part.shape.head_size :].contiguous()

    def attend_own(self, number: int, own: Tensor, tiles: Sequence[Tensor], run: Run, start: int) -> Tensor:
        """Return the context of only the own tokens, which begin at `start` (sequence parallelism).

        own: qkv of the own tokens.  tiles: keys and values of all tokens, in order, from `keys_values`.
        """
        held, _, part = self._block(number)
        heads, stop = held.count * part.shape.heads_per_unit, start + own.shape[1]
        gathered, asked = _joined(tiles), own[..., : heads * part.shape.head_size].contiguous()
        if run.rotary is not None:
            cos, sin = run.rotary
            asked = rotate(asked, heads, (cos[:, start:stop], sin[:, start:stop]), part.shape.head_size)
            gathered = rotate(gathered, held.count, run.rotary, part.shape.head_size)
        (queries,) = split_heads(asked, (heads,), part.shape.head_size)
        keys, values = split_heads(gathered, (held.count, held.count), part.shape.head_size)
        return self._attended(number, queries, keys, values, run, start, stop)

    def _attended(self, number: int, queries: Tensor, keys: Tensor, values: Tensor, run: Run, start: int, stop: int) -> Tensor:
        """Return the context for queries [start, stop) with all tokens' keys and values."""
        held, block, part = self._block(number)
        if part.shape.is_causal:
            keys, values = keys[:, :, :stop], values[:, :, :stop]
        mask = self.positions.mask(block, held.ranges, run, start, stop)
        is_causal = part.shape.is_causal and mask is None and not run.past
        return attend(queries, keys, values, mask, is_causal=is_causal, scale=block.scale)

    def cross_keys_values(self, number: int, memory: Tensor) -> Tensor:
        """Return the own units' keys and values (n, t, 2 x units x head size) for the encoder's output."""
        held = self.held[number]
        return F.linear(memory, held.inputs[1], held.biases[1])

    def cross_attend(self, number: int, queries: Sequence[Tensor], keys_values: Sequence[Tensor], run: Run) -> Tensor:
        """Return the own units' context (n, s, units x head size) for these queries.  keys_values: of all encoder tokens, or cached."""
        held, block, part = self._block(number)
        if run.past and run.cache is not None:
            run.projected = number, run.cache.whole(number)
        elif run.projected is None or run.projected[0] != number:
            run.projected = number, split_heads(_joined(keys_values), (held.count, held.count), part.shape.head_size)
            if run.cache is not None:
                run.cache.keep(number, *run.projected[1], grows=False)
        (own,) = split_heads(_joined(queries), (held.count,), part.shape.head_size)
        keys, values = run.projected[1]
        return attend(own, keys, values, None, is_causal=False, scale=block.scale)

    def out(self, number: int, context: Tensor) -> Tensor:
        """Return the partial product (n, t, d) of a block's output matrix, without its bias."""
        return F.linear(context, self.held[number].output)

    # Feed-forward network.

    def up(self, number: int, hidden: Tensor, *, is_divided: bool = False) -> Tensor:
        """Return the activations (n, t, columns) of the device's columns.

        is_divided: of its part alone if the layer is divided by columns, also where the device has all of them (scheme 2).
        """
        held, block, _ = self._block(number)
        matrix, bias, own = held.inputs[0], held.biases[0], self.spec.layers[block.layer].own_columns
        if not is_divided or own == held.count:
            return self._activate(F.linear(hidden, matrix, bias), block)
        # Other devices' columns are stored after the own ones, in both gate and up.
        tops = range(0, len(matrix), held.count)
        parts = [F.linear(hidden, matrix[top : top + own], None if bias is None else bias[top : top + own]) for top in tops]
        return self._activate(torch.cat(parts, dim=-1), block)

    def down(self, number: int, activations: Tensor) -> Tensor:
        """Return the partial product (n, t, d), without the bias, of the leading columns that have activations."""
        return F.linear(activations, self.held[number].output[:, : activations.shape[-1]])

    # Connection.

    def connect(self, number: int, total: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the next block's input (n, t, d) after a block (Galaxy+ Eq. 4).

        total: the sum of all devices' partial products.  After a stack's last block the second is the stack's final hidden state.  Before
        a block on another device it is not normalised (see enter).
        """
        added = self._add(number, total, residual)
        block = self._blocks[number]
        if not self.layout.parts[block.stack].is_pre_norm:
            hidden = self._norm(self.connections[number], added)
            return hidden, self._finish(block.stack, hidden) if block.is_last else hidden
        if block.is_last:
            return added, self._finish(block.stack, added)
        following = self.connections.get(number + 1)
        return added, added if following is None else self._norm(following, added)

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

    def step(self, cache: KeyValueCache) -> Run:
        """Return the state for the attention of the next token of each sample, the same on every device."""
        return self.positions.step(cache)

    def _block(self, number: int) -> tuple[HeldBlock, Block, StackLayout]:
        block = self._blocks[number]
        return self.held[number], block, self.layout.parts[block.stack]

    def _activate(self, projected: Tensor, block: Block) -> Tensor:
        if len(block.inputs[0]) == 1:
            return self._activation(projected)
        gate, up = projected.chunk(2, dim=-1)
        return self._activation(gate).mul_(up)

    def _add(self, number: int, total: Tensor, residual: Tensor) -> Tensor:
        bias = self.connections[number].bias
        added = total + residual
        return added if bias is None else added.add_(bias)

    def _finish(self, stack: int, hidden: Tensor) -> Tensor:
        final = self.finals[stack]
        return hidden if final is None else self._norm(final, hidden)

    @staticmethod
    def _norm(connection: Connection, hidden: Tensor) -> Tensor:
        if connection.norm.is_rms:
            return F.rms_norm(hidden, hidden.shape[-1:], connection.weight, connection.norm.eps)
        return F.layer_norm(hidden, hidden.shape[-1:], connection.weight, connection.shift, connection.norm.eps)


def _joined(tiles: Sequence[Tensor]) -> Tensor:
    return tiles[0] if len(tiles) == 1 else torch.cat(tuple(tiles), dim=1)


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


def _ranges(block: Block, spec: ShardSpec) -> Ranges:
    slices = spec.layers[block.layer]
    return slices.columns if block.kind == "feed_forward" else slices.units


def _connects(spec: ShardSpec, layer: int) -> bool:
    return spec.connects_all or not spec.layers[layer].is_empty
