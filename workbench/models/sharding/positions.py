"""Masks, rotary tables and T5's relative positions of a device's own units, each made once and kept for sequences of the same length."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from workbench.models.sharding.layout import Block, ModelLayout
from workbench.models.sharding.run import KeyValueCache, Run, Step
from workbench.models.sharding.slices import Ranges, units_of
from workbench.models.stack import buckets_of

_KEPT = 8
"""Tables of so many lengths are kept."""


class Positions:
    """tables: of each stack, T5's (buckets, heads), None without."""

    def __init__(self, layout: ModelLayout, tables: tuple[Tensor | None, ...]) -> None:
        self.layout, self.tables = layout, tables
        self.rotary = lru_cache(_KEPT)(self._rotary)
        self._whole_bias = lru_cache(_KEPT)(lambda stack, ranges, length: self._bias(stack, ranges, torch.arange(length), length))
        self._tail = lru_cache(8 * _KEPT)(_causal_tail)

    def mask(self, block: Block, ranges: Ranges, run: Run, start: int, stop: int) -> Tensor | None:
        """Return what a block's attention hides or adds for queries [start, stop); None if nothing, or nothing but causality.

        Where attention is causal the keys are those before `stop`, and padding on the right is seen by no real token.
        """
        stack = block.stack
        is_causal = self.layout.stacks[stack].is_causal
        if self.tables[stack] is None:
            if is_causal:
                return None if start == 0 else self._tail(start, stop)
            return run.padding
        key = stack, ranges
        if key not in run.masks:
            mask = self._whole_bias(stack, ranges, run.lengths[stack])
            if run.mask is not None and not is_causal:
                mask = mask.masked_fill(~run.mask[:, None, None, :], -math.inf)
            run.masks[key] = mask
        return run.masks[key][:, :, start:stop, : stop if is_causal else None]

    def step(self, cache: KeyValueCache) -> Step:
        """Return what one further token of each sample needs."""
        at, mask = cache.length, None
        if cache.lengths is None:
            positions = torch.full((cache.count,), at)
        else:
            positions = cache.lengths + (at - cache.prompt_length)
            places = torch.arange(at + 1)[None]
            mask = ((places < cache.lengths[:, None]) | (places >= cache.prompt_length))[:, None, None]
        return Step(cache=cache, positions=positions, mask=mask, rotary=self._turns(positions[:, None]))

    def step_mask(self, block: Block, ranges: Ranges, step: Step) -> Tensor | None:
        """Return what the attention of one token hides or adds, None for nothing."""
        if block.kind == "cross_attention":
            return step.cache.memory_padding
        if self.tables[block.stack] is None:
            return step.mask
        if ranges not in step.biases:
            at = step.cache.length
            step.biases[ranges] = self._bias(block.stack, ranges, torch.tensor([at]), at + 1)
        return step.biases[ranges]

    def _bias(self, stack: int, ranges: Ranges, queries: Tensor, num_keys: int) -> Tensor:
        """Return what T5 adds to the own units' scores, (1, units, queries, keys); under causality keys behind the query get -inf."""
        table, is_causal = self.tables[stack], self.layout.stacks[stack].is_causal
        assert table is not None
        distance: Any = self.layout.config.relative_attention_max_distance
        buckets = buckets_of(len(table), queries, num_keys, is_causal=is_causal, max_distance=distance)
        bias = table[:, units_of(ranges)][buckets].permute(2, 0, 1)[None]
        if is_causal:
            bias = bias.masked_fill(torch.arange(num_keys) > queries[:, None], -math.inf)
        return bias.contiguous()

    def _rotary(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines (1, length, 1, head size) of a sequence, None for a family without them."""
        return self._turns(torch.arange(length)[None])

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        rotary: Any = self.layout.rotary
        if rotary is None:
            return None
        cos, sin = rotary(torch.empty(0), position_ids=positions)
        return cos[:, :, None], sin[:, :, None]


def _causal_tail(start: int, stop: int) -> Tensor:
    """Return the last rows (stop - start, stop) of a causal mask."""
    is_behind = torch.arange(stop)[None, :] > torch.arange(start, stop)[:, None]
    return torch.zeros(stop - start, stop).masked_fill_(is_behind, -math.inf)
