"""Techniques compared: FLOPs and memory of a training step, counted from sizes (Fig. 3, Table I, Fig. 15; PAC+,
sections II-A, VI-F).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

from workbench.core.names import FP32_BYTES
from workbench.profiler.analytic import LayerCost, Technique, layer_costs
from workbench.profiler.descriptions import ModelDescription
from workbench_studies.papers.items import Item
from workbench_studies.papers.pac_plus import testbed
from workbench_studies.papers.pac_plus.testbed import (
    BASELINES,
    GIB,
    MODELS,
    Constants,
    load_constants,
)
from workbench_studies.papers.result import Number, Result, Row

TECHNIQUES: tuple[Technique, ...] = (*BASELINES, "parallel_adapters")
LARGE = "T5-Large"
TERA = 1e12
PARTS = ("weights", "activations", "gradients")
BLOCK = 64  # weights that share a quantization constant of 4 bytes (Eq. 1, block-wise)
SCALE_BYTES = FP32_BYTES / BLOCK
PRECISIONS = {"FP32": 4.0, "FP16": 2.0, "INT8": 1.0 + SCALE_BYTES, "INT4": 0.5 + SCALE_BYTES}
# hidden, layers on each side, heads, feed-forward: T5-Small, -Base, -Large as published, then wider and deeper ones of
# the same form.
SIZES = (
    (512, 6, 8, 2048),
    (768, 12, 12, 3072),
    (1024, 24, 16, 4096),
    (1280, 30, 20, 5120),
    (1536, 36, 24, 6144),
    (2048, 48, 32, 8192),
)


def _costs(constants: Constants, model: str | ModelDescription, technique: Technique) -> tuple[LayerCost, ...]:
    described = testbed.description(constants, model) if isinstance(model, str) else model
    batch, length = constants.mini_batch, constants.sequence_length
    return layer_costs(
        described, technique, batch=batch, sequence_length=length, sizes=testbed.technique_sizes(constants)
    )


def flops(constants: Constants, model: str, technique: Technique) -> tuple[float, float]:
    """Return the FLOPs of the forward and of the backward pass of a mini-batch, side network included."""
    costs = _costs(constants, model, technique)
    return (
        sum(cost.forward_flops + cost.side_forward_flops for cost in costs),
        sum(cost.backward_flops + cost.side_backward_flops for cost in costs),
    )


def fig3(item: Item) -> Result:
    """Count the FLOPs of a training step by technique."""
    constants, paper = load_constants(), item.printed
    counted = {
        (model, technique): flops(constants, model, technique) for model, technique in product(MODELS, TECHNIQUES)
    }
    full, side = sum(counted[LARGE, "full"]), sum(counted[LARGE, "parallel_adapters"])
    comparisons = []
    for technique in BASELINES[1:]:
        forward, backward = counted[LARGE, technique]
        saved, share = 100 * (1 - (forward + backward) / full), 100 * forward / (forward + backward)
        reduction = paper["reduction of FLOPs by adapters and lora", LARGE]
        comparisons.append(
            item.cell((LARGE, f"reduction of FLOPs by {technique}"), reduction, saved, note='"around 30%"')
        )
        comparisons.append(
            item.cell((LARGE, f"forward share of {technique}"), paper[f"forward share of {technique}", LARGE], share)
        )
    rows: list[Row] = []
    for model in MODELS:
        full_flops, inference = sum(counted[model, "full"]), counted[model, "full"][0] / TERA
        rows.append((model, "inference", inference, 0.0, inference, 100 * 2 / 3))
        for technique in TECHNIQUES:
            forward, backward = counted[model, technique]
            total = forward + backward
            rows.append(
                (model, technique, forward / TERA, backward / TERA, total / TERA, 100 * (1 - total / full_flops))
            )
    return item.result(
        comparisons,
        tables={"flops": rows},
        around=", ".join(
            f"{comparison.labels[1]}: {comparison.ours:.1f} %"
            for comparison in comparisons
            if comparison.labels[1].startswith("reduction")
        ),
        side=side / TERA,
        less=100 * (1 - side / full),
    )


def footprint(
    constants: Constants, model: str | ModelDescription, technique: Technique, backbone_bytes: float = FP32_BYTES
) -> dict[str, float]:
    """Return bytes by part, for a mini-batch and a whole model on one device; 'parameters' is a number, not bytes.

    backbone_bytes: bytes of each frozen weight.
    """
    costs = _costs(constants, model, technique)
    trainable, frozen = sum(cost.trainable_params for cost in costs), sum(cost.frozen_params for cost in costs)
    activations = sum(
        cost.context_bytes(1, constants.sequence_length) + cost.tap_bytes(1, constants.sequence_length)
        for cost in costs
    )
    return {
        "parameters": trainable,
        "weights": FP32_BYTES * trainable + backbone_bytes * frozen,
        "activations": constants.mini_batch * activations
        + constants.optimizer_bytes_per_trainable_byte * FP32_BYTES * trainable,
        "gradients": FP32_BYTES * trainable,
    }


def cache_bytes(constants: Constants, model: str, samples: int, tokens: int) -> float:
    """Return the bytes that an activation cache of so many samples of so many tokens holds, in float32."""
    return samples * sum(cost.tap_bytes(1, tokens) for cost in _costs(constants, model, "parallel_adapters"))


def table1(item: Item) -> Result:
    """Count the memory footprint of T5-Large by technique."""
    constants = load_constants()
    ours: dict[str, dict[str, float]] = {each: footprint(constants, LARGE, each) for each in TECHNIQUES}
    for parts in ours.values():
        parts["total"] = sum(parts[part] for part in PARTS)
    ours["inference"] = dict.fromkeys(("weights", "total"), ours["full"]["weights"])

    def cell(technique: str, quantity: str) -> Number:
        return (
            ours[technique]["parameters"] / 1e6
            if quantity == "trainable parameters"
            else ours[technique][quantity] / GIB
        )

    comparisons = item.compare(cell)
    memory = [comparison for comparison in comparisons if comparison.unit == "GB"]
    # 0.035 GB prints as the paper's 0.04: equal digits are no deviation.
    differing = [
        comparison
        for comparison in memory
        if isinstance(comparison.ours, float) and round(comparison.ours, 2) != comparison.paper
    ]
    targets: list[Row] = []
    for target in (1, 2, 8, 16, 32, 128):
        changed = replace(constants, target_tokens=target)
        targets.append(
            (target, *(footprint(changed, LARGE, technique)["activations"] / GIB for technique in TECHNIQUES))
        )
    optimizers = [
        (
            name,
            *(
                (ours[technique]["activations"] + factor * ours[technique]["gradients"]) / GIB
                for technique in BASELINES
            ),
        )
        for name, factor in (("none (SGD)", 0), ("momentum", 1), ("AdamW", 2))
    ]
    return item.result(
        comparisons,
        tables={"targets": targets, "optimizers": optimizers},
        alike=len(memory) - len(differing),
        count=len(memory),
    )


def memory(constants: Constants, model: ModelDescription) -> dict[str, float]:
    """Return GB of a whole model's training step on one device, by technique and precision."""

    def total(technique: Technique, backbone_bytes: float) -> float:
        split = footprint(constants, model, technique, backbone_bytes)
        return sum(split[part] for part in PARTS) / GIB

    by_technique = {technique: total(technique, FP32_BYTES) for technique in BASELINES}
    return by_technique | {
        f"Parallel Adapters, {name}": total("parallel_adapters", nbytes) for name, nbytes in PRECISIONS.items()
    }


