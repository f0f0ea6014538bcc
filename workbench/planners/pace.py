"""Detect lasting changes of a device's or a link's speed during a run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from workbench.core.cluster import Factors


@dataclass(kw_only=True)
class Pace:
    """Detects lasting changes of a device's or a link's speed, by each step's seconds relative to the plan's
    expectation.

    window: the number of steps considered; more, if these together take less than least_s to compute: what passes
    within moments is noise.
    threshold: smaller changes of the median, in either direction, are ignored (hysteresis).
    repeats: a device is slower as soon as so many of its last `window` steps are, by more than the threshold; None: a
    change is one of the median of a full window.
    If all devices of a cluster slow down by the same factor, that is a change too: the prediction of its step changes.
    """

    window: int = 5
    threshold: float = 1.3
    least_s: float = 0.0
    repeats: int | None = None
    factors: dict[Any, float] = field(default_factory=dict)
    """The assumed slow-down of a device relative to its profile, by rank, or of a link, by 'sender>receiver'; 1 if
    missing."""
    _samples: dict[Any, deque[tuple[float, float]]] = field(default_factory=dict)

    def observe(self, rank: int | str, busy_s: float, expected_s: float) -> None:
        """Record one step of a device, or a link's fastest message in it.  expected_s: as described, at full speed."""
        if busy_s > 0 and expected_s > 0:
            samples = self._samples.setdefault(rank, deque())
            samples.append((busy_s, busy_s / expected_s))
            while len(samples) > self.window and sum(seconds for seconds, _ in samples) - samples[0][0] >= self.least_s:
                samples.popleft()

    def changed(self) -> dict[Any, float]:
        """Return the devices and links whose last `window` steps give a slow-down different from the assumed one, with
        the new value.
        """
        factors = {}
        for rank, samples in self._samples.items():
            if sum(seconds for seconds, _ in samples) < self.least_s:
                continue
            if self.repeats is not None:
                if len(self._slower(rank)) >= self.repeats:
                    factors[rank] = self.slowness(rank)
            elif len(samples) >= self.window:
                factor, planned = median(ratio for _, ratio in samples), self.factors.get(rank, 1.0)
                if max(factor / planned, planned / factor) > self.threshold:
                    factors[rank] = factor
        return factors

    def slowness(self, rank: int | str) -> float:
        """Return the median slow-down of a device's last steps that were too slow, of all its last steps if none was; 1
        without any.
        """
        return median(self._slower(rank) or self.lately(rank) or [1.0])

    def lately(self, rank: int | str) -> list[float]:
        """Return the slow-down of a device or link in each of its last `window` steps since the last change, the newest
        last.
        """
        return [ratio for _, ratio in self._samples.get(rank, ())]

    def _slower(self, rank: int | str) -> list[float]:
        return [ratio for ratio in self.lately(rank) if ratio > self.threshold * self.factors.get(rank, 1.0)]

    def accept(self, factors: Factors) -> None:
        """Assume these factors from now on, and discard earlier observations."""
        self.factors.update(factors)
        self._samples.clear()
