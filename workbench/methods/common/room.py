"""Refuse, from a model's sizes, what has too little memory, before anything of its weights is read."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.job import Job
from workbench.core.names import FP32_BYTES
from workbench.core.plan import Plan
from workbench.core.units import size_words
from workbench.models.layers_on_disk import KEPT_BYTES
from workbench.profiler.analytic import LayerCost
from workbench.profiler.layers import Stacks

COPIES = 2
"""A profile measures copies of the layers, because a technique changes them."""
TRAINED_COPIES = 4
"""Trained values, gradients and two moments."""


def require_places(job: Job, costs: Sequence[LayerCost], cluster: Cluster) -> None:
    """Raise PlanError if all devices together have less memory than one copy of the model, with gradients and moments
    of the trained weights.
    """
    frozen = sum(cost.frozen_bytes for cost in costs)
    trained = TRAINED_COPIES * sum(cost.trainable_bytes for cost in costs)
    room_bytes = sum(device.memory_bytes for device in cluster.devices)
    if frozen + trained > room_bytes:
        raise PlanError(
            f"A plan of {job.method} for '{job.model}' on cluster '{cluster.name}' was asked for.",
            f"By the model's sizes it needs {size_words(frozen + trained)} (frozen weights {size_words(frozen)}; "
            f"trained weights, gradients and optimizer {size_words(trained)}); "
            f"{cluster.in_words} have {size_words(room_bytes)}.",
            "Add a device, raise its memory, train fewer weights or store them in fewer bits.",
        )


def require_measuring_room(model: str, costs: Sequence[LayerCost], num_encoder_layers: int | None) -> None:
    """Raise ConfigError if this machine has too little free memory to measure a model's layers (see measured_stack),
    with gradients and moments of the trained weights.
    """
    measured = [costs[span.start] for span in Stacks(len(costs), num_encoder_layers).spans]
    values = sum(cost.frozen_params + cost.trainable_params for cost in measured)
    state = (TRAINED_COPIES - 1) * sum(cost.trainable_bytes for cost in measured)
    _require_free(
        f"The layers of '{model}' were to be measured on this machine.",
        COPIES * FP32_BYTES * values + state,
        f"The {len(measured)} that stand for all take",
        "Close other programs, train fewer weights, or choose a smaller model.",
    )


def require_running_room(
    model: str, costs: Sequence[LayerCost], plan: Plan, cluster: Cluster, *, is_whole: bool = False
) -> None:
    """Raise ConfigError if this machine has too little free memory for the emulated devices of a plan and for scoring
    the model.

    Scoring needs all trained weights.  Of the frozen layers it needs KEPT_BYTES, one more layer and the layers at both
    ends, or all if `is_whole`.
    """
    layers = [FP32_BYTES * cost.frozen_params for cost in costs]
    frozen = sum(layers) if is_whole else min(sum(layers), KEPT_BYTES + max(layers) + layers[0] + layers[-1])
    scoring_bytes = frozen + sum(FP32_BYTES * cost.trainable_params for cost in costs)
    places = sum(
        len(stage.ranks) * sum(cost.frozen_bytes + cost.trainable_bytes for cost in costs[stage.start : stage.stop])
        for stage in plan.stages
    )
    _require_free(
        f"A run of '{model}' on {cluster.in_words}, which this machine emulates, was asked for.",
        scoring_bytes + places,
        f"The devices' weights take {size_words(places)}, and scoring the model on this machine takes"
        f" {size_words(scoring_bytes)}: together",
        "Close other programs, choose a smaller model, train fewer weights, or simulate.",
    )


def _require_free(asked_text: str, nbytes: int, words: str, todo: str) -> None:
    free = psutil.virtual_memory().available
    if nbytes > free:
        raise ConfigError(asked_text, f"{words} {size_words(nbytes)}; {size_words(free)} are free.", todo)