def fig15(item: Item) -> Result:
    """Count memory with a quantized backbone over the size of a T5."""
    constants = load_constants()
    base = testbed.description(constants, LARGE)
    models = [
        replace(
            base, name=f"T5 {hidden}x{layers}", hidden=hidden, num_layers=layers, heads=heads, feed_forward=feed_forward
        )
        for hidden, layers, heads, feed_forward in SIZES
    ]
    by_model = {model.name: memory(constants, model) for model in models}
    smaller = [
        (batch, *_most({model.name: memory(replace(constants, mini_batch=batch), model) for model in models}).values())
        for batch in (constants.mini_batch // factor for factor in (1, 2, 4, 16))
    ]
    ours = _most(by_model)
    return item.result(
        item.compare(lambda quantity, bound: ours[quantity]),
        tables={
            "memory": [(model.name, model.params / 1e9, *by_model[model.name].values()) for model in models],
            "smaller": smaller,
        },
        series={
            name: tuple((model.params / 1e9, by_model[model.name][name]) for model in models)
            for name in by_model[models[0].name]
        },
        sizes=len(by_model),
        int8=PRECISIONS["INT8"],
        int4=PRECISIONS["INT4"],
        block=BLOCK,
    )


def _most(by_model: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return INT4's maximum saving in per cent, against full fine-tuning and against the others."""

    def saved(*others: str) -> float:
        return max(
            100 * (1 - values["Parallel Adapters, INT4"] / values[other])
            for values in by_model.values()
            for other in others
        )

    return {
        "memory saved by int4 against full": saved("full"),
        "memory saved by int4 against lora and adapters": saved("adapters", "lora"),
    }
