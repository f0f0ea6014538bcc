"""Cut heads and columns so that the slowest device is fastest and all fit: partitions A and B of Galaxy+ Eq. 9, for a given ring.

A threshold on the attention's time caps each device's units, one on the feed-forward network's time its columns; memory caps both
together.  Whether two thresholds can be kept is a sum over devices, so all of them are tried at once, for every number of scheme-2 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import numpy as np

from workbench.planners.galaxy_plus.tables import Parts, Ranks, Tables

MOST_THRESHOLDS = 256
STEPS = 18
"""Halvings of the second threshold: one part in 250 000, which whole columns make good."""


class Cut(NamedTuple):
    """Heads and columns that keep two thresholds; seconds: of both blocks in all layers, a lower bound up to one column.

    units: makes the heads, which few of many cuts are asked for.
    """

    second: tuple[int, ...]
    seconds: float
    units: Callable[[], Parts]


def columns_line(tables: Tables, rank: int, second: Sequence[int]) -> tuple[float, float]:
    """Return the line over columns of all tensor-parallel feed-forward networks; of all layers if there is none."""
    fixed = slope = 0.0
    weights = [layers - q for layers, q in zip(tables.layers, second, strict=True)]
    for stack, weight in enumerate(weights if any(weights) else tables.layers):
        line = tables.line("tensor", rank, stack)
        fixed += weight * line[0]
        slope += weight * line[1] * tables.stacks[stack].columns / tables.num_columns
    return fixed, slope


def best_columns(
    tables: Tables, ranks: Ranks, units: Parts, holds: Sequence[bool], room: Sequence[float], second: Sequence[int]
) -> Parts | None:
    """Return the columns whose slowest device is fastest beside these units, None if they do not fit."""
    own, other, full = tables.feed_forward_bytes(second)
    total = tables.num_columns
    caps = []
    for count, has, nbytes in zip(units, holds, room, strict=True):
        left = nbytes - count * tables.unit_bytes - (full if has else 0)
        each = own if has else other
        if left < 0:
            return None
        caps.append(total if each <= 0 else min(total, int(left / each)))
    if sum(caps) < total:
        return None
    lines = [columns_line(tables, rank, second) for rank in ranks]
    return water_level(lines, caps, total)


def water_level(lines: Sequence[tuple[float, float]], caps: Sequence[int], total: int) -> Parts:
    """Return whole numbers of that sum, at most `caps`, whose slowest line is fastest; a line counts only where its number is not 0.

    As water finds its level: between two of the levels at which a device begins or is full their sum is linear.
    """
    least = 1e-9 * max(1e-30, *(fixed + slope * total for fixed, slope in lines)) / total
    lines = [(fixed, max(slope, least)) for fixed, slope in lines]
    bends = [(fixed, 1.0 / slope) for (fixed, slope), cap in zip(lines, caps, strict=True) if cap]
    bends += [(fixed + slope * cap, -1.0 / slope) for (fixed, slope), cap in zip(lines, caps, strict=True) if cap]
    bends.sort()
    level, number, rate = bends[0][0], 0.0, 0.0
    for bend, change in bends:
        more = rate * (bend - level)
        if number + more >= total:
            break
        level, number, rate = bend, number + more, rate + change
    if rate > 0:
        level += max(0.0, total - number) / rate
    parts = [max(0, min(cap, int((level - fixed) / slope - 1e-9))) for (fixed, slope), cap in zip(lines, caps, strict=True)]
    for _ in range(total - sum(parts)):
        able = [d for d, part in enumerate(parts) if part < caps[d]]
        parts[min(able, key=lambda d: lines[d][0] + lines[d][1] * (parts[d] + 1))] += 1
    return tuple(parts)


def best_units(times: np.ndarray, caps: Sequence[int], total: int) -> Parts | None:
    """Return the units whose slowest device is fastest.  times: (devices, units + 1) seconds that rise.  None if the caps are too low."""
    if sum(caps) < total:
        return None
    owners = np.repeat(np.arange(len(caps)), caps)
    ends = np.concatenate([row[1 : cap + 1] for row, cap in zip(times, caps, strict=True)])
    first = owners[np.argsort(ends, kind="stable")[:total]]
    return tuple(np.bincount(first, minlength=len(caps)).tolist())


def unit_times(tables: Tables, rank: int) -> np.ndarray:
    """Return (units + 1,): seconds of all attention blocks of all layers."""
    total = np.zeros(tables.num_units + 1)
    for stack, blocks in enumerate(tables.attention(rank)):
        shape = tables.stacks[stack]
        at = np.rint(np.arange(tables.num_units + 1) * (shape.num_units / tables.num_units)).astype(int)
        total += shape.num_layers * np.sum(np.array(blocks), axis=0)[at]
    return np.maximum.accumulate(total)


def free_levels(fixed: np.ndarray, slope: np.ndarray, total: float) -> np.ndarray:
    """Return (rows,): the water level of each row's lines without caps, which memory can only raise.  fixed, slope: (rows, devices).

    The lines that begin below the level are a prefix of those in order; any other prefix has a higher level.
    """
    order = np.argsort(fixed, axis=1)
    begins, rate = np.take_along_axis(fixed, order, 1), 1.0 / np.take_along_axis(slope, order, 1)
    return ((total + np.cumsum(begins * rate, axis=1)) / np.cumsum(rate, axis=1)).min(axis=1)


@dataclass(slots=True)
class _Pairs:
    """Pairs of a number of scheme-2 layers and a threshold of the attention; arrays of (pairs,) or (pairs, devices).

    row: which of the numbers.  attention: the threshold.  left, each: bytes beside the units, and of a column.  most: units by
    threshold and memory.  low, high: the feed-forward network's threshold is between them; it cannot be kept, and can.
    """

    row: np.ndarray
    attention: np.ndarray
    left: np.ndarray
    each: np.ndarray
    fixed: np.ndarray
    slope: np.ndarray
    most: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def only(self, which: np.ndarray) -> _Pairs:
        return _Pairs(*(getattr(self, field.name)[which] for field in fields(self)))


@dataclass(frozen=True, slots=True)
class _Question:
    """What is the same for all pairs.  has: whether a device holds scheme-2 layers in full, (devices,)."""

    has: np.ndarray
    units: int
    columns: int
    unit_bytes: float

    def free_units(self, pairs: _Pairs, limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the units that cost no columns within these feed-forward thresholds, and the columns."""
        allowed = np.clip((limit[:, None] - pairs.fixed) / pairs.slope, 0, self.columns)
        free = np.clip(np.floor((pairs.left - pairs.each * allowed) / self.unit_bytes), 0, pairs.most)
        return free, np.minimum(allowed, pairs.left / pairs.each)

    def first_losses(self, pairs: _Pairs, free: np.ndarray, allowed: np.ndarray) -> np.ndarray:
        """Return the columns that each device's first unit beyond the free ones costs, a next one's at most; inf if it may have none."""
        left = (pairs.left - (free + 1) * self.unit_bytes) / pairs.each
        return np.where(pairs.most > free, np.maximum(allowed - left, 0.0), np.inf)

    def are_kept(self, pairs: _Pairs, limit: np.ndarray) -> np.ndarray:
        """Return whether these feed-forward thresholds can be kept."""
        free, allowed = self.free_units(pairs, limit)
        need = np.maximum(self.units - free.sum(axis=1), 0)
        spare = allowed.sum(axis=1) - self.columns + 1e-6
        kept = (need <= 0) & (spare >= 0)
        hard = np.nonzero((need > 0) & (spare >= 0))[0]
        if len(hard):
            kept[hard] = self._lost(pairs.only(hard), free[hard], allowed[hard], need[hard]) <= spare[hard]
        return kept

    def _lost(self, pairs: _Pairs, free: np.ndarray, allowed: np.ndarray, need: np.ndarray) -> np.ndarray:
        """Return the columns that these units beyond the free ones cost: k devices' first, cheapest first, then next ones; the best k.

        Next ones cost fewest where a column has most bytes, without tokens.
        """
        firsts = np.cumsum(np.sort(self.first_losses(pairs, free, allowed), axis=1), axis=1)
        firsts = np.concatenate([np.zeros((len(firsts), 1)), firsts], axis=1)
        rest = np.maximum(need[:, None] - np.arange(firsts.shape[1]), 0)
        ratio = self.unit_bytes / pairs.each
        more = np.maximum(pairs.most - free - 1, 0)
        for which in (~self.has, self.has):
            if which.any():
                taken = np.minimum(rest, (more * which).sum(axis=1)[:, None])
                firsts = firsts + taken * ratio[:, which][:, :1]
                rest = rest - taken
        return np.where(rest > 0, np.inf, firsts).min(axis=1)


