"""Adapt P-RGE to the device it runs on: queries, batch and precision from its profile, memory and pace (section 6, third limitation).

Pure functions and one record of what was observed: what is decided here is carried out by methods/p_rge.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from workbench.core.errors import ConfigError, PlanError

Precision = Literal["float32", "bfloat16", "float16", "int8", "nf4"]
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16", "int8", "nf4")
"""Of the frozen weights, the most exact first."""

MOST_QUERIES = 16
"""The paper's largest q; beyond it each query sees less than one sample of a batch of 16 (section 4.1)."""


class Setting(NamedTuple):
    """What of a step may be adapted: q queries of E samples, and the precision of the frozen weights."""

    queries: int
    batch_size: int
    precision: Precision = "float32"

    @property
    def passes(self) -> int:
        """Return the samples that go forward in a step, over 2: q x E, the paper's constant B."""
        return self.queries * self.batch_size


class Price(NamedTuple):
    """What a setting takes: seconds of a step, infinity if it fits in no memory; missing_bytes: what the roomiest device lacks then."""

    step_s: float
    missing_bytes: int = 0


def candidates(asked: Setting, *, precisions: Sequence[Precision] = ("float32",), most_queries: int = MOST_QUERIES) -> tuple[Setting, ...]:
    """Return the settings that may stand in for the asked one, the most wanted first.

    First come those of the asked precision, then less exact ones.  Of one precision first those with the asked work q x E, then those
    with half of it, and so on.  Of the same work first the asked q, then more queries with fewer samples each (Table 1 and 2: at a
    constant q x E they train better), then fewer.
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
    """Return the first setting that fits in memory and in `step_s` seconds (None: any); if none is so fast, the fastest that fits.

    Raises PlanError with the bytes that are missing if none fits in memory.
    """
    if not settings or (step_s is not None and not step_s > 0):
        raise ConfigError(
            f"A choice of {len(settings)} settings within {step_s} s a step was asked for.", "There must be one, and time.", "Raise step_s."
        )
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
    """Finds devices whose pace has changed for good: each step's computing seconds over what the plan expects.

    window: steps that are looked at.  threshold: a change of the median by less is not acted on, either way (hysteresis).
    A cluster whose devices all are slower by one factor has changed, too: the prediction of its step has.
    """

    window: int = 5
    threshold: float = 1.3
    factors: dict[int, float] = field(default_factory=dict)
    """By rank: how many times slower than its profile a device is taken to be; those that are missing are as fast as it says."""
    _seen: dict[int, deque[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.window < 1 or not self.threshold > 1:
            raise ConfigError(
                f"A window of {self.window} steps and a threshold of {self.threshold} were asked for.",
                "They must be at least 1, and above 1.",
                "Raise them.",
            )

    def observe(self, rank: int, busy_s: float, expected_s: float) -> None:
        """Take one step of a device.  expected_s: by its profile, at full pace."""
        if busy_s > 0 and expected_s > 0:
            self._seen.setdefault(rank, deque(maxlen=self.window)).append(busy_s / expected_s)

    def changed(self) -> dict[int, float]:
        """Return the devices whose last `window` steps say another factor than the one that is planned with, and which."""
        found = {}
        for rank, seen in self._seen.items():
            if len(seen) < self.window:
                continue
            factor, planned = median(seen), self.factors.get(rank, 1.0)
            if max(factor / planned, planned / factor) > self.threshold:
                found[rank] = factor
        return found

    def accept(self, factors: Mapping[int, float]) -> None:
        """Plan with these factors from now on; what was seen before is forgotten."""
        self.factors.update(factors)
        self._seen.clear()
