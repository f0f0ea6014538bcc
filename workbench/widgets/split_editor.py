"""Split a model among devices by hand, and see at once what a step would take, beside the planner's plan, and whether memory suffices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.errors import WorkbenchError
from workbench.core.plan import Plan, proportional_ranges
from workbench.plots import gantt, needs, placement
from workbench.widgets.controls import BIG_FIRST, WIDE, FigureBox, Html, Message
from workbench.widgets.latest import Latest
from workbench.widgets.planning import PlanningProblem

IDLE = "idle"
DISPATCH = {"by Eq. 4": "best", "by speed": "speed", "equally": "equal"}


class SplitEditor(widgets.VBox):
    """Sliders for the ends of the stages, and for each device the stage that it works for.

    plan: as the controls have it, fitting or not; reading it raises ConfigError for what is no plan (a stage without a device).
    planned: the planner's plan, which yours is compared with.  layers, groups: what to begin with, the planner's if not given.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        *,
        layers: Sequence[int] | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        planner: str = "Algorithm 1",
    ) -> None:
        self.problem = problem
        self.planned: Plan = problem.planned(planner)
        self._planned_s = problem.step_s(self.planned)
        self._paused = False
        most = min(problem.cluster.world_size, problem.profile.num_layers)
        self.num_stages = widgets.IntSlider(
            value=1, min=1, max=most, description="Stages", tooltip="How many stages the layers are cut into", style=WIDE
        )
        self.dispatch = widgets.Dropdown(
            options=list(DISPATCH), description="Samples", tooltip="How a group divides the samples of a micro-batch", style=WIDE
        )
        self.ends = widgets.VBox()
        self.devices = tuple(widgets.ToggleButtons(style={"button_width": "5.5em"}) for _ in problem.cluster.devices)
        self.take_plan = _button("Planner's plan", "Set everything as the planner has it", "magic")
        self.even = _button("Even", "Equal stages, devices in turn", "align-justify")
        self.message, self.headline = Message(), Html()
        self.tabs = widgets.Tab([FigureBox(), FigureBox(), FigureBox()], titles=["Where (layers)", "When (Gantt chart)", "Memory"])
        self._latest: Latest[tuple[Plan, int]] = Latest(self._work)
        if layers is None or groups is None:
            self._set(*_shape(self.planned))
        else:
            problem.by_hand(layers, groups)  # refuses what is no plan
            self._set(layers, groups)
        self.num_stages.observe(lambda change: self._restage(change["new"]), names="value")
        for control in (self.dispatch, *self.devices):
            control.observe(lambda _: self._changed(), names="value")
        self.tabs.observe(lambda _: self._changed(), names="selected_index")
        self.take_plan.on_click(lambda _: self._take_plan())
        self.even.on_click(lambda _: self._restage(self.num_stages.value))
        names = [Html(Markup("<b>{}</b>").format(device.name), layout=widgets.Layout(width="9em")) for device in problem.cluster.devices]
        rows = [widgets.HBox([name, choice]) for name, choice in zip(names, self.devices, strict=True)]
        controls = [widgets.HBox([self.num_stages, self.dispatch, self.take_plan, self.even]), self.ends, *rows]
        super().__init__([*controls, self.headline, self.message, self.tabs])
        self.wait()

    @property
    def layers(self) -> list[int]:
        """Return the number of layers of each stage."""
        ends = [0, *(slider.value for slider in self.ends.children), self.problem.profile.num_layers]
        return [stop - start for start, stop in itertools.pairwise(ends)]

    @property
    def groups(self) -> list[list[int]]:
        """Return the ranks of each stage."""
        return [[rank for rank, choice in enumerate(self.devices) if choice.value == stage] for stage in range(self.num_stages.value)]

    @property
    def plan(self) -> Plan:
        """Return the plan that the controls describe.  Raises ConfigError if they describe none."""
        return self.problem.by_hand(self.layers, self.groups, dispatch=DISPATCH[self.dispatch.value])  # type: ignore[arg-type]

    def wait(self) -> None:
        """Wait until what is shown belongs to what the controls say."""
        self._latest.wait()

    def _take_plan(self) -> None:
        self.dispatch.value = "by Eq. 4"
        self._set(*_shape(self.planned))

    def _restage(self, count: int) -> None:
        """Cut evenly into `count` stages, with the devices in turn."""
        whole, world_size = self.problem.profile.num_layers, self.problem.cluster.world_size
        layers = [end - first for first, end in proportional_ranges(whole, (1,) * count)]
        self._set(layers, [range(first, end) for first, end in proportional_ranges(world_size, (1,) * count)])

    def _set(self, layers: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Set every control."""
        self._paused = True
        try:
            self.num_stages.value = len(layers)
            ends = [sum(layers[: index + 1]) for index in range(len(layers) - 1)]
            self.ends.children = [self._end(index, end) for index, end in enumerate(ends)]
            options = [(IDLE, -1)] + [(f"stage {stage}", stage) for stage in range(len(layers))]
            for rank, choice in enumerate(self.devices):
                choice.options = options
                name = self.problem.cluster.devices[rank].name
                choice.tooltips = [f"{name} does nothing" if stage < 0 else f"{name} works for stage {stage}" for _, stage in options]
                choice.value = next((stage for stage, group in enumerate(groups) if rank in group), -1)
        finally:
            self._paused = False
        self._changed()

    def _end(self, index: int, value: int) -> widgets.IntSlider:
        whole = self.problem.profile.num_layers
        slider = widgets.IntSlider(
            value=value,
            min=1,
            max=whole - 1,
            description=f"Stage {index} ends",
            tooltip=f"Stage {index} has the layers before this one",
            style=WIDE,
            layout=widgets.Layout(width="40em"),
        )
        slider.observe(lambda change: self._moved(index, change["new"]), names="value")
        return slider

    def _moved(self, index: int, value: int) -> None:
        """Push the other ends along, so that no stage becomes empty."""
        if self._paused:
            return
        self._paused = True
        try:
            sliders, whole = self.ends.children, self.problem.profile.num_layers
            sliders[index].value = min(max(value, index + 1), whole - (len(sliders) - index))
            for other in range(index + 1, len(sliders)):
                sliders[other].value = max(sliders[other].value, sliders[other - 1].value + 1)
            for other in range(index - 1, -1, -1):
                sliders[other].value = min(sliders[other].value, sliders[other + 1].value - 1)
        finally:
            self._paused = False
        self._changed()

    def _changed(self) -> None:
        if self._paused:
            return
        try:
            self._latest.ask((self.plan, self.tabs.selected_index or 0))
        except WorkbenchError as error:
            self.headline.value = ""
            self.message.show_exception(error)

    def _work(self, request: tuple[Plan, int]) -> None:
        try:
            self._show(*request)
        except Exception as error:  # a thread's error would be seen by nobody
            self.message.show_exception(error)

    def _show(self, made: Plan, tab: int) -> None:
        problem, refusals = self.problem, self.problem.refusals(made)
        timeline = problem.simulated(made, title="One mini-batch, as you split it")
        if refusals:
            self.message.error(" ".join(str(error) for error in refusals))
        else:
            self.message.clear()
        self.headline.value = self._headline(timeline.makespan_s, fits=not refusals, made=made)
        box: Any = self.tabs.children[tab]
        if tab == 0:
            box.show(placement(made, problem.cluster))
        elif tab == 1:
            box.show(gantt(timeline))
        else:
            box.show(needs(problem.need_parts(made), problem.cluster))

    def _headline(self, step_s: float, *, fits: bool, made: Plan) -> str:
        theirs = f"the planner's {self.planned.partition()} on {self.planned.grouping()} takes {self._planned_s * 1e3:.0f} ms"
        if not fits:
            words, rest = "Out of memory", f"a step would take {step_s * 1e3:.0f} ms if it did fit; {theirs}"
        else:
            words = f"{step_s * 1e3:.0f} ms a step ({step_s / self._planned_s - 1:+.1%} against the planner)"
            rest = f"yours: layers {made.partition()} on device groups {made.grouping()}; {theirs} (simulated)"
        return BIG_FIRST.format(words, rest)


def _shape(made: Plan) -> tuple[list[int], list[tuple[int, ...]]]:
    return [stage.num_layers for stage in made.stages], [stage.ranks for stage in made.stages]


def _button(description: str, tooltip: str, icon: str) -> widgets.Button:
    return widgets.Button(description=description, tooltip=tooltip, icon=icon)
