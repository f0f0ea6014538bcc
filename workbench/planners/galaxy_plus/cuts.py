"""Cut heads and columns so that the slowest device is fastest and all fit: partitions A and B of Galaxy+ Eq. 9, for a given ring.

A threshold on the attention's time caps each device's units, one on the feed-forward network's time its columns; memory caps both
together.  Whether two thresholds can be kept is a sum over devices, so all of them are tried at once, for every number of scheme-2 layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from workbench.planners.galaxy_plus.tables import Parts, Ranks, Tables

MOST_THRESHOLDS = 40
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


def unit_times(tables: Tables, ranks: Ranks) -> np.ndarray:
    """Return (devices, units + 1): seconds of all attention blocks of all layers."""
    rows = []
    for rank in ranks:
        total = np.zeros(tables.num_units + 1)
        for stack, blocks in enumerate(tables.attention(rank)):
            shape = tables.stacks[stack]
            at = np.rint(np.arange(tables.num_units + 1) * (shape.num_units / tables.num_units)).astype(int)
            total += shape.num_layers * np.sum(np.array(blocks), axis=0)[at]
        rows.append(np.maximum.accumulate(total))
    return np.array(rows)


def cuts(
    tables: Tables, ranks: Ranks, holds: Sequence[bool], room: Sequence[float], seconds: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], Cut]:
    """Return the best cut for each number of scheme-2 layers that fits."""
    if min(room) < 0:
        return {}
    times = unit_times(tables, ranks)
    n, total, columns = len(ranks), tables.num_units, tables.num_columns
    has = np.array(holds, bool)
    nbytes = np.array([tables.feed_forward_bytes(second) for second in seconds])
    left = np.array(room)[None, :] - nbytes[:, 2:] * has  # (Q, N)
    each = np.maximum(np.where(has, nbytes[:, :1], nbytes[:, 1:2]), 1e-6)
    keep = (left >= 0).all(axis=1)
    if not keep.any():
        return {}
    chosen = [second for second, kept in zip(seconds, keep, strict=True) if kept]
    left, each = left[keep][:, None, :], each[keep][:, None, :]
    unit = max(tables.unit_bytes, 1e-6)
    thresholds = np.unique(times[:, 1:])
    caps = np.array([np.searchsorted(row, thresholds * (1 + 1e-12), side="right") - 1 for row in times]).T  # (A, N)
    enough = caps.sum(axis=1) >= total
    thresholds, caps = thresholds[enough], caps[enough]
    if len(thresholds) > MOST_THRESHOLDS:
        half = MOST_THRESHOLDS // 2
        at = np.unique(np.concatenate([np.arange(half), np.geomspace(half, len(thresholds) - 1, half).astype(int)]))
        thresholds, caps = thresholds[at], caps[at]
    most = np.minimum(caps[None], np.floor(left / unit))  # (Q, A, N)
    possible = most.sum(axis=2) >= total
    lines = np.array([[columns_line(tables, rank, second) for rank in ranks] for second in chosen])  # (Q, N, 2)
    fixed, slope = lines[:, None, :, 0], np.maximum(lines[:, None, :, 1], 1e-30)
    timed = np.array([any(q < layers for q, layers in zip(second, tables.layers, strict=True)) for second in chosen])
    ratio = unit / each

    def free_units(limit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        allowed = np.clip((limit[..., None] - fixed) / slope, 0, columns)
        free = np.clip(np.floor((left - each * allowed) / unit), 0, most)
        return free, np.minimum(allowed, left / each)

    def kept(limit: np.ndarray) -> np.ndarray:
        free, allowed = free_units(limit)
        need = np.maximum(total - free.sum(axis=2), 0)
        # Units beyond the free ones cost columns: fewest where a column costs most, without tokens.
        cheap = ((most - free) * ~has).sum(axis=2)
        outside = np.minimum(need, cheap)
        lost = outside * np.where(has, np.inf, ratio).min(axis=2) if not has.all() else 0.0
        inside = need - outside
        lost = lost + np.where(inside > 0, inside * (np.where(has, ratio, np.inf).min(axis=2) if has.any() else np.inf), 0.0)
        return possible & (allowed.sum(axis=2) - lost >= columns - 1e-6)

    with np.errstate(invalid="ignore", over="ignore"):
        high = np.broadcast_to((fixed + slope * columns).max(axis=2), possible.shape).copy()
        feasible = kept(high)
        low = np.zeros_like(high)
        for _ in range(STEPS):
            middle = (low + high) / 2
            good = kept(middle)
            high, low = np.where(good, middle, high), np.where(good, low, middle)
        value = np.where(feasible, thresholds[None] + np.where(timed[:, None], high, 0.0), np.inf)
        best = value.argmin(axis=1)
        free, _ = free_units(high * (1 + 1e-9))

    def units_of(row: int, at: int) -> Parts:
        spare = [int(count) for count in free[row, at]]
        units = best_units(times, spare, total)
        if units is not None:
            return units
        # All that is free, and the rest where it costs least.
        parts, needed = list(spare), total - sum(spare)
        for d in sorted(range(n), key=lambda d: (bool(has[d]), -most[row, at, d])):
            more = min(needed, int(most[row, at, d]) - parts[d])
            parts[d] += more
            needed -= more
        return tuple(parts)

    return {
        second: Cut(second, float(value[row, best[row]]), partial(units_of, row, int(best[row])))
        for row, second in enumerate(chosen)
        if math.isfinite(value[row, best[row]])
    }
