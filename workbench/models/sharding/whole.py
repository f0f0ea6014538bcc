"""A whole model in this process that computes a token of each of several texts at once, from the blocks of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from workbench.models.sharding.building import WeightSource, model_layout, open_weights, weights_of
from workbench.models.sharding.layout import ShardSpec, whole_layers
from workbench.models.sharding.run import KeyValueCache, Row, Run
from workbench.models.sharding.shard import ModelShard


class WholeModel:
    """A models.text_batch.BatchModel whose texts share each matrix product.

    model: a name as in `load_stack`, or a Hugging Face model in memory, which is copied.
    """

    def __init__(self, model: Any) -> None:
        layout = model_layout(model)
        source = open_weights(model, layout=layout) if isinstance(model, str) else weights_of(model)
        self._layout = layout
        self._shard = ModelShard(layout, ShardSpec(layers=whole_layers(layout.stacks), has_ends=True), source)
        source.close()

    @property
    def longest(self) -> int:
        """Return the most tokens of a text, 0 without a table of positions."""
        return self._layout.max_length

    def first_layers(self, count: int) -> WholeModel:
        """Return the model that ends after some layers (see ModelLayout.first_layers), with the same weights."""
        model, spec = copy(self), self._shard.spec
        model._layout = self._layout.first_layers(count)
        spec = replace(spec, layers=spec.layers[: model._layout.num_layers])
        model._shard = ModelShard(model._layout, spec, WeightSource({}), self._shard)
        return model

    def in_int4(self) -> WholeModel:
        """Return the model with its layers' matrices stored in 4 bits (see ModelShard.in_int4)."""
        model = copy(self)
        model._shard = self._shard.in_int4()
        return model

    def start(self, ids: Sequence[int], decoder_ids: Sequence[int], num_tokens: int) -> tuple[KeyValueCache, Tensor]:
        """Return a text's keys and values, and the logits (1, vocabulary) of its next token (see BatchModel)."""
        cache = self._shard.new_cache(len(decoder_ids or ids) + num_tokens)
        run = self._shard.begin(len(ids), target_length=len(decoder_ids), cache=cache)
        hidden = self._hidden(0, ids, run, None)
        if decoder_ids:
            hidden = self._hidden(1, decoder_ids, run, hidden)
        return cache, self._shard.head(hidden, "last")

    def step(self, states: Sequence[KeyValueCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits (tokens, vocabulary) after further tokens of each text (see BatchModel)."""
        pairs = list(zip(states, tokens, strict=True))
        rows = [Row(cache, cache.length + more) for cache, new in pairs for more in range(len(new))]
        run = self._shard.positions.step(rows)
        hidden = self._hidden(len(self._layout.parts) - 1, list(chain(*tokens)), run, None)
        for cache, new in pairs:
            cache.length += len(new)
        return self._shard.head(hidden, "all")[0]

    def forget(self, state: KeyValueCache, count: int) -> None:
        """See BatchModel."""
        state.length -= count

    def _hidden(self, stack: int, ids: Sequence[int], run: Run, memory: Tensor | None) -> Tensor:
        """Return the final hidden states (1, t, d) of a stack.  memory: the encoder's."""
        shard = self._shard
        blocks = [block for block in self._layout.blocks if block.stack == stack]
        residual = shard.embed(stack, torch.tensor([ids]), run.positions)
        hidden = shard.enter(blocks[0].number, residual)
        for block in blocks:
            number = block.number
            if block.kind == "feed_forward":
                part = shard.down(number, shard.up(number, hidden))
            elif block.kind == "attention":
                part = shard.out(number, shard.attend(number, (shard.qkv(number, hidden),), run))
            else:
                keys_values = () if memory is None else (shard.cross_keys_values(number, memory),)
                part = shard.out(number, shard.cross_attend(number, (shard.qkv(number, hidden),), keys_values, run))
            residual, hidden = shard.connect(number, part, residual)
        return hidden
