"""Adapt P-RGE to its device: choose queries and batch by profile, memory and pace (section 6, third limitation).

This module has pure functions; policy.py carries out its decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_QUERIES = 16
"""The paper's largest q.  With more queries, each query sees less than one sample of a batch of 16 (section 4.1)."""


class Setting(NamedTuple):
    """The settings of a step that may be adapted: q queries of E samples."""

    queries: int
    batch_size: int

    @property
    def passes(self) -> int:
        """Return q x E, the paper's constant B: half the number of samples in a step's forward passes."""
        return self.queries * self.batch_size


def candidates(requested: Setting) -> tuple[Setting, ...]:
    """Return the settings that may replace the requested one, in order of preference.

    Settings with the requested work q x E come first, then those with half of it, and so on.  Within the same work, the
    requested q comes first, then more queries with fewer samples each (Tables 1 and 2: at a constant q x E they train
    better), then fewer queries.
    """
    settings: list[Setting] = []
    work = requested.passes
    while work >= 1:
        splits = [
            queries for queries in range(1, min(work, max(MOST_QUERIES, requested.queries)) + 1) if work % queries == 0
        ]
        splits.sort(
            key=lambda queries: (
                queries != requested.queries,
                queries < requested.queries,
                abs(queries - requested.queries),
            )
        )
        settings += [Setting(queries, work // queries) for queries in splits]
        work //= 2
    return tuple(settings)


def choose(settings: Sequence[Setting], seconds: Callable[[Setting], float], *, step_s: float | None = None) -> Setting:
    """Return the first setting whose step fits in memory and in `step_s` seconds (None: no limit), or else the fastest
    that fits in memory, or else the last.

    seconds: a step's seconds; infinity if it fits in no device's memory.
    """
    limit_s = math.inf if step_s is None else step_s
    seconds_of = {}
    for setting in settings:
        seconds_of[setting] = seconds(setting)
        if seconds_of[setting] <= limit_s and math.isfinite(seconds_of[setting]):
            return setting
    fastest = min(settings, key=seconds_of.__getitem__)
    return fastest if math.isfinite(seconds_of[fastest]) else settings[-1]
