"""The median, quartiles and percentiles of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import quantiles
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
        if len(values) == 1:
            return cls.exactly(values[0])
        low, middle, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high)

    @classmethod
    def exactly(cls, value: float) -> Spread:
        """Return the spread, zero, of a value that is computed instead of measured."""
        return cls(value, value, value)

    def scaled(self, factor: float) -> Spread:
        """Return the spread in another unit (factor above 0)."""
        return Spread(self.median * factor, self.low * factor, self.high * factor)


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed (nearest rank); 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
