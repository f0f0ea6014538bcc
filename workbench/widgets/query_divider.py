"""Divide a step's queries among unequal devices by hand, beside the planner's division (our extension of P-RGE, Algorithm 1, line 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets

from workbench.core.errors import WorkbenchError
from workbench.plots.stacked import stacked_bars
from workbench.plots.style import time_unit
from workbench.widgets.controls import BIG_FIRST, WIDE, FigureBox, Html, Message
from workbench.widgets.query_problem import QueryProblem


class QueryDivider(widgets.VBox):
    """A slider for each device's queries; what each of them computes and how long it waits.

    counts: as the sliders have them.  planned: the planner's division, None if it takes a chain of stages instead.
    """

    def __init__(self, problem: QueryProblem, counts: Sequence[int] | None = None) -> None:
        self.problem = problem
        made = problem.planned()
        self.planned = problem.counts(made) if len(made.stages) == 1 else None
        self._planned_s = made.total_s if self.planned is None else problem.seconds(self.planned)
        queries, size = problem.size.queries, problem.cluster.world_size
        equal = [queries // size + (rank < queries % size) for rank in range(size)]
        self.sliders = tuple(
            widgets.IntSlider(
                value=count,
                min=0,
                max=queries,
                description=device.name,
                tooltip=f"{device.name}: queries of each step",
                style=WIDE,
                layout=widgets.Layout(width="30em"),
            )
            for device, count in zip(problem.cluster.devices, counts or equal, strict=True)
        )
        self.take_plan = widgets.Button(
            description="Planner's division",
            tooltip="Set the sliders as the planner has it",
            icon="magic",
            layout=widgets.Layout(width="14em"),
        )
        self.take_plan.disabled = self.planned is None
        self.message, self.headline, self.figure = Message(), Html(), FigureBox()
        self._paused = False
        for slider in self.sliders:
            slider.observe(lambda _: self._changed(), names="value")
        self.take_plan.on_click(lambda _: self._take_plan())
        super().__init__([*self.sliders, self.take_plan, self.message, self.headline, self.figure])
        self._changed()

    @property
    def counts(self) -> tuple[int, ...]:
        """Return every device's queries, whether or not they are all of the step's."""
        return tuple(slider.value for slider in self.sliders)

    def _take_plan(self) -> None:
        assert self.planned is not None
        self._paused = True
        for slider, count in zip(self.sliders, self.planned, strict=True):
            slider.value = count
        self._paused = False
        self._changed()

    def _changed(self) -> None:
        if self._paused:
            return
        try:
            self._show()
        except WorkbenchError as error:
            self.message.error(f"{error}")
            self.headline.value = BIG_FIRST.format("Not a step yet.", "")

    def _show(self) -> None:
        problem, counts = self.problem, self.counts
        problem.divided(counts)  # refuses what is no division
        seconds = problem.device_seconds(counts)
        names = [device.name for device in problem.cluster.devices]
        lacking = [name for name, taken in zip(names, seconds, strict=True) if math.isinf(taken)]
        if lacking:
            self.message.error(f"{', '.join(lacking)}: not enough memory for the model.")
            self.headline.value = BIG_FIRST.format("Out of memory.", "")
            return
        self.message.clear()
        whole_s = problem.seconds(counts)
        unit = time_unit(whole_s)
        waits = [max(seconds) - one for one in seconds]
        against = f" ({whole_s / self._planned_s - 1:+.1%} against the planner)"
        divided = f"queries {'-'.join(map(str, counts))} on {sum(map(bool, counts))} devices (simulated)"
        self.headline.value = BIG_FIRST.format(f"{unit.text(whole_s)} a step{against}", divided)
        parts = {"its queries": [one * unit.factor for one in seconds], "waiting": [one * unit.factor for one in waits]}
        subtitle = f"{problem.profile.model}, q = {problem.size.queries}, E = {problem.size.batch_size}"
        self.figure.show(
            stacked_bars(names, parts, title="Until all losses are known", label="simulated", x_title=unit.name, subtitle=subtitle)
        )
