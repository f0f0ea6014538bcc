"""Adapt P-RGE to its device: choose queries, batch and precision by profile, memory and pace (section 6, third
limitation).

This module has pure functions; policy.py carries out its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from workbench.core.errors import PlanError
from workbench.methods.p_rge.options import PRECISIONS, Precision

MOST_QUERIES = 16
"""The paper's largest q.  With more queries, each query sees less than one sample of a batch of 16 (section 4.1)."""


class Setting(NamedTuple):
    """The settings of a step that may be adapted: q queries of E samples, and the precision of the frozen weights."""

    queries: int
    batch_size: int
    precision: Precision = "float32"

    @property
    def passes(self) -> int:
        """Return q x E, the paper's constant B: half the number of samples in a step's forward passes."""
        return self.queries * self.batch_size


class Price(NamedTuple):
    """The cost of a setting: seconds of a step, infinity if it fits on no device.

    missing_bytes: the bytes that are then missing on the largest device.
    """

    step_s: float
    missing_bytes: int = 0


def candidates(
    requested: Setting, *, precisions: Sequence[Precision] = ("float32",), most_queries: int = MOST_QUERIES
) -> tuple[Setting, ...]:
    """Return the settings that may replace the requested one, in order of preference.

    Settings of the requested precision come first, then less exact ones.  Within a precision, settings with the
    requested work q x E come first, then those with half of it, and so on.  Within the same work, the requested q comes
    first, then more queries with fewer samples each (Tables 1 and 2: at a constant q x E they train better), then fewer
    queries.
    """
    allowed = [precision for precision in PRECISIONS if precision in (requested.precision, *precisions)]
    order = allowed[allowed.index(requested.precision) :]
    settings: list[Setting] = []
    for precision in order:
        work = requested.passes
        while work >= 1:
            splits = [
                queries
                for queries in range(1, min(work, max(most_queries, requested.queries)) + 1)
                if work % queries == 0
            ]
            splits.sort(
                key=lambda queries: (
                    queries != requested.queries,
                    queries < requested.queries,
                    abs(queries - requested.queries),
                )
            )
            settings += [Setting(queries, work // queries, precision) for queries in splits]
            work //= 2
    return tuple(dict.fromkeys(settings))


def choose(settings: Sequence[Setting], price: Callable[[Setting], Price], *, step_s: float | None = None) -> Setting:
    """Return the first setting that fits in memory and in `step_s` seconds (None: no limit), or else the fastest that
    fits in memory.

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
            f"A step of {settings[0].queries} queries of {settings[0].batch_size} samples was to be adapted to "
            "the devices.",
            f"Even with the smallest of {len(settings)} settings, {least / 1e6:,.1f} MB of memory are missing.",
            "Add a device, raise its memory, lower max_length, or choose a smaller model.",
        )
    return fastest
