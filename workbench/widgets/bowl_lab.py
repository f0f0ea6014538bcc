"""Walk down a bowl by forward passes only: every control moves the queries, every step shows what they say (P-RGE, section 2)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from workbench.core.errors import ConfigError
from workbench.plots.zeroth_order_bowl import bowl as draw_bowl
from workbench.widgets.bowl import BITS, Bowl, Descent, mean_of
from workbench.widgets.controls import BIG_FIRST, FigureBox, Html, Message, Panel, button, described

QUERIES = (1, 2, 4, 8, 16, 64)
EPSILONS = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)
RATES = (0.03, 0.1, 0.3, 1.0)
STRETCHES = (1.0, 4.0, 16.0)
RIPPLES = (0.0, 0.03, 0.1)
MANY = 10


class BowlLab(Panel):
    """A bowl from above with the queries of the step to come.

    descent: the walk so far.  A changed control keeps the path and asks again at its last point.
    """

    def __init__(
        self, bowl: Bowl | None = None, *, queries: int = 4, epsilon: float = 0.3, learning_rate: float = 0.3, seed: int = 0
    ) -> None:
        bowl = bowl or Bowl()
        self.queries = _slider("Queries q", QUERIES, queries, "Random directions of a step; each takes two forward passes")
        self.epsilon = _slider("Epsilon", EPSILONS, epsilon, "How far from theta the loss is asked for, in units of the noise")
        self.learning_rate = _slider("Learning rate", RATES, learning_rate, "How far a step goes")
        self.stretch = _slider("Stretch", STRETCHES, bowl.stretch, "How much steeper the bowl is upwards than sideways")
        self.ripple = _slider("Ripple", RIPPLES, bowl.ripple, "Small waves on the bowl, which a wide enough epsilon averages out")
        told = "In which type a forward pass gives its loss"
        self.precision = described(widgets.Dropdown, "Losses in", told, options=tuple(BITS), value=bowl.precision)
        self.message, self.headline, self.figure = Message(), Html(), FigureBox()
        self._buttons = [
            button("One step", "Go one step against the mean of the queries", "step-forward", lambda: self.walk(1), "success"),
            button("Ten steps", "Go ten steps", "forward", lambda: self.walk(MANY), "success"),
            button("Other noise", "Draw other directions at this point", "random", self._other_noise),
            button("Start again", "Go back to the first point", "undo", self._start_again),
        ]
        self.descent = Descent(bowl=bowl, queries=queries, epsilon=epsilon, learning_rate=learning_rate, seed=seed)
        self._passes = 0
        for control in self._controls:
            control.observe(lambda _: self._changed(), names="value")
        columns = [widgets.VBox(self._controls[:3]), widgets.VBox(self._controls[3:])]
        rows = [widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap")), widgets.HBox(self._buttons)]
        super().__init__([*rows, self.message, self.headline, self.figure])
        self._draw()

    @property
    def _controls(self) -> list[Any]:
        return [self.queries, self.epsilon, self.learning_rate, self.stretch, self.ripple, self.precision]

    @property
    def angle(self) -> float:
        """Return the degrees between the estimate and the exact gradient at the last point; 180 if the queries say nothing."""
        return degrees_between(mean_of(self.descent.probes), self.descent.bowl.gradient(*self.descent.path[-1]))

    def walk(self, steps: int) -> None:
        """Go so many steps; a walk that leaves the bowl ends there."""
        self.message.clear()
        for _ in range(steps):
            self.descent.step()
            self._passes += 2 * self.descent.queries
            if math.hypot(*self.descent.path[-1]) > 1e3:
                self.descent.path.pop()
                self.message.error("The steps grow and leave the bowl. Take a smaller learning rate, or more queries, and start again.")
                break
        self._draw()

    def _changed(self) -> None:
        try:
            self.descent.bowl = Bowl(stretch=self.stretch.value, ripple=self.ripple.value, precision=self.precision.value)
            self.descent.queries, self.descent.epsilon = self.queries.value, self.epsilon.value
            self.descent.learning_rate = self.learning_rate.value
            self._draw()
        except ConfigError as error:  # a callback's error would be seen by nobody
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
        probes, at = walk.probes, walk.path[-1]
        exact, mean = walk.bowl.gradient(*at), mean_of(probes)
        ratio = math.hypot(*mean) / max(math.hypot(*exact), 1e-9)
        smooth = replace(walk.bowl, precision="float32")
        self.figure.show(draw_bowl(smooth.height, walk.path, probes, gradient=exact, epsilon=walk.epsilon))
        said = (
            f"{degrees_between(mean, exact):.0f}° beside the exact gradient, {ratio:.2f} times as long"
            if any(mean)
            else "both losses alike: no slope seen"
        )
        steps = f"{len(walk.path) - 1} steps, {self._passes} forward passes, no backward pass"
        self.headline.value = BIG_FIRST.format(said, f"loss {walk.bowl.height(*at):.3f} after {steps}")


def degrees_between(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the angle between two directions in degrees; 180 if one of them has no length."""
    lengths = math.hypot(*one) * math.hypot(*other)
    if not lengths:
        return 180.0
    return math.degrees(math.acos(max(-1.0, min(1.0, (one[0] * other[0] + one[1] * other[1]) / lengths))))


def _slider(description: str, values: tuple[Any, ...], value: Any, tooltip: str) -> widgets.SelectionSlider:
    options = [(f"{one:g}", one) for one in sorted({*values, value})]
    return described(widgets.SelectionSlider, description, tooltip, width="30em", options=options, value=value)
