"""Cut one Transformer layer by hand: who gets how much of it, in which scheme, and what each device then holds and sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, Paradigm, StackShape, proportional_parts
from workbench.plots import layer_cut
from workbench.plots.layer_cut import held_bytes, sent_bytes
from workbench.plots.style import byte_unit
from workbench.widgets.controls import described
from workbench.widgets.explorer import Explorer
from workbench.widgets.inference_explorer import tokens_slider


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
