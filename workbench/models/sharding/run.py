"""The state of one request: positions, and keys and values of earlier tokens.

Causal masks, rotary tables and T5's relative positions for a device's own units are cached for sequences of the same
length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.family import patterns_of
from workbench.models.layer_inputs import buckets_of, rotary_tables
from workbench.models.sharding.block import Block, Rotary, rotary_of
from workbench.models.sharding.layout import ModelLayout, Ranges, units_of

_MAX_TABLES = 8
"""Number of lengths whose tables are cached."""


class KeyValueCache:
    """Keys and values of a device's own units, block by block (Galaxy+ only measures the latency of a token; this
    generates text).

    capacity: maximum number of tokens in prompt and answer.  length: number of tokens stored now.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._blocks: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._blocks.values())

    def begin(self, length: int) -> None:
        """Start with prompts of `length` tokens."""
        self._blocks.clear()
        self.length = length

    def keep(self, number: int, keys: Tensor, values: Tensor, *, grows: bool) -> None:
        """Store a block's keys and values (n, units, t, head size).  grows: reserve room for more tokens (not for
        cross-attention).
        """
        room = self.capacity - keys.shape[2] if grows else 0
        self._blocks[number] = F.pad(keys, (0, 0, 0, room)).contiguous(), F.pad(values, (0, 0, 0, room)).contiguous()

    def extend(self, number: int, keys: Tensor, values: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Store the keys and values (n, units, 1, head size) of the token at `index`, and return all up to it."""
        all_keys, all_values = self._blocks[number]
        all_keys[:, :, index : index + 1], all_values[:, :, index : index + 1] = keys, values
        return all_keys[:, :, : index + 1], all_values[:, :, : index + 1]

    def cross_keys_values(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a cross-attention."""
        return self._blocks[number]


class Row(NamedTuple):
    """A token that is computed together with those of other texts.  past: tokens of its text before it."""

    cache: KeyValueCache
    past: int


@dataclass(slots=True, kw_only=True)
class Run:
    """One request: sequences of one length, without padding.

    lengths: number of tokens in each stack.

    rotary: rotary table of its positions for each pattern of attention.  cache: cache in which keys and values are
    stored.
    projected: the current block's number with its queries, keys and values, cached while parts of it are requested.
    rows: further tokens of some texts, each a separate run, instead of one sequence.
    past: tokens in the cache before this one, if the run is a row.  biases: T5's position biases for it, by units.
    """

    lengths: tuple[int, ...]
    rotary: Mapping[str, Rotary | None]
    cache: KeyValueCache | None = None
    projected: tuple[int, tuple[Tensor, ...]] | None = None
    rows: tuple[Run, ...] = ()
    past: int = 0
    biases: dict[Ranges, Tensor] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor | None:
        """Return the positions of the rows, None for a sequence, which begins at 0."""
        return torch.tensor([row.past for row in self.rows]) if self.rows else None

    def rotary_of(self, block: Block) -> Rotary | None:
        """Return the rotary table of an attention, None if its layer does not turn queries and keys."""
        return self.rotary[block.pattern] if block.has_rotary else None


class Positions:
    """tables: T5's table (buckets, heads) of each stack, None for other families."""

    def __init__(self, layout: ModelLayout, tables: tuple[Tensor | None, ...]) -> None:
        self.layout, self.tables = layout, tables
        # Closures over the arguments only: a reference cycle would keep the tables until the next garbage collection.
        self.rotary = lru_cache(_MAX_TABLES)(lambda length: _rotary(layout, torch.arange(length)[None]))
        self._whole_bias = lru_cache(_MAX_TABLES)(
            lambda stack, ranges, length: _bias(layout, tables, stack, ranges, torch.arange(length), length)
        )
        self._near = lru_cache(8 * _MAX_TABLES)(_near)

    def mask(self, block: Block, ranges: Ranges, run: Run, start: int, stop: int) -> Tensor | None:
        """Return the mask or bias of a block's attention for queries [start, stop).  None if there is at most
        causality.

        With causal attention the keys are those before `stop`.
        """
        is_causal = block.facts.is_causal
        if self.tables[block.stack] is None:
            num_keys = stop if is_causal else run.lengths[block.stack]
            is_near = not block.window or num_keys <= block.window + (not is_causal)
            is_tail = is_causal and start and not run.past
            return None if is_near and not is_tail else self._near(start, stop, num_keys, block.window, is_causal)
        if run.past:
            if ranges not in run.biases:
                run.biases[ranges] = _bias(
                    self.layout, self.tables, block.stack, ranges, torch.arange(start, stop), stop
                )
            return run.biases[ranges]
        bias = self._whole_bias(block.stack, ranges, run.lengths[block.stack])
        return bias[:, :, start:stop, : stop if is_causal else None]

    def step(self, rows: Sequence[Row]) -> Run:
        """Return the state for the attention of further tokens, in the order of the rows."""
        stacks = len(self.layout.parts)
        return Run(
            lengths=(len(rows),) * stacks,
            rotary=_rotary(self.layout, torch.tensor([[row.past for row in rows]])),
            rows=tuple(Run(lengths=(1,) * stacks, rotary={}, cache=row.cache, past=row.past) for row in rows),
        )


def _bias(
    layout: ModelLayout, tables: tuple[Tensor | None, ...], stack: int, ranges: Ranges, queries: Tensor, num_keys: int
) -> Tensor:
    """Return T5's bias for the own units' scores, (1, units, queries, keys).  With causality keys after the query get
    -inf.
    """
    table, is_causal = tables[stack], layout.stacks[stack].is_causal
    assert table is not None
    distance: Any = layout.config.relative_attention_max_distance
    buckets = buckets_of(len(table), queries, num_keys, is_causal=is_causal, max_distance=distance)
    bias = table[:, units_of(ranges)][buckets].permute(2, 0, 1)[None]
    if is_causal:
        bias = bias.masked_fill(torch.arange(num_keys) > queries[:, None], -math.inf)
    return bias.contiguous()


def _rotary(layout: ModelLayout, positions: Tensor) -> dict[str, Rotary | None]:
    """Return the cosines and sines of positions (n, t) for each pattern of attention."""
    tables = {
        pattern: rotary_tables(layout.rotary, torch.empty(0), positions, pattern)
        for pattern in set(patterns_of(layout.config, 1))
    }
    return {pattern: None if table is None else rotary_of(*table) for pattern, table in tables.items()}


def _near(start: int, stop: int, num_keys: int, window: int, is_causal: bool) -> Tensor:
    """Return the mask that is added to the scores (stop - start, num_keys) of queries [start, stop): -inf
    for later keys, if it is causal, and for those outside a window (0: none).
    """
    behind = torch.arange(start, stop)[:, None] - torch.arange(num_keys)[None, :]  # how far a key lies before a query
    if is_causal:
        is_hidden = behind < 0 if not window else (behind < 0) | (behind >= window)
    else:
        is_hidden = behind.abs() > window
    return torch.zeros(stop - start, num_keys).masked_fill_(is_hidden, -math.inf)
