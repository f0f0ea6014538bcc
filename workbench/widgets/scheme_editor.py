"""Choose the scheme of every layer by hand, and see at once what it does to memory, communication and latency (Galaxy+, section III-B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from workbench.core.errors import WorkbenchError
from workbench.core.inference import InferencePlan
from workbench.core.timeline import Timeline
from workbench.plots import gantt, layer_cut, needs
from workbench.plots.style import byte_unit, evenly_spaced, time_unit
from workbench.plots.trade import TradePoint, trade
from workbench.widgets.controls import BIG_FIRST, WIDE, FigureBox, Html, Message
from workbench.widgets.inference_problem import InferenceProblem
from workbench.widgets.latest import Latest

MAX_TRADE_POINTS = 7
"""Plans that the curve over all numbers of layers simulates: it is nearly straight."""


class SchemeEditor(widgets.VBox):
    """A slider for the number of layers in scheme 2, and a button for each layer; pressed: scheme 2.

    plan: as the controls have it, fitting or not.  planned: the planner's, which yours is compared with.
    schemes: to begin with, the planner's if not given.
    """

    def __init__(self, problem: InferenceProblem, *, schemes: Sequence[int] | None = None, planner: str = "Galaxy+") -> None:
        self.problem = problem
        self.planned = problem.planned(planner)
        self._planned_s = problem.seconds(self.planned)
        self._trade: dict[tuple[bool, bool], tuple[TradePoint, ...]] = {}
        self._paused = False
        layers = problem.profile.num_layers
        self.count = widgets.IntSlider(
            value=0,
            min=0,
            max=layers,
            description="In scheme 2",
            tooltip="How many layers, from the first on, are in scheme 2",
            style=WIDE,
            layout=widgets.Layout(width="34em"),
        )
        self.layers = tuple(
            widgets.ToggleButton(
                description=str(layer),
                tooltip=f"Layer {layer}: pressed for scheme 2",
                layout=widgets.Layout(width="3.1em", margin="1px", padding="0"),
            )
            for layer in range(layers)
        )
        self.overlap = widgets.Checkbox(
            value=self.planned.overlap, description="overlap", tooltip="Tiles travel while others are multiplied", indent=False
        )
        self.both_ways = widgets.Checkbox(
            value=self.planned.both_ways,
            description="both ways round the ring",
            tooltip="Half of each tile goes the other way",
            indent=False,
        )
        self.take_plan = widgets.Button(description="Planner's plan", tooltip="Set everything as the planner has it", icon="magic")
        self.message, self.headline = Message(), Html()
        titles = ["Memory", "Trade", "One layer", "When (Gantt chart)"]
        self.tabs = widgets.Tab([FigureBox() for _ in titles], titles=titles)
        self._latest: Latest[tuple[InferencePlan, int]] = Latest(self._work)
        self._set(problem.with_schemes(self.planned, schemes) if schemes is not None else self.planned)
        self.count.observe(lambda change: self._counted(change["new"]), names="value")
        for control in (self.overlap, self.both_ways, *self.layers):
            control.observe(lambda _: self._changed(), names="value")
        self.tabs.observe(lambda _: self._changed(), names="selected_index")
        self.take_plan.on_click(lambda _: self._set(self.planned))
        grid = widgets.Box(list(self.layers), layout=widgets.Layout(flex_flow="row wrap", margin="0 0 0 9.6em"))
        switches = widgets.HBox([self.take_plan, self.overlap, self.both_ways])
        super().__init__([self.count, grid, switches, self.headline, self.message, self.tabs])
        self.wait()

    @property
    def schemes(self) -> tuple[int, ...]:
        """Return the scheme of each layer."""
        return tuple(2 if button.value else 1 for button in self.layers)

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe, with the planner's partition."""
        made = self.problem.with_schemes(self.planned, self.schemes)
        return replace(made, overlap=self.overlap.value, both_ways=self.both_ways.value)

    def wait(self) -> None:
        """Wait until what is shown belongs to what the controls say."""
        self._latest.wait()

    def _set(self, plan: InferencePlan) -> None:
        self._paused = True
        try:
            for button, scheme in zip(self.layers, plan.schemes, strict=True):
                button.value = scheme == 2
            self.overlap.value, self.both_ways.value = plan.overlap, plan.both_ways
        finally:
            self._paused = False
        self._changed()

    def _counted(self, count: int) -> None:
        if self._paused:
            return
        self._paused = True
        try:
            for layer, button in enumerate(self.layers):
                button.value = layer < count
        finally:
            self._paused = False
        self._changed()

    def _changed(self) -> None:
        if self._paused:
            return
        self._paused = True
        try:
            for button in self.layers:
                button.button_style = "info" if button.value else ""
            self.count.value = self.schemes.count(2)
        finally:
            self._paused = False
        try:
            self._latest.ask((self.plan, self.tabs.selected_index or 0))
        except WorkbenchError as error:
            self.message.show_exception(error)

    def _work(self, request: tuple[InferencePlan, int]) -> None:
        try:
            self._show(*request)
        except Exception as error:  # a thread's error would be seen by nobody
            self.message.show_exception(error)

    def _show(self, plan: InferencePlan, tab: int) -> None:
        problem, refusal = self.problem, self.problem.refusal(plan)
        timeline = problem.simulated(plan, title="One sequence, with your schemes")
        if refusal is not None:
            self.message.error(str(refusal))
        else:
            self.message.clear()
        self.headline.value = self._headline(plan, timeline, fits=refusal is None)
        box: Any = self.tabs.children[tab]
        if tab == 0:
            box.show(needs(problem.need_parts(plan), problem.cluster, title="What each device holds"))
        elif tab == 1:
            mine = TradePoint(plan.schemes.count(2), problem.seconds(plan), problem.fullness(plan))
            box.show(trade(self._points(plan), mine, subtitle="the planner's partition; scheme 2 from the first layer on"))
        elif tab == 2:
            names = [device.name for device in problem.cluster.devices]
            box.show(layer_cut(plan, problem.profile.stacks[0], names, length=problem.length, scheme=plan.schemes[0]))
        else:
            box.show(gantt(timeline))

    def _points(self, plan: InferencePlan) -> tuple[TradePoint, ...]:
        key = (plan.overlap, plan.both_ways)
        if key not in self._trade:
            found, layers = [], len(self.layers)
            for count in evenly_spaced(layers + 1, MAX_TRADE_POINTS):
                made = self.problem.with_schemes(plan, [2] * count + [1] * (layers - count))
                found.append(TradePoint(count, self.problem.seconds(made), self.problem.fullness(made)))
            self._trade[key] = tuple(found)
        return self._trade[key]

    def _headline(self, plan: InferencePlan, timeline: Timeline, *, fits: bool) -> str:
        first, second = plan.configuration
        seconds, sent = self.problem.seconds(plan), sum(timeline.bytes_sent(rank) for rank in range(timeline.world_size))
        theirs = f"the planner's [{self.planned.configuration[0]}, {self.planned.configuration[1]}] takes {_text(self._planned_s)}"
        moved = f"{byte_unit(sent).text(sent)} travel"
        if fits:
            words = f"{_text(seconds)} a sequence ({seconds / self._planned_s - 1:+.1%} against the planner)"
            rest = f"yours: [{first}, {second}], {moved}; {theirs} (simulated)"
        else:
            words = "Out of memory"
            rest = f"[{first}, {second}] would take {_text(seconds)} if it did fit, and {moved}; {theirs} (simulated)"
        return BIG_FIRST.format(words, rest)


def _text(seconds: float) -> str:
    return time_unit(seconds).text(seconds)
