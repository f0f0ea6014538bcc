"""Adapt P-RGE to its device: choose queries, batch and precision by profile, memory and pace (section 6, third limitation).

This module has pure functions and one record of observations; methods/p_rge carries out its decisions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, NamedTuple

from workbench.core.errors import PlanError

Precision = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16", "int8", "nf4")
"""Precisions of the frozen weights, the most exact first."""

MOST_QUERIES = 16
"""The paper's largest q.  With more queries, each query sees less than one sample of a batch of 16 (section 4.1)."""


class Setting(NamedTuple):
    """The settings of a step that may be adapted: q queries of E samples, and the precision of the frozen weights."""

    queries: int
    batch_size: int
    precision: Precision = "float32"

    @property
    def passes(self) -> int:
        """Return half the samples that go forward in a step: q x E, the paper's constant B."""
        return self.queries * self.batch_size


class Price(NamedTuple):
    """The cost of a setting: seconds of a step, infinity if it fits on no device; missing_bytes: then missing on the largest device."""

    step_s: float
    missing_bytes: int = 0


def candidates(asked: Setting, *, precisions: Sequence[Precision] = ("float32",), most_queries: int = MOST_QUERIES) -> tuple[Setting, ...]:
    """Return the settings that may replace the asked one, in order of preference.

    Settings of the asked precision come first, then less exact ones.  Within a precision, settings with the asked work q x E come first,
    then those with half of it, and so on.  Within the same work, the asked q comes first, then more queries with fewer samples each (Table
    1 and 2: at a constant q x E they train better), then fewer queries.
    """
    known = [precision for precision in PRECISIONS if precision in (asked.precision, *precisions)]
    order = known[known.index(asked.precision) :]
    found: list[Setting] = []
    for precision in order:
        work = asked.passes
        while work >= 1:
            splits = [queries for queries in range(1, min(work, max(most_queries, asked.queries)) + 1) if work % queries == 0]
            splits.sort(key=lambda queries: (queries != asked.queries, queries < asked.queries, abs(queries - asked.queries)))
            found += [Setting(queries, work // queries, precision) for queries in splits]
            work //= 2
    return tuple(dict.fromkeys(found))


def choose(settings: Sequence[Setting], price: Callable[[Setting], Price], *, step_s: float | None = None) -> Setting:
    """Return the first setting that fits in memory and in `step_s` seconds (None: no limit), or else the fastest that fits in memory.

    Raises PlanError with the missing bytes if none fits in memory.
    """
    prices: dict[Setting, Price] = {}
    for setting in settings:
        prices[setting] = price(setting)
        if prices[setting].step_s <= (math.inf if step_s is None else step_s) and math.isfinite(prices[setting].step_s):
            return setting
    fastest = min(settings, key=lambda setting: prices[setting].step_s)
    if math.isinf(prices[fastest].step_s):
        least = min(prices[setting].missing_bytes for setting in settings)
        raise PlanError(
            f"A step of {settings[0].queries} queries of {settings[0].batch_size} samples was to be adapted to the devices.",
            f"Even with the smallest of {len(settings)} settings, {least / 1e6:,.1f} MB of memory are missing.",
            "Add a device, raise its memory, lower max_length, or choose a smaller model.",
        )
    return fastest


@dataclass(kw_only=True)
class Pace:
    """Detects lasting changes of a device's or a link's speed, by each step's seconds relative to the plan's expectation.

    window: the number of steps considered; more, if these together take less than least_s to compute: what passes within moments is noise.
    threshold: smaller changes of the median, in either direction, are ignored (hysteresis).
    If all devices of a cluster slow down by the same factor, that is a change too: the prediction of its step changes.
    """

    window: int = 5
    threshold: float = 1.3
    least_s: float = 0.0
    factors: dict[Any, float] = field(default_factory=dict)
    """The assumed slow-down of a device relative to its profile, by rank, or of a link, by 'sender>receiver'; 1 if missing."""
    _seen: dict[Any, deque[tuple[float, float]]] = field(default_factory=dict)

    def observe(self, rank: int | str, busy_s: float, expected_s: float) -> None:
        """Record one step of a device, or a link's fastest message in it.  expected_s: as described, at full speed."""
        if busy_s > 0 and expected_s > 0:
            seen = self._seen.setdefault(rank, deque())
            seen.append((busy_s, busy_s / expected_s))
            while len(seen) > self.window and sum(seconds for seconds, _ in seen) - seen[0][0] >= self.least_s:
                seen.popleft()

    def changed(self) -> dict[Any, float]:
        """Return the devices and links whose last `window` steps give a slow-down different from the assumed one, with the new value."""
        found = {}
        for rank, seen in self._seen.items():
            if len(seen) < self.window or sum(seconds for seconds, _ in seen) < self.least_s:
                continue
            factor, planned = median(ratio for _, ratio in seen), self.factors.get(rank, 1.0)
            if max(factor / planned, planned / factor) > self.threshold:
                found[rank] = factor
        return found

    def accept(self, factors: Mapping[Any, float]) -> None:
        """Assume these factors from now on, and discard earlier observations."""
        self.factors.update(factors)
        self._seen.clear()
