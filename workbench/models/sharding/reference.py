"""Run a plan inside one process, without transport: what a distributed run is compared with (Galaxy+, section III-B, Fig. 6-8).

Every position computes on its own tiles what it would on its own device; sums and gathers are done by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.core.inference import InferencePlan
from workbench.models.sharding.ends import What
from workbench.models.sharding.layout import Block
from workbench.models.sharding.run import KeyValueCache, Run, Step
from workbench.models.sharding.shard import ModelShard

Tile = tuple[int, int, int]
"""Position, and the tokens [start, stop) that it owns."""


def tiles_of(plan: InferencePlan, length: int) -> list[Tile]:
    """Return the tiles of a sequence in order: each position's tokens, in pieces of at most plan.tile_tokens."""
    tiles: list[Tile] = []
    start = 0
    for position, tokens in enumerate(plan.tokens(length) if plan.shares else (length,) + (0,) * (plan.num_positions - 1)):
        size = plan.tile_tokens or max(1, tokens)
        tiles += [(position, at, min(at + size, start + tokens)) for at in range(start, start + tokens, size)]
        start += tokens
    return tiles


@torch.inference_mode()
def run_plan(
    plan: InferencePlan,
    shards: Sequence[ModelShard],
    ids: Tensor,
    mask: Tensor | None = None,
    decoder_ids: Tensor | None = None,
    *,
    what: What = "hidden",
    caches: Sequence[KeyValueCache] | None = None,
) -> Tensor:
    """Return final hidden states or logits of a batch, computed as the plan says.

    shards: of each position.  ids: (n, t), or a picture's patches.  mask: (n, t), 1 for real tokens.  decoder_ids: (n, s).
    caches: one for each position, filled for `generate`.
    """
    layout, count = shards[0].layout, len(ids)
    if layout.has_decoder and decoder_ids is None:
        decoder_ids = torch.full((count, 1), layout.config.decoder_start_token_id)
    target_length = 1 if decoder_ids is None else decoder_ids.shape[1]
    runs = [
        shard.begin(ids.shape[1], mask, target_length=target_length, count=count, cache=None if caches is None else caches[position])
        for position, shard in enumerate(shards)
    ]
    memory: Tensor | None = None
    state = torch.empty(0)
    for stack in range(len(layout.parts)):
        state = shards[0].embed(stack, ids if stack == 0 or decoder_ids is None else decoder_ids, mask if stack == 0 else None)
        state = _stack(plan, shards, runs, stack, state, memory)
        memory = state
    return shards[0].head(state, what, mask if len(layout.parts) == 1 else None)


@torch.inference_mode()
def generate(plan: InferencePlan, shards: Sequence[ModelShard], ids: Tensor, max_new_tokens: int, mask: Tensor | None = None) -> Tensor:
    """Return the likeliest next tokens (n, max_new_tokens), greedily, one after the other; every position keeps its own keys and values.

    ids: (n, t) prompts, of an encoder-decoder what its encoder reads.
    """
    layout = shards[0].layout
    prompt = 1 if layout.has_decoder else ids.shape[1]
    caches = [shard.new_cache(len(ids), prompt + max_new_tokens) for shard in shards]
    tokens = [run_plan(plan, shards, ids, mask, what="last", caches=caches).argmax(-1)]
    while len(tokens) < max_new_tokens:
        steps = [shard.step(cache) for shard, cache in zip(shards, caches, strict=True)]
        state = shards[0].embed_step(tokens[-1], steps[0])
        hidden = _step(plan, shards, steps, state)
        for cache in caches:
            cache.advance()
        tokens.append(shards[0].head(hidden, "last").argmax(-1))
    return torch.stack(tokens, dim=1)


def _step(plan: InferencePlan, shards: Sequence[ModelShard], steps: Sequence[Step], state: Tensor) -> Tensor:
    """Return the final hidden state (n, 1, d) of one further token."""
    layout = shards[0].layout
    blocks = [block for block in layout.blocks if block.stack == len(layout.parts) - 1]
    if plan.paradigm == "pipeline":
        for layer in sorted({block.layer for block in blocks}):
            position = _position_of(plan, layer)
            state = shards[position].layer_step(layer, state, steps[position])
        return state
    hidden = shards[0].enter(len(layout.parts) - 1, state)
    for block in blocks:
        total = _sum([shard.decode(block.number, hidden, step) for shard, step in zip(shards, steps, strict=True)])
        state, hidden = shards[0].connect(block.number, total, state)
    return hidden


