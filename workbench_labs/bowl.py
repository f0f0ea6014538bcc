"""A bowl to descend into by zeroth-order gradients, step by step (P-RGE, section 2)."""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import ipywidgets as widgets
import torch

from workbench.core.errors import ConfigError
from workbench.core.names import FLOAT_TYPES
from workbench.methods.p_rge.seeds import query_seed
from workbench.widgets.controls import Headline, Message, Panel, button
from workbench.widgets.fields import lab_controls
from workbench.widgets.figure_box import FigureBox
from workbench_labs.plots.zeroth_order import Point, Probe
from workbench_labs.plots.zeroth_order import bowl as draw_bowl

_WAVES = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bowl:
    """L(x, y) = 1 + (x^2 + stretch y^2) / 8 + ripple (2 - cos 5x - cos 5y).

    The 1 is the part of a language model's loss that training cannot remove.  precision: the dtype in which a loss is
    returned; the arithmetic is exact.
    """

    stretch: float = 4.0
    ripple: float = 0.0
    precision: str = "float32"

    def __post_init__(self) -> None:
        if self.stretch <= 0 or self.ripple < 0 or self.precision not in FLOAT_TYPES:
            raise ConfigError(
                f"A bowl with stretch {self.stretch}, ripple {self.ripple} and losses in {self.precision} was "
                "asked for.",
                f"They must be above 0, at least 0, and one of {', '.join(FLOAT_TYPES)}.",
                "Change them.",
            )

    def height(self, x: float, y: float) -> float:
        """Return the exact loss."""
        return 1 + (x * x + self.stretch * y * y) / 8 + self.ripple * (2 - math.cos(_WAVES * x) - math.cos(_WAVES * y))

    def loss(self, x: float, y: float) -> float:
        """Return the loss as a forward pass in `precision` returns it."""
        return float(torch.tensor(self.height(x, y), dtype=getattr(torch, self.precision)))

    def gradient(self, x: float, y: float) -> Point:
        """Return the exact gradient."""
        return (
            x / 4 + self.ripple * _WAVES * math.sin(_WAVES * x),
            self.stretch * y / 4 + self.ripple * _WAVES * math.sin(_WAVES * y),
        )


Rows = list[list[float]]
"""A row per query: its losses, or its direction."""
Estimate = Callable[[Rows, Rows, float], Sequence[float]]
"""(losses, noise, epsilon) -> the estimated gradient (d,).  losses: (q, 2), plus and minus; noise: (q, d)."""


def ask(bowl: Bowl, point: Point, *, queries: int, epsilon: float, seed: int, step: int) -> tuple[Rows, Rows]:
    """Return a step's losses (q, 2), at theta + epsilon z and theta - epsilon z, and its noise z (q, 2) (Algorithm 1,
    lines 4-9).
    """
    if queries < 1 or not epsilon > 0:
        raise ConfigError(
            f"{queries} queries with epsilon {epsilon} were asked for.",
            "1 and a number above 0 are the least.",
            "Raise them.",
        )
    draws = [random.Random(query_seed(seed, step, query)) for query in range(queries)]
    noise = [[draw.gauss(0, 1), draw.gauss(0, 1)] for draw in draws]
    losses = [
        [bowl.loss(point[0] + side * epsilon * x, point[1] + side * epsilon * y) for side in (1, -1)] for x, y in noise
    ]
    return losses, noise


def probes_of(losses: Rows, noise: Rows, epsilon: float) -> list[Probe]:
    """Return each query's direction, and the slope along it from its two losses (Algorithm 1, line 10)."""
    return [Probe((z[0], z[1]), (plus - minus) / (2 * epsilon)) for (plus, minus), z in zip(losses, noise, strict=True)]


def mean_of(probes: Sequence[Probe]) -> Point:
    """Return the estimated gradient: the mean of g z (section 2)."""
    x, y = (sum(probe.slope * probe.direction[axis] for probe in probes) / len(probes) for axis in (0, 1))
    return x, y


def mean_slope(losses: Rows, noise: Rows, epsilon: float) -> list[float]:
    """Return the estimated gradient (see Estimate): the mean of slope times noise."""
    slopes = [(plus - minus) / (2 * epsilon) for plus, minus in losses]
    return [
        sum(slope * z for slope, z in zip(slopes, along, strict=True)) / len(slopes)
        for along in zip(*noise, strict=True)
    ]


@dataclass(slots=True, kw_only=True)
class Descent:
    """A descent into a bowl, step by step.  path: its points; the first one is the start.  estimate: estimates the
    gradient from losses and noise.
    """

    bowl: Bowl
    queries: int = 4
    epsilon: float = 0.3
    learning_rate: float = 0.3
    seed: int = 0
    estimate: Estimate = mean_slope
    path: list[Point] = field(default_factory=lambda: [(-4.2, 1.9)])

    def ask(self) -> tuple[Rows, Rows]:
        """Return the losses and the noise of the queries at the path's last point (see `ask`)."""
        point, step = self.path[-1], len(self.path) - 1
        return ask(self.bowl, point, queries=self.queries, epsilon=self.epsilon, seed=self.seed, step=step)

    @property
    def probes(self) -> list[Probe]:
        """Return the queries at the path's last point."""
        return probes_of(*self.ask(), self.epsilon)

    def step(self) -> None:
        """Go one step against the estimate (Algorithm 1, line 14)."""
        x, y = self.path[-1]
        way = self.estimate(*self.ask(), self.epsilon)
        self.path.append((x - self.learning_rate * way[0], y - self.learning_rate * way[1]))


