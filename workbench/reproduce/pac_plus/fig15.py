"""Fig. 15: memory with a quantized backbone over the size of a T5, counted from sizes (PAC+, section VI-F)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from workbench.plots.export import Captioned
from workbench.profiler.analytic import ModelDescription, Technique, layer_costs
from workbench.profiler.descriptions import FP32_BYTES
from workbench.reproduce.drawing import lines
from workbench.reproduce.pac_plus.table1 import parts
from workbench.reproduce.pac_plus.testbed import GIB, PAPER, Constants, description, load_constants, technique_sizes
from workbench.reproduce.result import Check, Comparison, Number, Result, Settings, Table
from workbench.reproduce.values import lookup, paper_values

BLOCK = 64  # weights that share a quantization constant of 4 bytes (Eq. 1, block-wise)
SCALE_BYTES = FP32_BYTES / BLOCK
PRECISIONS = {"FP32": 4.0, "FP16": 2.0, "INT8": 1.0 + SCALE_BYTES, "INT4": 0.5 + SCALE_BYTES}
BASELINES: tuple[Technique, ...] = ("full", "adapters", "lora")
# hidden, layers on each side, heads, feed-forward: T5-Small, -Base, -Large as published, then wider and deeper ones of the same form.
SIZES = ((512, 6, 8, 2048), (768, 12, 12, 3072), (1024, 24, 16, 4096), (1280, 30, 20, 5120), (1536, 36, 24, 6144), (2048, 48, 32, 8192))


def family(constants: Constants) -> tuple[ModelDescription, ...]:
    """Return T5s of growing size."""
    base = description(constants, "T5-Large")
    return tuple(
        replace(base, name=f"T5 {hidden}x{layers}", hidden=hidden, num_layers=layers, heads=heads, feed_forward=feed_forward)
        for hidden, layers, heads, feed_forward in SIZES
    )


def memory(constants: Constants, model: ModelDescription) -> dict[str, float]:
    """Return GB of a whole model's training step on one device, by technique and precision."""

    def total(technique: Technique, backbone_bytes: float) -> float:
        costs = layer_costs(
            model, technique, batch=constants.mini_batch, sequence_length=constants.sequence_length, sizes=technique_sizes(constants)
        )
        split = parts(constants, costs, backbone_bytes)
        return (split["weights"] + split["activations"] + split["gradients"]) / GIB

    found = {technique: total(technique, FP32_BYTES) for technique in BASELINES}
    return found | {f"Parallel Adapters, {name}": total("parallel_adapters", nbytes) for name, nbytes in PRECISIONS.items()}


def run(settings: Settings) -> Result:
    """Count it."""
    constants = load_constants()
    paper = lookup(paper_values(PAPER, "fig15"))
    models = family(constants)
    found = {model.name: memory(constants, model) for model in models}
    ours = _most(found)
    comparisons = tuple(
        Comparison(labels=labels, paper=value, ours=ours[labels], unit="percent", deviation_in="points") for labels, value in paper.items()
    )
    smaller = {
        constants.mini_batch // factor: _most(
            {model.name: memory(replace(constants, mini_batch=constants.mini_batch // factor), model) for model in models}
        )
        for factor in (1, 2, 4, 16)
    }
    return Result(
        item="fig15",
        title="Fig. 15: memory against the size of a T5, by technique and precision",
        paper_section="VI-F",
        source="counted",
        label_columns=("quantity", "bound"),
        comparisons=comparisons,
        tables=(
            Table(
                title="GB (2^30 bytes) of a training step, mini-batch 16, 128 tokens",
                columns=("model", "parameters, billions", *found[models[0].name]),
                rows=tuple((model.name, model.params / 1e9, *found[model.name].values()) for model in models),
            ),
            Table(
                title="The most that INT4 saves (%), by mini-batch, which the paper does not tell for this figure",
                columns=("mini-batch", *(labels[0] for labels in paper)),
                rows=tuple((batch, *(values[labels] for labels in paper)) for batch, values in smaller.items()),
            ),
        ),
        checks=(
            Check(
                claim="each lower precision takes less, and Parallel Adapters less than every baseline",
                holds=all(_falls(values) for values in found.values()),
                found=f"{len(found)} sizes",
            ),
        ),
        explanation=(
            "The curves are only a picture, and its models are told only as 'T5 models with varying parameter sizes': ours keep T5's form.",
            f"Quantized weights: {PRECISIONS['INT8']:.4f} and {PRECISIONS['INT4']:.4f} bytes, each {BLOCK} weights' constant included."
            "  Everything in the backbone is counted as quantized, the embedding too.",
            "What is left beside the weights are activations; with a smaller mini-batch than 16 the savings come near to the paper's.",
        ),
        series={name: tuple((model.params / 1e9, found[model.name][name]) for model in models) for name in found[models[0].name]},
    )


def _most(found: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, ...], float]:
    own = "Parallel Adapters, INT4"
    against_full = [100 * (1 - values[own] / values["full"]) for values in found.values()]
    against_others = [100 * (1 - values[own] / values[other]) for values in found.values() for other in BASELINES[1:]]
    return {
        ("memory saved by int4 against full", "most"): max(against_full),
        ("memory saved by int4 against lora and adapters", "most"): max(against_others),
    }


def _falls(values: Mapping[str, Number]) -> bool:
    own = [value for name, value in values.items() if name.startswith("Parallel") and isinstance(value, float)]
    least = min(value for name, value in values.items() if name in BASELINES and isinstance(value, float))
    return all(later < earlier for earlier, later in pairwise(own)) and own[0] < least


def draw(result: Result) -> list[Captioned]:
    """Return memory over parameters."""
    figure = lines(
        result,
        result.series,
        title=result.title,
        subtitle="one device, mini-batch 16, 128 tokens",
        x_title="parameters (billions)",
        y_title="GB (2^30 bytes)",
        dashes={name: "dash" for name in BASELINES},
        logarithmic_x=True,
    )
    return [Captioned("fig15", "Memory of a training step against the model's size.", figure)]
