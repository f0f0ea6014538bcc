"""Masks, rotary tables and T5's relative positions of a device's own units, each made once and kept for sequences of the same length."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from workbench.models.sharding.attention import position_bias
from workbench.models.sharding.layout import Block, ModelLayout
from workbench.models.sharding.run import KeyValueCache, Run, Step
from workbench.models.sharding.slices import Ranges

_KEPT = 8
"""Tables of so many lengths are kept."""


class Positions:
    """tables: of each stack, T5's (buckets, heads), None without.  dtype: of hidden states."""

    def __init__(self, layout: ModelLayout, tables: tuple[Tensor | None, ...], dtype: torch.dtype) -> None:
        self.layout, self.tables, self.dtype = layout, tables, dtype
        self._rotary: dict[int, tuple[Tensor, Tensor]] = {}
        self._biases: dict[tuple[int, Ranges, int], Tensor] = {}
        self._causal: dict[tuple[int, int], Tensor] = {}

    def rotary(self, length: int) -> tuple[Tensor, Tensor] | None:
        """Return cosines and sines (1, length, 1, head size) of a sequence, None for a family without them."""
        if self.layout.rotary is None:
            return None
        if length not in self._rotary:
            _make_room(self._rotary)
            self._rotary[length] = self._turns(torch.arange(length)[None])
        return self._rotary[length]

    def mask(self, block: Block, ranges: Ranges, run: Run, start: int, stop: int) -> Tensor | None:
        """Return what a block's attention hides or adds for queries [start, stop); None if nothing, or nothing but causality.

        Where attention is causal the keys are those before `stop`, and padding on the right is seen by no real token.
        """
        stack = block.stack
        is_causal, table = self.layout.parts[stack].is_causal, self.tables[stack]
        if table is None:
            if is_causal:
                return None if start == 0 else self._tail(start, stop)
            return run.padding
        key = stack, ranges
        if key not in run.masks:
            mask = self._bias(stack, ranges, run.lengths[stack], table)
            if run.mask is not None and not is_causal:
                mask = mask.masked_fill(~run.mask[:, None, None, :], -math.inf)
            run.masks[key] = mask
        mask = run.masks[key]
        return mask[:, :, start:stop, : stop if is_causal else None]

    def step(self, cache: KeyValueCache) -> Step:
        """Return what one further token of each sample needs."""
        at, mask = cache.length, None
        if cache.lengths is None:
            positions = torch.full((cache.count,), at)
        else:
            positions = cache.lengths + (at - cache.prompt_length)
            places = torch.arange(at + 1)[None]
            mask = ((places < cache.lengths[:, None]) | (places >= cache.prompt_length))[:, None, None]
        rotary = None if self.layout.rotary is None else self._turns(positions[:, None])
        return Step(cache=cache, positions=positions, mask=mask, memory_padding=cache.memory_padding, rotary=rotary)

    def step_mask(self, block: Block, ranges: Ranges, step: Step) -> Tensor | None:
        """Return what the attention of one token hides or adds, None for nothing."""
        table = self.tables[block.stack]
        if table is None:
            return step.mask
        if ranges not in step.biases:
            at = step.cache.length
            step.biases[ranges] = self._bias_of(block.stack, ranges, torch.tensor([at]), at + 1, table)
        return step.biases[ranges]

    def _bias(self, stack: int, ranges: Ranges, length: int, table: Tensor) -> Tensor:
        key = stack, ranges, length
        if key not in self._biases:
            _make_room(self._biases)
            self._biases[key] = self._bias_of(stack, ranges, torch.arange(length), length, table)
        return self._biases[key]

    def _bias_of(self, stack: int, ranges: Ranges, queries: Tensor, num_keys: int, table: Tensor) -> Tensor:
        units = [unit for start, stop in ranges for unit in range(start, stop)]
        distance: Any = self.layout.config.relative_attention_max_distance
        is_causal = self.layout.parts[stack].is_causal
        return position_bias(table[:, units], queries, num_keys, is_causal=is_causal, max_distance=distance)

    def _tail(self, start: int, stop: int) -> Tensor:
        """Return the last rows (stop - start, stop) of a causal mask."""
        key = start, stop
        if key not in self._causal:
            if len(self._causal) >= 8 * _KEPT:
                self._causal.clear()
            is_behind = torch.arange(stop)[None, :] > torch.arange(start, stop)[:, None]
            self._causal[key] = torch.zeros(stop - start, stop, dtype=self.dtype).masked_fill_(is_behind, -math.inf)
        return self._causal[key]

    def _turns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotary: Any = self.layout.rotary
        cos, sin = rotary(torch.empty(0, dtype=self.dtype), position_ids=positions)
        return cos[:, :, None], sin[:, :, None]


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= _KEPT:
        kept.clear()
