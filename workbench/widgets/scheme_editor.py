"""Choose the scheme of every layer by hand, and see at once what it does to memory, communication and latency (Galaxy+, section III-B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ipywidgets as widgets

from workbench.core.inference import InferencePlan
from workbench.core.timeline import Timeline
from workbench.plots import gantt, layer_cut, needs
from workbench.plots.style import byte_unit, evenly_spaced, time_unit
from workbench.plots.trade import TradePoint, trade
from workbench.widgets.controls import BIG_FIRST, ON_COLOUR, button, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.inference_problem import InferenceProblem

MAX_TRADE_POINTS = 7
"""Plans that the curve over all numbers of layers simulates: it is nearly straight."""


class SchemeEditor(Explorer):
    """A slider for the number of layers in scheme 2, and a button for each layer; pressed: scheme 2.

    plan: as the controls have it, fitting or not.  planned: the planner's, which yours is compared with.
    schemes: to begin with, the planner's if not given.
    """

    def __init__(self, problem: InferenceProblem, *, schemes: Sequence[int] | None = None, planner: str = "Galaxy+") -> None:
        self.problem = problem
        self.planned = problem.planned(planner)
        self._planned_s = problem.seconds(self.planned)
        self._trade: dict[tuple[bool, bool], tuple[TradePoint, ...]] = {}
        self._paused = True
        layers = problem.profile.num_layers
        told = "How many layers, from the first on, are in scheme 2"
        self.count = described(widgets.IntSlider, "In scheme 2", told, width="34em", value=0, min=0, max=layers)
        self.layers = tuple(
            widgets.ToggleButton(
                description=str(layer),
                tooltip=f"Layer {layer}: pressed for scheme 2",
                layout=widgets.Layout(width="3.1em", margin="1px", padding="0"),
            )
            for layer in range(layers)
        )
        self.overlap = widgets.Checkbox(description="overlap", tooltip="Tiles travel while others are multiplied", indent=False)
        self.both_ways = widgets.Checkbox(
            description="both ways round the ring", tooltip="Half of each tile goes the other way", indent=False
        )
        self.take_plan = button("Planner's plan", "Set everything as the planner has it", "magic", self._take_plan)
        self._arrange(problem.with_schemes(self.planned, schemes) if schemes is not None else self.planned)
        grid = widgets.Box(list(self.layers), layout=widgets.Layout(flex_flow="row wrap", margin="0 0 0 9.6em"))
        super().__init__(
            [self.count, grid, widgets.HBox([self.take_plan, self.overlap, self.both_ways])],
            [self.overlap, self.both_ways],
            lambda: self.plan,
            self._price,
            tabs=("Memory", "Trade", "One layer", "When (Gantt chart)"),
        )
        self.count.observe(lambda change: self._press([layer < change["new"] for layer in range(layers)]), names="value")
        for switch in self.layers:
            switch.observe(lambda _: self._press([one.value for one in self.layers]), names="value")

    @property
    def schemes(self) -> tuple[int, ...]:
        """Return the scheme of each layer."""
        return tuple(2 if button.value else 1 for button in self.layers)

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe, with the planner's partition."""
        made = self.problem.with_schemes(self.planned, self.schemes)
        return replace(made, overlap=self.overlap.value, both_ways=self.both_ways.value)

    def _take_plan(self) -> None:
        with self.setting():
            self._arrange(self.planned)

    def _arrange(self, plan: InferencePlan) -> None:
        """Set every control."""
        self.overlap.value, self.both_ways.value = plan.overlap, plan.both_ways
        for switch, scheme in zip(self.layers, plan.schemes, strict=True):
            switch.value = scheme == 2
            switch.button_style, switch.style.text_color = ("info", ON_COLOUR) if switch.value else ("", None)
        self.count.value = plan.schemes.count(2)

    def _press(self, pressed: Sequence[bool]) -> None:
        """Set the layers and their number."""
        if not self._paused:
            with self.setting():
                self._arrange(replace(self.plan, schemes=tuple(2 if one else 1 for one in pressed)))

    def _price(self, plan: InferencePlan) -> None:
        problem, refusal = self.problem, self.problem.refusal(plan)
        timeline = problem.simulated(plan, title="One sequence, with your schemes")
        if refusal is not None:
            self.message.error(str(refusal))
        self.headline.value = self._headline(plan, timeline, fits=refusal is None)
        names = [device.name for device in problem.cluster.devices]
        mine = TradePoint(plan.schemes.count(2), problem.seconds(plan), problem.fullness(plan))
        self.show(
            lambda: needs(problem.need_parts(plan), problem.cluster, title="What each device holds"),
            lambda: trade(self._points(plan), mine, subtitle="the planner's partition; scheme 2 from the first layer on"),
            lambda: layer_cut(plan, problem.profile.stacks[0], names, length=problem.length, scheme=plan.schemes[0]),
            lambda: gantt(timeline),
        )

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