def _position_of(plan: InferencePlan, layer: int) -> int:
    return next(index for index in range(plan.num_positions) if layer < sum(plan.layers[: index + 1]))


def _stack(
    plan: InferencePlan, shards: Sequence[ModelShard], runs: Sequence[Run], stack: int, state: Tensor, memory: Tensor | None
) -> Tensor:
    layout = shards[0].layout
    blocks = [block for block in layout.blocks if block.stack == stack]
    if plan.paradigm == "pipeline":
        for layer in sorted({block.layer for block in blocks}):
            position = _position_of(plan, layer)
            state = shards[position].layer(layer, state, runs[position], memory)
        return state
    tiles = tiles_of(plan, state.shape[1])
    if plan.paradigm == "tensor":
        tiles = [(0, 0, state.shape[1])]
    residual = [state[:, start:stop] for _, start, stop in tiles]
    hidden = [shards[position].enter(stack, tile) for (position, _, _), tile in zip(tiles, residual, strict=True)]
    for block in blocks:
        totals = _block(plan, shards, runs, block, tiles, hidden, memory)
        connected = [
            shards[position].connect(block.number, total, tile)
            for (position, _, _), total, tile in zip(tiles, totals, residual, strict=True)
        ]
        residual, hidden = [pair[0] for pair in connected], [pair[1] for pair in connected]
    return torch.cat(hidden, dim=1)


def _block(
    plan: InferencePlan,
    shards: Sequence[ModelShard],
    runs: Sequence[Run],
    block: Block,
    tiles: Sequence[Tile],
    hidden: Sequence[Tensor],
    memory: Tensor | None,
) -> list[Tensor]:
    """Return each tile's sum of the partial products, from all positions or, where its own has all weights, from that one."""
    number = block.number
    alone = plan.paradigm == "sequence" or (block.kind == "feed_forward" and plan.schemes[block.layer : block.layer + 1] == (2,))
    if block.kind == "feed_forward":
        if alone:
            return [
                shards[position].down(number, shards[position].up(number, tile))
                for (position, _, _), tile in zip(tiles, hidden, strict=True)
            ]
        return _totals([[shard.down(number, shard.up(number, tile)) for tile in hidden] for shard in shards])
    if plan.paradigm == "sequence":
        return _sequence_attention(shards, runs, block, tiles, hidden, memory)
    products: list[list[Tensor]] = []
    for shard, run in zip(shards, runs, strict=True):
        if block.kind == "attention":
            context = shard.attend(number, [shard.qkv(number, tile) for tile in hidden], run)
        else:
            assert memory is not None
            queries = [shard.cross_query(number, tile) for tile in hidden]
            gathered = [shard.cross_keys_values(number, memory[:, start:stop]) for _, start, stop in tiles_of(plan, memory.shape[1])]
            context = shard.cross_attend(number, queries, gathered, run)
        products.append([shard.out(number, context[:, start:stop]) for _, start, stop in tiles])
    return _totals(products)


def _sequence_attention(
    shards: Sequence[ModelShard], runs: Sequence[Run], block: Block, tiles: Sequence[Tile], hidden: Sequence[Tensor], memory: Tensor | None
) -> list[Tensor]:
    number = block.number
    if block.kind == "cross_attention":
        assert memory is not None
        gathered = [shards[0].cross_keys_values(number, memory)]
        contexts = [
            shards[position].cross_attend(number, [shards[position].cross_query(number, tile)], gathered, runs[position])
            for (position, _, _), tile in zip(tiles, hidden, strict=True)
        ]
    else:
        own = [shards[position].qkv(number, tile) for (position, _, _), tile in zip(tiles, hidden, strict=True)]
        gathered = [shards[position].keys_values(number, tile) for (position, _, _), tile in zip(tiles, own, strict=True)]
        contexts = [
            shards[position].attend_own(number, tile, gathered, runs[position], start)
            for (position, start, _), tile in zip(tiles, own, strict=True)
        ]
    return [shards[position].out(number, context) for (position, _, _), context in zip(tiles, contexts, strict=True)]


def _totals(products: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each tile's sum over the positions."""
    return [_sum(list(of_tile)) for of_tile in zip(*products, strict=True)]


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
