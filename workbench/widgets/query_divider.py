"""Divide a step's queries among unequal devices by hand, beside the planner's division (our extension of P-RGE, Algorithm 1, line 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import ipywidgets as widgets

from workbench.plots.stacked import stacked_bars
from workbench.plots.style import time_unit
from workbench.widgets.controls import BIG_FIRST, button, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.query_problem import QueryProblem


class QueryDivider(Explorer):
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
            described(widgets.IntSlider, device.name, f"{device.name}: queries of each step", width="30em", value=count, min=0, max=queries)
            for device, count in zip(problem.cluster.devices, counts or equal, strict=True)
        )
        self.take_plan = button(
            "Planner's division", "Set the sliders as the planner has it", "magic", self._take_plan, layout=widgets.Layout(width="14em")
        )
        self.take_plan.disabled = self.planned is None
        super().__init__([*self.sliders, self.take_plan], self.sliders, lambda: self.counts, self._divide, refused="Not a step yet.")

    @property
    def counts(self) -> tuple[int, ...]:
        """Return every device's queries, whether or not they are all of the step's."""
        return tuple(slider.value for slider in self.sliders)

    def _take_plan(self) -> None:
        assert self.planned is not None
        with self.setting():
            for slider, count in zip(self.sliders, self.planned, strict=True):
                slider.value = count

    def _divide(self, counts: tuple[int, ...]) -> None:
        problem = self.problem
        problem.divided(counts)  # refuses what is no division
        seconds = problem.device_seconds(counts)
        names = [device.name for device in problem.cluster.devices]
        lacking = [name for name, taken in zip(names, seconds, strict=True) if math.isinf(taken)]
        if lacking:
            self.message.error(f"{', '.join(lacking)}: not enough memory for the model.")
            self.headline.value = BIG_FIRST.format("Out of memory.", "")
            self.show()
            return
        whole_s = problem.seconds(counts)
        unit = time_unit(whole_s)
        waits = [max(seconds) - one for one in seconds]
        against = f" ({whole_s / self._planned_s - 1:+.1%} against the planner)"
        divided = f"queries {'-'.join(map(str, counts))} on {sum(map(bool, counts))} devices (simulated)"
        self.headline.value = BIG_FIRST.format(f"{unit.text(whole_s)} a step{against}", divided)
        parts = {"its queries": [one * unit.factor for one in seconds], "waiting": [one * unit.factor for one in waits]}
        subtitle = f"{problem.profile.model}, q = {problem.size.queries}, E = {problem.size.batch_size}"
        title = "Until all losses are known"
        self.show(lambda: stacked_bars(names, parts, title=title, label="simulated", x_title=unit.name, subtitle=subtitle))
