"""Costs of devices that are only simulated, from the catalogue's FLOP/s and a model's sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.profile import Grid, LayerProfile, Profile
from workbench.core.schedule import STEP
from workbench.methods.common.scaling import describe_facts
from workbench.methods.p_rge.measure import scratch_bytes
from workbench.methods.p_rge.planning import in_precision
from workbench.methods.p_rge.prepare import PreparedJob
from workbench.planners.query_costs import METHOD
from workbench.profiler.analytic import analytic_profile

NORMAL_FLOPS = 20
"""Operations for one normal value, drawn and added: two logarithms, roots and cosines for two values, and the generator's own."""


def catalogue_profile(prepared: PreparedJob, cluster: Cluster) -> Profile:
    """Return a profile computed from sizes and each device's flops_per_s: a forward pass's FLOPs, and noise for every trained value."""
    lengths = sorted({8, prepared.typical_length, 2 * prepared.typical_length, prepared.longest})
    whole = analytic_profile(describe_facts(prepared.facts), cluster, technique="full", sequence_lengths=tuple(lengths))
    values = trained_values(prepared)
    rows = []
    for device, layers in zip(cluster.devices, whole.layers, strict=True):
        rows.append(tuple(_forward_only(prepared, layer, index, values, device.flops_per_s) for index, layer in enumerate(layers)))
    profile = Profile(model=prepared.job.model, method=METHOD, source="analytic", layers=tuple(rows))
    return in_precision(profile, "float32", prepared.options.precision)


def trained_values(prepared: PreparedJob) -> int:
    """Return the values that are trained in a layer: LoRA-FA's B beside queries and values, LoRA's and DoRA's A and B, VeRA's vectors."""
    facts, rank = prepared.facts, prepared.trainable.rank
    narrow = facts.hidden_size * facts.num_key_value_heads // facts.num_heads
    outputs = facts.hidden_size + narrow
    match prepared.trainable.technique:
        case "lora":
            return rank * (2 * facts.hidden_size + outputs)
        case "dora":
            return rank * (2 * facts.hidden_size + outputs) + outputs
        case "vera":
            return 2 * rank + outputs
        case _:
            return rank * outputs


def _forward_only(prepared: PreparedJob, layer: LayerProfile, index: int, values: int, flops_per_s: float) -> LayerProfile:
    noise_s = values * NORMAL_FLOPS / flops_per_s
    scratch: dict[str, Any] = dict(scratch_bytes(prepared.facts, index))
    return replace(
        layer,
        times={"F": layer.times["F"], STEP: Grid(batch_sizes=(1, 2), sequence_lengths=(1,), seconds=((noise_s,), (2 * noise_s,)))},
        frozen_bytes=layer.frozen_bytes + layer.trainable_bytes,
        trainable_bytes=4 * values,
        context_bytes_per_token=0,
        context_bytes_per_sample=0,
        gradient_bytes_per_token=0,
        gradient_bytes_per_sample=0,
        tap_bytes_per_token=0,
        tap_bytes_per_sample=0,
        **scratch,
    )
