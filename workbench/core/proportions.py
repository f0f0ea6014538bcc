"""Divide items in proportion to weights, by largest remainder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from workbench.core.errors import ConfigError


def proportional_parts(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Split `total` items in proportion to the weights, by largest remainder; among equals the first gets more."""
    total_weight = math.fsum(weights)
    if not 0 < total_weight < math.inf or min(weights) < 0:
        raise ConfigError(
            f"Dividing {total} was asked for.",
            f"The weights are {tuple(weights)}.",
            "Give numbers of at least 0, not all 0.",
        )
    if total_weight == total and not any(weight % 1 for weight in weights):
        return tuple(map(int, weights))
    exact = [total * weight / total_weight for weight in weights]
    parts = [math.floor(part + 1e-9) for part in exact]
    by_remainder = sorted(
        (index for index in range(len(weights)) if weights[index] > 0), key=lambda i: (round(parts[i] - exact[i], 9), i)
    )
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return tuple(parts)


@lru_cache(maxsize=4096)  # a search divides by the same shares again and again
def proportional_ranges(total: int, weights: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Split range(total) into consecutive ranges in proportion to integer weights, by largest remainder."""
    return tuple(pairwise(accumulate(proportional_parts(total, weights), initial=0)))