def cuts(
    tables: Tables, ranks: Ranks, holds: Sequence[bool], room: Sequence[float], seconds: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Cut]:
    """Return the best cut for each number of scheme-2 layers that fits."""
    if min(room) < 0:
        return {}
    times = np.array([unit_times(tables, rank) for rank in ranks])
    asked = _Question(np.array(holds, bool), tables.num_units, tables.num_columns, max(tables.unit_bytes, 1e-6))
    pairs = _pairs(tables, ranks, asked, times, room, seconds)
    timed = np.array([any(q < layers for q, layers in zip(second, tables.layers, strict=True)) for second in seconds])
    with np.errstate(invalid="ignore", over="ignore"):
        pairs = pairs.only(asked.are_kept(pairs, pairs.high))
        middle = pairs.low * (1 + 1e-9)  # where memory holds it, there is nothing to search
        for step in range(STEPS):
            good = asked.are_kept(pairs, middle)
            pairs.high, pairs.low = np.where(good, middle, pairs.high), np.where(good, pairs.low, middle)
            if step % 3 == 0:  # those that another threshold of the attention beats already are given up
                fastest = np.full(len(seconds), np.inf)
                np.minimum.at(fastest, pairs.row, pairs.attention + pairs.high * timed[pairs.row])
                pairs = pairs.only(pairs.attention + pairs.low * timed[pairs.row] <= fastest[pairs.row])
                if not (pairs.high - pairs.low > 1e-6 * pairs.high).any():
                    break
            middle = (pairs.low + pairs.high) / 2
        free, allowed = asked.free_units(pairs, pairs.high * (1 + 1e-9))
        losses = asked.first_losses(pairs, free, allowed)
    value = pairs.attention + pairs.high * timed[pairs.row]
    found: dict[tuple[int, ...], Cut] = {}
    for at in np.lexsort((pairs.attention, value, pairs.row)):
        second = seconds[pairs.row[at]]
        if second not in found:
            found[second] = Cut(
                second,
                float(value[at]),
                partial(_units, asked, times, free[at], pairs.most[at], losses[at], asked.unit_bytes / pairs.each[at]),
            )
    return found


