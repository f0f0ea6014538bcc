"""Load what a profile measures of a model: one layer stands for its equals, and no other is read."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.methods.common.room import require_measuring_room
from workbench.models.configuration import ModelFacts
from workbench.models.loading import load_sample
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack
from workbench.profiler.analytic import LayerCost
from workbench.profiler.layers import Stacks


def measured_stack(
    name: str,
    facts: ModelFacts,
    costs: Sequence[LayerCost],
    quantization: QuantizationConfig | None = None,
    *,
    with_head: bool = False,
) -> LayerStack:
    """Return a model's stack with the layers that are measured (see profiler.layers) in place of all.

    costs: every layer's, computed from sizes.  quantization: how frozen weights are stored; each layer is converted
    before the next one is read.
    with_head: also load the head of a decoder-only model.
    Raises ConfigError and MissingDataError as load_stack does, and ConfigError, before anything is read, if this
    machine has too little free memory.
    """
    require_measuring_room(name, costs, facts.num_encoder_layers)
    stacks = Stacks(facts.num_layers, facts.num_encoder_layers)
    stored = QuantizationConfig(storage="float32") if quantization is None else quantization
    stack = load_sample(
        name,
        lambda layer: stacks.span_of(layer).start,
        after_layer=lambda layer: quantize(layer, stored),
        with_head=with_head,
    )
    return quantize(stack, stored)
