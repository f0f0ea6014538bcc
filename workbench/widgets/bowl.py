"""A bowl in two dimensions, small enough to draw, and Algorithm 1 of P-RGE on it (section 2)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from workbench.core.errors import ConfigError
from workbench.core.seeds import query_seed
from workbench.plots.zeroth_order_bowl import Point, Probe

BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
"""Significant bits of each type."""

_WAVES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bowl:
    """L(x, y) = 1 + (x^2 + stretch y^2) / 8 + ripple (2 - cos 5x - cos 5y).

    The 1 stands for what a language model's loss never loses.  precision: the type in which a loss is given; the arithmetic is exact.
    """

    stretch: float = 4.0
    ripple: float = 0.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.stretch <= 0 or self.ripple < 0 or self.precision not in BITS:
            raise ConfigError(
                f"A bowl with stretch {self.stretch}, ripple {self.ripple} and losses in {self.precision} was asked for.",
                f"They must be above 0, at least 0, and one of {', '.join(BITS)}.",
                "Change them.",
            )

    def height(self, x: float, y: float) -> float:
        """Return the loss, exact."""
        return 1 + (x * x + self.stretch * y * y) / 8 + self.ripple * (2 - math.cos(_WAVES * x) - math.cos(_WAVES * y))

    def loss(self, x: float, y: float) -> float:
        """Return the loss as a forward pass in `precision` gives it."""
        return rounded(self.height(x, y), BITS[self.precision])

    def gradient(self, x: float, y: float) -> Point:
        """Return the exact gradient."""
        return (
            x / 4 + self.ripple * _WAVES * math.sin(_WAVES * x),
            self.stretch * y / 4 + self.ripple * _WAVES * math.sin(_WAVES * y),
        )


def rounded(value: float, bits: int) -> float:
    """Return a value with so many significant bits."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def probe(bowl: Bowl, at: Point, *, queries: int, epsilon: float, seed: int, step: int) -> list[Probe]:
    """Return a step's queries: random directions and the slopes that two losses each show (Algorithm 1, lines 4-11)."""
    if queries < 1 or not epsilon > 0:
        raise ConfigError(
            f"{queries} queries with epsilon {epsilon} were asked for.", "1 and a number above 0 are the least.", "Raise them."
        )
    found = []
    for query in range(queries):
        draw = random.Random(query_seed(seed, step, query))
        z = (draw.gauss(0, 1), draw.gauss(0, 1))
        plus, minus = (bowl.loss(at[0] + side * epsilon * z[0], at[1] + side * epsilon * z[1]) for side in (1, -1))
        found.append(Probe(z, (plus - minus) / (2 * epsilon)))
    return found


def mean_of(probes: Sequence[Probe]) -> Point:
    """Return the estimated gradient: the mean of g z (section 2)."""
    x, y = (sum(one.slope * one.direction[axis] for one in probes) / len(probes) for axis in (0, 1))
    return x, y


@dataclass(slots=True, kw_only=True)
class Descent:
    """A walk down a bowl, step after step.  path: of points, the first one is where it starts."""

    bowl: Bowl
    queries: int = 4
    epsilon: float = 0.3
    learning_rate: float = 0.3
    seed: int = 0
    path: list[Point] = field(default_factory=lambda: [(-4.2, 1.9)])

    @property
    def probes(self) -> list[Probe]:
        """Return the queries at the path's last point."""
        return probe(self.bowl, self.path[-1], queries=self.queries, epsilon=self.epsilon, seed=self.seed, step=len(self.path) - 1)

    def step(self) -> None:
        """Go one step against the estimate (Algorithm 1, line 14)."""
        x, y = self.path[-1]
        way = mean_of(self.probes)
        self.path.append((x - self.learning_rate * way[0], y - self.learning_rate * way[1]))


def descents(
    bowl: Bowl, queries: Sequence[int], *, passes: int, learning_rate: Callable[[int], float], epsilon: float = 0.01, repeats: int = 25
) -> dict[str, list[tuple[float, float]]]:
    """Return, for each number of queries, the loss over the forward passes that were spent: medians of `repeats` walks.

    passes: in all; a step takes 2q of them.  learning_rate: of a number of queries.
    """
    found = {}
    for count in queries:
        walks = [
            Descent(bowl=bowl, queries=count, epsilon=epsilon, learning_rate=learning_rate(count), seed=seed) for seed in range(repeats)
        ]
        points = []
        for step in range(passes // (2 * count) + 1):
            points.append((2.0 * count * step, median(bowl.height(*walk.path[-1]) for walk in walks)))
            for walk in walks:
                walk.step()
        found[f"q = {count}"] = points
    return found
