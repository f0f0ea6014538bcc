"""Move a device's speed, memory or link, or cut a layer by hand, and watch what becomes of it (Galaxy+, section III)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, Paradigm, StackShape, proportional_parts
from workbench.plots import gantt, layer_cut, needs
from workbench.plots.layer_cut import held_bytes, sent_bytes
from workbench.plots.style import byte_unit, time_unit
from workbench.widgets.cluster_form import ClusterForm
from workbench.widgets.controls import BIG_FIRST, Html, described
from workbench.widgets.explorer import Explorer
from workbench.widgets.inference_problem import InferenceComparison, InferenceProblem, compare_inference
from workbench.widgets.tables import inference_table

SHOWN = ("Galaxy+", "Algorithm 1", "Megatron-LM", "sequence parallel", "EdgeShard")


class InferenceExplorer(Explorer):
    """Sliders for the devices and the sequence; what every planner makes of it as a table, the first planner's plan drawn.

    compared: what is shown.  planners: of PLANNERS, the first is the one that is drawn.
    """

    def __init__(self, problem: InferenceProblem, *, planners: Sequence[str] = SHOWN) -> None:
        self._origin, self._planners = problem, tuple(planners)
        self.form = ClusterForm(problem.cluster, choice=False, overview=False, continuous=True)
        self.length = tokens_slider(problem.length, problem.cluster.world_size, 1024)
        self.table = Html()
        self.compared: tuple[InferenceComparison, ...] = ()
        self._first_s = 0.0
        super().__init__(
            [self.form, self.length],
            [self.length],
            lambda: self._origin.on(self.form.cluster).of_length(self.length.value),
            self._plan_all,
            tabs=("One layer", "Memory", "When (Gantt chart)"),
            below=[self.table],
        )
        self.form.on_change(lambda _: self.changed())

    def _plan_all(self, problem: InferenceProblem) -> None:
        self.compared = compare_inference(problem, self._planners)
        first = self.compared[0]
        made = first.plan
        self._first_s = self._first_s or first.seconds
        self.table.value = inference_table(self.compared, problem)._repr_html_()
        if made is None:
            self.message.error(first.why)
            self.headline.value = BIG_FIRST.format("No plan fits.", "")
            self.show()
            return
        change = f" ({first.seconds / self._first_s - 1:+.0%} against the beginning)" if first.seconds != self._first_s else ""
        words = "{} [{}, {}] on {} devices (simulated)".format(first.planner, *made.configuration, made.num_positions)
        self.headline.value = BIG_FIRST.format(f"{time_unit(first.seconds).text(first.seconds)} a sequence{change}", words)
        names = [device.name for device in problem.cluster.devices]
        self.show(
            lambda: layer_cut(made, problem.profile.stacks[0], names, length=problem.length, scheme=made.schemes[0]),
            lambda: needs(problem.need_parts(made), problem.cluster, title="What each device holds"),
            lambda: gantt(problem.simulated(made)),
        )


def tokens_slider(length: int, fewest: int, most: int) -> widgets.IntSlider:
    """Return a slider for the tokens of a sequence."""
    return described(widgets.IntSlider, "Tokens", "Tokens of the sequence", width="34em", value=length, min=fewest, max=max(most, length))


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
MOST = 100  # of a weight slider


def plan_of_weights(weights: Sequence[int], shape: StackShape, *, paradigm: Paradigm = "hybrid", scheme: int = 1) -> InferencePlan:
    """Return the plan that gives every device heads, columns and tokens in proportion to its weight; weight 0 leaves it out.

    Megatron-LM and sequence parallelism know no unequal devices: they divide equally among those that take part.
    Raises ConfigError if nobody is left.
    """
    ranks = tuple(rank for rank, weight in enumerate(weights) if weight > 0)
    if not ranks:
        raise ConfigError("A cut of the layer was asked for.", "No device takes part.", "Move a slider above 0.")
    kept = [float(weights[rank]) if paradigm == "hybrid" else 1.0 for rank in ranks]
    return InferencePlan(
        method="by hand",
        paradigm=paradigm,
        ranks=ranks,
        units=proportional_parts(shape.num_units, kept),
        columns=proportional_parts(shape.columns, kept),
        shares=tuple(kept),
        schemes=(scheme,) * shape.num_layers if paradigm == "hybrid" else (),
    )


class LayerCutter(Explorer):
    """A slider for each device's part of the layer, one for the tokens, and a button for each way to cut.

    plan: as the controls have it.  weights: to begin with, by rank; the devices' speeds if not given.
    """

    def __init__(self, shape: StackShape, cluster: Cluster, *, length: int, weights: Sequence[int] | None = None) -> None:
        self.shape, self.cluster = shape, cluster
        fastest = max(device.flops_per_s for device in cluster.devices)
        first = weights or [max(1, round(MOST * device.flops_per_s / fastest)) for device in cluster.devices]
        self.way = widgets.ToggleButtons(
            options=list(WAYS), tooltips=[way.tooltip for way in WAYS.values()], style={"button_width": "12em"}
        )
        self.length = tokens_slider(length, len(cluster.devices), 512)
        self.weights = tuple(
            described(
                widgets.IntSlider,
                device.name,
                f"{device.name}: its part of the layer, relative to the others'",
                width="34em",
                value=weight,
                min=0,
                max=MOST,
            )
            for device, weight in zip(cluster.devices, first, strict=True)
        )
        controls = [self.way, self.length, *self.weights]
        super().__init__(
            controls, controls, lambda: (self.plan, WAYS[self.way.value].scheme, self.length.value), lambda asked: self._cut(*asked)
        )

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe.  Raises ConfigError if no device takes part."""
        way = WAYS[self.way.value]
        return plan_of_weights([slider.value for slider in self.weights], self.shape, paradigm=way.paradigm, scheme=way.scheme)

    def _cut(self, plan: InferencePlan, scheme: int, length: int) -> None:
        held = [sum(parts.values()) for parts in held_bytes(plan, self.shape, scheme=scheme)]
        sent = sum(sent_bytes(plan, self.shape, length=length, scheme=scheme))
        largest = max(range(len(held)), key=held.__getitem__)
        name = self.cluster.devices[plan.ranks[largest]].name
        words = f"{name} holds the most, {byte_unit(held[largest]).text(held[largest])} of this layer"
        moved = f"{byte_unit(sent).text(sent)} travel for it"
        self.headline.value = Markup("<div role='status' style='line-height:1.5'>{}; <b>{}</b></div>").format(words, moved)
        names = [device.name for device in self.cluster.devices]
        self.show(lambda: layer_cut(plan, self.shape, names, length=length, scheme=scheme))