def bearable_rate(queries: int) -> float:
    """Return a learning rate that so many queries bear on the bowl: the fewer, the longer is their estimate."""
    return 1.0 / (1 + 3 / queries)


def descents(
    bowl: Bowl,
    queries: Sequence[int],
    *,
    passes: int,
    learning_rate: Callable[[int], float] = bearable_rate,
    repeats: int,
    estimate: Estimate = mean_slope,
) -> dict[str, list[tuple[float, float]]]:
    """Return, for each number of queries, the loss over the number of forward passes: medians of `repeats` descents.

    passes: forward passes of the whole descent; a step takes 2q.  learning_rate: a function of the number of queries.
    estimate: estimates the gradient from losses and noise.
    """
    curves = {}
    for count in queries:
        settings: dict[str, Any] = {"bowl": bowl, "queries": count, "epsilon": 0.01, "estimate": estimate}
        settings["learning_rate"] = learning_rate(count)
        walks = [Descent(**settings, seed=seed) for seed in range(repeats)]
        points = []
        for step in range(passes // (2 * count) + 1):
            points.append((2.0 * count * step, median(bowl.height(*walk.path[-1]) for walk in walks)))
            for walk in walks:
                walk.step()
        curves[f"q = {count}"] = points
    return curves


MANY = 10


class BowlLab(Panel):
    """A bowl from above with the queries of the next step.

    descent: the descent so far.  When a control changes, the path stays and its last point gets new queries.
    """

    def __init__(self, bowl: Bowl, *, queries: int = 4, seed: int = 0) -> None:
        self.descent = Descent(bowl=bowl, queries=queries, seed=seed)
        start = self.descent
        self._controls = self.queries, self.epsilon, self.learning_rate, self.stretch, self.ripple, self.precision = (
            lab_controls(
                "bowl",
                **{name: getattr(start, name) for name in ("queries", "epsilon", "learning_rate")},
                **{name: getattr(bowl, name) for name in ("stretch", "ripple", "precision")},
            )
        )
        self.message, self.headline, self.figure = Message(), Headline(), FigureBox()
        self._buttons = [
            button(
                "One step",
                "Go one step against the mean of the queries",
                "step-forward",
                lambda: self.walk(1),
                "success",
            ),
            button("Ten steps", "Go ten steps", "forward", lambda: self.walk(MANY), "success"),
            button("Other noise", "Draw other directions at this point", "random", self._other_noise),
            button("Start again", "Go back to the first point", "undo", self._start_again),
        ]
        self._passes = 0
        for control in self._controls:
            control.observe(lambda _: self._changed(), names="value")
        columns = [widgets.VBox(self._controls[:3]), widgets.VBox(self._controls[3:])]
        rows = [widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap")), widgets.HBox(self._buttons)]
        super().__init__([*rows, self.message, self.headline, self.figure])
        self._draw()

    def walk(self, steps: int) -> None:
        """Make a number of steps; a descent that leaves the bowl ends there."""
        self.message.clear()
        for _ in range(steps):
            self.descent.step()
            self._passes += 2 * self.descent.queries
            if math.hypot(*self.descent.path[-1]) > 1e3:
                self.descent.path.pop()
                self.message.error(
                    "The steps grow and leave the bowl. Take a smaller learning rate, or more queries, and start again."
                )
                break
        self._draw()

    def _changed(self) -> None:
        try:
            self.descent.bowl = Bowl(
                stretch=self.stretch.value, ripple=self.ripple.value, precision=self.precision.value
            )
            self.descent.queries, self.descent.epsilon = self.queries.value, self.epsilon.value
            self.descent.learning_rate = self.learning_rate.value
            self._draw()
        except ConfigError as error:  # nobody would see the error of a callback
            self.message.show_exception(error)

    def _other_noise(self) -> None:
        self.descent.seed += 1
        self._draw()

    def _start_again(self) -> None:
        self.message.clear()
        del self.descent.path[1:]
        self._passes = 0
        self._draw()

    def _draw(self) -> None:
        walk = self.descent
        probes, point = walk.probes, walk.path[-1]
        exact, mean = walk.bowl.gradient(*point), mean_of(probes)
        ratio = math.hypot(*mean) / max(math.hypot(*exact), 1e-9)
        smooth = replace(walk.bowl, precision="float32")
        self.figure.show(draw_bowl(smooth.height, walk.path, probes, gradient=exact, epsilon=walk.epsilon))
        text = (
            f"{abs(math.degrees(cmath.phase(complex(*mean) / complex(*exact)))):.0f}° beside the exact gradient, "
            f"{ratio:.2f} times as long"
            if any(mean)
            else "both losses alike: no slope seen"
        )
        steps = f"{len(walk.path) - 1} steps, {self._passes} forward passes, no backward pass"
        self.headline.say(text, f"loss {walk.bowl.height(*point):.3f} after {steps}")
