"""Cut one Transformer layer by hand: who gets how much of it, in which scheme, and what each device then holds and sends."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as widgets
from markupsafe import Markup

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, Paradigm, StackShape, proportional_parts
from workbench.plots import layer_cut
from workbench.plots.layer_cut import held_bytes, sent_bytes
from workbench.plots.style import byte_unit
from workbench.widgets.controls import WIDE, FigureBox, Html, Message
from workbench.widgets.latest import Latest

WAYS: dict[str, tuple[Paradigm, int]] = {
    "scheme 1": ("hybrid", 1),
    "scheme 2": ("hybrid", 2),
    "Megatron-LM": ("tensor", 1),
    "sequence parallel": ("sequence", 1),
}
"""The ways to cut a layer, by the name on their button: paradigm and scheme."""
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


class LayerCutter(widgets.VBox):
    """A slider for each device's part of the layer, one for the tokens, and a button for each way to cut.

    plan: as the controls have it.  weights: to begin with, by rank; the devices' speeds if not given.
    """

    def __init__(self, shape: StackShape, cluster: Cluster, *, length: int, weights: Sequence[int] | None = None) -> None:
        self.shape, self.cluster = shape, cluster
        fastest = max(device.flops_per_s for device in cluster.devices)
        first = weights or [max(1, round(MOST * device.flops_per_s / fastest)) for device in cluster.devices]
        self.way = widgets.ToggleButtons(
            options=list(WAYS),
            tooltips=[
                "Heads and columns divided, norms by tokens (Fig. 6)",
                "Heads divided, feed-forward network and norms by tokens (Fig. 7)",
                "Heads and columns divided equally, norms computed everywhere",
                "Tokens divided equally, all weights everywhere",
            ],
            style={"button_width": "12em"},
        )
        self.length = widgets.IntSlider(
            value=length,
            min=len(cluster.devices),
            max=max(512, length),
            description="Tokens",
            tooltip="Tokens of the sequence",
            style=WIDE,
            layout=widgets.Layout(width="34em"),
        )
        self.weights = tuple(
            widgets.IntSlider(
                value=weight,
                min=0,
                max=MOST,
                description=device.name,
                tooltip=f"{device.name}: its part of the layer, relative to the others'",
                style=WIDE,
                layout=widgets.Layout(width="34em"),
            )
            for device, weight in zip(cluster.devices, first, strict=True)
        )
        self.message, self.headline, self.figure = Message(), Html(), FigureBox()
        self._latest: Latest[tuple[InferencePlan, int, int] | ConfigError] = Latest(self._work)
        for control in (self.way, self.length, *self.weights):
            control.observe(lambda _: self._changed(), names="value")
        super().__init__([self.way, self.length, *self.weights, self.headline, self.message, self.figure])
        self._changed()
        self.wait()

    @property
    def plan(self) -> InferencePlan:
        """Return the plan that the controls describe.  Raises ConfigError if no device takes part."""
        paradigm, scheme = WAYS[self.way.value]
        return plan_of_weights([slider.value for slider in self.weights], self.shape, paradigm=paradigm, scheme=scheme)

    def wait(self) -> None:
        """Wait until what is shown belongs to what the controls say."""
        self._latest.wait()

    def _changed(self) -> None:
        try:
            self._latest.ask((self.plan, WAYS[self.way.value][1], self.length.value))
        except ConfigError as error:
            self._latest.ask(error)  # after what is being drawn, which would clear it

    def _work(self, request: tuple[InferencePlan, int, int] | ConfigError) -> None:
        try:
            if isinstance(request, ConfigError):
                raise request
            self._show(*request)
        except Exception as error:  # a thread's error would be seen by nobody
            self.message.show_exception(error)

    def _show(self, plan: InferencePlan, scheme: int, length: int) -> None:
        self.message.clear()
        held = [sum(parts.values()) for parts in held_bytes(plan, self.shape, scheme=scheme)]
        sent = sent_bytes(plan, self.shape, length=length, scheme=scheme)
        largest = max(range(len(held)), key=held.__getitem__)
        name = self.cluster.devices[plan.ranks[largest]].name
        words = f"{name} holds the most, {byte_unit(held[largest]).text(held[largest])} of this layer"
        moved = f"{byte_unit(sum(sent)).text(sum(sent))} travel for it"
        self.headline.value = Markup("<div role='status' style='line-height:1.5'>{}; <b>{}</b></div>").format(words, moved)
        self.figure.show(layer_cut(plan, self.shape, [device.name for device in self.cluster.devices], length=length, scheme=scheme))
