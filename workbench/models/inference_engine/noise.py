"""Noise that needs no torch: a counter-based generator for each query (Philox; Salmon et al., SC 2011).

Equality of two runs needs the same stream: this one, or torch's (`Trainables.noise`), never one of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workbench.models.zeroth_order.step_log import StepLog

NoiseOf = Callable[[int, int], Any]
"""(seed, D) -> standard normals (D,) float32, the same each time."""


def philox_noise(seed: int, size: int) -> Any:
    """Return standard normals (size,) float32 of a query's seed."""
    return np.random.Generator(np.random.Philox(seed)).standard_normal(size, dtype=np.float32)


def replayed(theta: Any, logs: Sequence[StepLog], noise_of: NoiseOf = philox_noise) -> Any:
    """Return what theta (D,) float32 becomes by logged steps (Algorithm 1, line 14), as a new array."""
    moved = np.array(theta, dtype=np.float32)
    for log in logs:
        for seed, gradient in zip(log.seeds, log.gradients, strict=True):
            moved -= np.float32(log.learning_rate * gradient / len(log.seeds)) * noise_of(seed, len(moved))
    return moved
