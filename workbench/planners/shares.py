"""Choose a set of devices, and divide equal items among its members."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

SAVES = 1 - 1e-9
"""One more device must save time: rounding errors must not decide between equally good sets."""
ALL_SETS_UP_TO = 10
"""Up to this many devices are tried in every combination; with more, the k fastest for every k."""


def device_sets(seconds: Mapping[int, float]) -> Iterator[tuple[int, ...]]:
    """Yield sets of ranks, smaller ones first.  seconds: each rank's seconds alone."""
    fastest = sorted(seconds, key=lambda rank: (seconds[rank], rank))
    for count in range(1, len(fastest) + 1):
        yield from (
            combinations(sorted(fastest), count) if len(fastest) <= ALL_SETS_UP_TO else [tuple(sorted(fastest[:count]))]
        )


def smallest_maximum(tables: Sequence[Sequence[float]], total: int) -> list[int] | None:
    """Divide `total` equal items so that the largest tables[i][count_i] is as small as possible; return None if they do
    not all fit.

    tables[i][n]: the seconds of taker i with n items, 0 for none and not falling in n; infinity if it cannot.
    """
    levels = sorted({seconds for table in tables for seconds in table if math.isfinite(seconds)})
    low, high = 0, len(levels) - 1
    if not levels or sum(_most(table, levels[high]) for table in tables) < total:
        return None
    while low < high:
        middle = (low + high) // 2
        if sum(_most(table, levels[middle]) for table in tables) >= total:
            high = middle
        else:
            low = middle + 1
    counts = [_most(table, levels[low]) for table in tables]
    for _ in range(sum(counts) - total):  # take surplus items where that helps most
        slowest = max(
            (index for index in range(len(tables)) if counts[index]), key=lambda index: tables[index][counts[index]]
        )
        counts[slowest] -= 1
    return counts


def _most(table: Sequence[float], limit_s: float) -> int:
    return bisect_right(table, limit_s) - 1
