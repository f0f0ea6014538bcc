"""Move a device's speed, memory or link, or cut a layer by hand, and watch the effect (Galaxy+, section III).

Or choose the scheme of every layer, and see its effect on memory, communication and latency at once (section III-B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, Paradigm, StackShape
from workbench.core.proportions import proportional_parts
from workbench.core.timeline import Timeline
from workbench.core.units import size_words
from workbench.methods.galaxy_plus import planners as galaxy_plus
from workbench.methods.galaxy_plus.prices import SequencePrice
from workbench.planners.memory import by_purpose
from workbench.plots import gantt, needs
from workbench.plots.style import evenly_spaced, time_words
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import ON_COLOUR, Html, button, slider
from workbench.widgets.explorer import Explorer
from workbench_labs.inference_problem import (
    PLANNERS,
    SequenceProblem,
    compare_inference,
    fullness,
    refusal,
    with_schemes,
)
from workbench_labs.planning import Comparison, on
from workbench_labs.plots.layer_cut import held_bytes, layer_cut, sent_bytes
from workbench_labs.plots.overlapping import TradePoint, trade
from workbench_labs.tables import inference_table

SHOWN = ("Galaxy+", "Algorithm 1", "Megatron-LM", "sequence parallel", "EdgeShard")


class InferenceExplorer(Explorer):
    """A map of the devices and a slider for the tokens; every planner's result in a table, the first one's plan drawn.

    compared: the results shown.  planners: some of PLANNERS; the first one's plan is drawn.
    """

    def __init__(self, problem: SequenceProblem, *, planners: Sequence[str] = SHOWN) -> None:
        self._origin, self._planners = problem, tuple(planners)
        self.form = ClusterForm(problem.cluster, choice=False)
        self.length = tokens_slider(problem.sequence_length, problem.cluster.world_size, 1024)
        self.compared: tuple[Comparison, ...] = ()
        self._first_s = 0.0
        super().__init__(
            [self.form, self.length],
            [self.length],
            lambda: replace(on(self._origin, self.form.cluster), sequence_length=self.length.value),
            self._plan_all,
            tabs=("One layer", "Memory", "When (Gantt chart)"),
        )
        self.form.on_change(lambda _: self.changed())
        self.form.reset.on_click(lambda _: self.reset())

    def _plan_all(self, problem: SequenceProblem) -> None:
        self.compared = compare_inference(problem, self._planners)
        first = self.compared[0]
        plan = first.plan
        self._first_s = self._first_s or first.seconds
        self.tabulate(inference_table(self.compared, problem))
        if plan is None:
            return self.refuse("No plan fits.", first.why)
        change = (
            f" ({first.seconds / self._first_s - 1:+.0%} against the beginning)"
            if first.seconds != self._first_s
            else ""
        )
        words = "{} [{}, {}] on {} devices (simulated)".format(first.planner, *plan.configuration, plan.num_positions)
        self.headline.say(f"{time_words(first.seconds)} a sequence{change}", words)
        names = problem.cluster.names
        self.show(
            lambda: layer_cut(
                plan, problem.profile.stacks[0], names, length=problem.sequence_length, scheme=plan.schemes[0]
            ),
            lambda: needs(
                by_purpose(galaxy_plus.needs(problem, plan)), problem.cluster, title="What each device holds"
            ),
            lambda: gantt(SequencePrice(problem).timeline(plan)),
        )


def tokens_slider(length: int, fewest: int, most: int) -> widgets.IntSlider:
    """Return a slider for the tokens of a sequence."""
    return slider("Tokens", "Tokens of the sequence", length, fewest, max(most, length))


class Way(NamedTuple):
    """A way to cut a layer."""

    paradigm: Paradigm
    scheme: int
    tooltip: str


WAYS = {
    "scheme 1": Way("hybrid", 1, "Heads and columns divided, norms by tokens (Fig. 6)"),
    "scheme 2": Way("hybrid", 2, "Heads divided, feed-forward network and norms by tokens (Fig. 7)"),
    "Megatron-LM": Way("tensor", 1, "Heads and columns divided equally, norms computed everywhere"),
    "sequence parallel": Way("sequence", 1, "Tokens divided equally, all weights everywhere"),
}
"""The ways to cut a layer, by the name on their button."""
MOST = 100  # maximum of a weight slider


def plan_of_weights(
    weights: Sequence[int], shape: StackShape, *, paradigm: Paradigm = "hybrid", scheme: int = 1
) -> InferencePlan:
    """Return the plan that divides heads, columns and tokens in proportion to the devices' weights; weight 0 leaves a
    device out.

    Megatron-LM and sequence parallelism divide equally among the devices that take part.
    Raises ConfigError if no device takes part.
    """
    ranks = tuple(rank for rank, weight in enumerate(weights) if weight > 0)
    if not ranks:
        raise ConfigError("A cut of the layer was asked for.", "No device takes part.", "Move a slider above 0.")
    shares = [float(weights[rank]) if paradigm == "hybrid" else 1.0 for rank in ranks]
    return InferencePlan(
        method="by hand",
        paradigm=paradigm,
        ranks=ranks,
        units=proportional_parts(shape.num_units, shares),
        columns=proportional_parts(shape.columns, shares),
        shares=tuple(shares),
        schemes=(scheme,) * shape.num_layers if paradigm == "hybrid" else (),
    )


class LayerCutter(Explorer):
    """A slider for each device's part of the layer, one for the tokens, and a button for each way to cut.

    plan: the controls' plan.  weights: initial values, by rank; the devices' speeds if not given.
    """

    def __init__(
        self, shape: StackShape, cluster: Cluster, *, length: int, weights: Sequence[int] | None = None
    ) -> None:
        self.shape, self.cluster = shape, cluster
        fastest = max(device.flops_per_s for device in cluster.devices)
        first = weights or [max(1, round(MOST * device.flops_per_s / fastest)) for device in cluster.devices]
        self.way = widgets.ToggleButtons(
            options=list(WAYS), tooltips=[way.tooltip for way in WAYS.values()], style={"button_width": "12em"}
        )
        self.length = tokens_slider(length, len(cluster.devices), 512)
        self.weights = tuple(
            slider(device.name, f"{device.name}: its part of the layer, relative to the others'", weight, 0, MOST)
            for device, weight in zip(cluster.devices, first, strict=True)
        )
        controls = [self.way, self.length, *self.weights]
        super().__init__(
            controls,
            controls,
            lambda: (self.plan, WAYS[self.way.value].scheme, self.length.value),
            lambda request: self._cut(*request),
        )

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe.  Raises ConfigError if no device takes part."""
        way = WAYS[self.way.value]
        return plan_of_weights(
            [slider.value for slider in self.weights], self.shape, paradigm=way.paradigm, scheme=way.scheme
        )

    def _cut(self, plan: InferencePlan, scheme: int, length: int) -> None:
        nbytes = [sum(parts.values()) for parts in held_bytes(plan, self.shape, scheme=scheme)]
        sent = sum(sent_bytes(plan, self.shape, length=length, scheme=scheme))
        largest = max(range(len(nbytes)), key=nbytes.__getitem__)
        name = self.cluster.devices[plan.ranks[largest]].name
        words = f"{name} holds the most, {size_words(nbytes[largest])} of this layer"
        moved = f"{size_words(sent)} travel for it"
        self.headline.value = Markup("<div role='status' style='line-height:1.5'>{}; <b>{}</b></div>").format(
            words, moved
        )
        names = self.cluster.names
        self.show(lambda: layer_cut(plan, self.shape, names, length=length, scheme=scheme))