def _pairs(
    tables: Tables, ranks: Ranks, asked: _Question, times: np.ndarray, room: Sequence[float], seconds: Sequence[tuple[int, ...]]
) -> _Pairs:
    """Return all pairs whose units can be had and whose fixed bytes fit."""
    nbytes = np.array([tables.feed_forward_bytes(second) for second in seconds])
    left = np.array(room)[None, :] - nbytes[:, 2:] * asked.has  # (Q, N)
    each = np.maximum(np.where(asked.has, nbytes[:, :1], nbytes[:, 1:2]), 1e-6)
    thresholds = np.unique(times[:, 1:])
    caps = np.array([np.searchsorted(row, thresholds * (1 + 1e-12), side="right") - 1 for row in times]).T  # (A, N)
    enough = caps.sum(axis=1) >= asked.units
    thresholds, caps = thresholds[enough], caps[enough]
    if len(thresholds) > MOST_THRESHOLDS:
        half = MOST_THRESHOLDS // 2
        at = np.unique(np.concatenate([np.arange(half), np.geomspace(half, len(thresholds) - 1, half).astype(int)]))
        thresholds, caps = thresholds[at], caps[at]
    most = np.minimum(caps[None], np.floor(left / asked.unit_bytes)[:, None, :])  # (Q, A, N)
    weights = np.array(tables.layers) - np.array(seconds)
    weights = np.where(weights.any(axis=1, keepdims=True), weights, tables.layers)  # (Q, stacks), as in columns_line
    share = np.array([shape.columns / asked.columns for shape in tables.stacks])
    line = np.array([[tables.line("tensor", rank, stack) for rank in ranks] for stack in range(len(share))])
    line[:, :, 1] *= share[:, None]
    lines = np.einsum("qs,snc->qnc", weights, line)  # (Q, N, 2)
    fixed, slope = lines[:, :, 0], np.maximum(lines[:, :, 1], 1e-30)
    levels = free_levels(fixed, slope, asked.columns)
    row, at = np.nonzero((left >= 0).all(axis=1)[:, None] & (most.sum(axis=2) >= asked.units))
    return _Pairs(
        row=row,
        attention=thresholds[at],
        left=left[row],
        each=each[row],
        fixed=fixed[row],
        slope=slope[row],
        most=most[row, at],
        low=levels[row] * (1 - 1e-9),
        high=(fixed + slope * asked.columns).max(axis=1)[row],
    )


def _units(asked: _Question, times: np.ndarray, free: np.ndarray, most: np.ndarray, losses: np.ndarray, ratio: np.ndarray) -> Parts:
    """Return the units of a pair: the free ones that are fastest, or all of these and the rest where they cost fewest columns."""
    parts = [int(count) for count in free]
    units = best_units(times, parts, asked.units)
    if units is not None:
        return units
    price = losses.copy()
    for _ in range(asked.units - sum(parts)):
        d = int(np.argmin(price))
        parts[d] += 1
        price[d] = ratio[d] if parts[d] < most[d] else np.inf
    return tuple(parts)
