"""The median and quartiles of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from workbench.core.errors import ConfigError


class Spread(NamedTuple):
    """The median of repeated values, and the quartiles, which enclose the middle half of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value; quantiles are interpolated linearly."""
        if not values:
            raise ConfigError("The spread of measurements was asked for.", "There are none.", "Measure at least once.")
        ordered = sorted(values)
        return cls(*(_quantile(ordered, share) for share in (0.5, 0.25, 0.75)))

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """Return the spread, zero, of a value that is computed instead of measured."""
        return cls(value, value, value)

    def scaled(self, factor: float) -> Spread:
        """Return the spread in another unit (factor above 0)."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """Return the spread of numerator over denominator in each round; used for interleaved measurements of two sides.

    Raises ConfigError if the two have different numbers of rounds.
    """
    if len(numerators) != len(denominators):
        raise ConfigError(
            "The ratio of two sides was asked for.",
            f"One has {len(numerators)} rounds, the other {len(denominators)}.",
            "Measure them in turn.",
        )
    return Spread.of([above / below for above, below in zip(numerators, denominators, strict=True)])


def _quantile(ordered: Sequence[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