MAX_TRADE_POINTS = 7
"""Number of plans simulated for the curve over all numbers of layers; it is nearly straight."""


class SchemeEditor(Explorer):
    """A slider for the number of layers in scheme 2, and a button for each layer; pressed: scheme 2.

    plan: the controls' plan, whether it fits or not.  planned: the planner's plan, with which yours is compared.
    schemes: initial values; the planner's if not given.
    """

    def __init__(
        self, problem: SequenceProblem, *, schemes: Sequence[int] | None = None, planner: str = "Galaxy+"
    ) -> None:
        self.problem = problem
        self.planned = PLANNERS[planner](problem)
        self._seconds = SequencePrice(problem)
        self._planned_s = self._seconds(self.planned)
        self._trade: dict[tuple[bool, bool], tuple[TradePoint, ...]] = {}
        self._paused = True
        layers = problem.profile.num_layers
        label = "How many layers, from the first on, are in scheme 2"
        self.count = slider("In scheme 2", label, 0, 0, layers)
        self.layers = tuple(
            widgets.ToggleButton(
                description=str(layer),
                tooltip=f"Layer {layer}: pressed for scheme 2",
                layout=widgets.Layout(width="3.1em", margin="1px", padding="0"),
            )
            for layer in range(layers)
        )
        self.overlap = widgets.Checkbox(
            description="overlap",
            tooltip="Tiles travel while others are multiplied",
            indent=False,
            layout=widgets.Layout(width="auto"),
        )
        self.both_ways = widgets.Checkbox(
            description="both ways round the ring",
            tooltip="Half of each tile goes the other way",
            indent=False,
            layout=widgets.Layout(width="auto"),
        )
        self.take_plan = button("Planner's plan", "Set everything as the planner has it", "magic", self._take_plan)
        self._arrange(with_schemes(problem, self.planned, schemes) if schemes is not None else self.planned)
        label = Html("These layers (pressed)", layout=widgets.Layout(width="9.4em", flex="0 0 auto"))
        grid = widgets.HBox([label, widgets.Box(list(self.layers), layout=widgets.Layout(flex_flow="row wrap"))])
        super().__init__(
            [self.count, grid, widgets.HBox([self.take_plan, self.overlap, self.both_ways])],
            [self.overlap, self.both_ways],
            lambda: self.plan,
            self._price,
            tabs=("Memory", "Trade", "One layer", "When (Gantt chart)"),
        )
        self.count.observe(
            lambda change: self._press([layer < change["new"] for layer in range(layers)]), names="value"
        )
        for switch in self.layers:
            switch.observe(lambda _: self._press([switch.value for switch in self.layers]), names="value")

    @property
    def schemes(self) -> tuple[int, ...]:
        """Return the scheme of each layer."""
        return tuple(2 if button.value else 1 for button in self.layers)

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe, with the planner's partition."""
        plan = with_schemes(self.problem, self.planned, self.schemes)
        return replace(plan, overlap=self.overlap.value, both_ways=self.both_ways.value)

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
                self._arrange(replace(self.plan, schemes=tuple(2 if is_second else 1 for is_second in pressed)))

    def _price(self, plan: InferencePlan) -> None:
        problem, error = self.problem, refusal(self.problem, plan)
        timeline = self._seconds.timeline(plan, title="One sequence, with your schemes")
        if error is not None:
            self.message.error(str(error))
        self.headline.say(*self._headline(plan, timeline, fits=error is None))
        names = problem.cluster.names
        mine = TradePoint(plan.schemes.count(2), self._seconds(plan), fullness(problem, plan))
        self.show(
            lambda: needs(
                by_purpose(galaxy_plus.needs(problem, plan)), problem.cluster, title="What each device holds"
            ),
            lambda: trade(
                self._points(plan), mine, subtitle="the planner's partition; scheme 2 from the first layer on"
            ),
            lambda: layer_cut(
                plan, problem.profile.stacks[0], names, length=problem.sequence_length, scheme=plan.schemes[0]
            ),
            lambda: gantt(timeline),
        )

    def _points(self, plan: InferencePlan) -> tuple[TradePoint, ...]:
        key = (plan.overlap, plan.both_ways)
        if key not in self._trade:
            points, layers = [], len(self.layers)
            for count in evenly_spaced(layers + 1, MAX_TRADE_POINTS):
                other = with_schemes(self.problem, plan, [2] * count + [1] * (layers - count))
                points.append(TradePoint(count, self._seconds(other), fullness(self.problem, other)))
            self._trade[key] = tuple(points)
        return self._trade[key]

    def _headline(self, plan: InferencePlan, timeline: Timeline, *, fits: bool) -> tuple[str, str]:
        first, second = plan.configuration
        seconds, sent = self._seconds(plan), timeline.all_sent_bytes
        theirs = (
            f"the planner's [{self.planned.configuration[0]}, {self.planned.configuration[1]}] takes "
            f"{time_words(self._planned_s)}"
        )
        moved = f"{size_words(sent)} travel"
        if fits:
            words = f"{time_words(seconds)} a sequence ({seconds / self._planned_s - 1:+.1%} against the planner)"
            details = f"yours: [{first}, {second}], {moved}; {theirs} (simulated)"
        else:
            words = "Out of memory"
            details = (
                f"[{first}, {second}] would take {time_words(seconds)} if it did fit, and {moved}; {theirs} (simulated)"
            )
        return words, details
