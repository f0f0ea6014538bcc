"""Profiles of single-shot inference: from FLOPs and a device's speed, or scaled from this host's measured pieces (Galaxy+, section III-C).

FLOPs: 2 for each weight and token, 4 x width for each query-key pair (a causal mask is computed, not skipped).  Connections are
element-wise: what they cost is memory traffic, where a memory rate is given, and a few FLOPs for each number otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferenceProfile, PieceCost, StackCosts
from workbench.profiler.descriptions import FP32_BYTES, ModelDescription, describe
from workbench.profiler.inference_sizes import StackSizes, end_bytes, stack_sizes

Head = Literal["hidden", "language"]

CONNECTION_FLOPS = 10
"""For each number of a hidden state: bias, residual, mean, variance, scale and shift."""
CONNECTION_MOVES = 5
"""Reads of block output and residual, a write of their sum, a read and a write of the norm."""
SCORE_MOVES = 4
"""Of each score: written, read and written by the softmax, read."""


def analytic_inference(
    model: ModelDescription | str,
    cluster: Cluster,
    *,
    operation_s: float = 0.0,
    memory_bytes_per_s: float | None = None,
    weight_bytes_per_s: float | None = None,
    head: Head = "hidden",
) -> InferenceProfile:
    """Return a described model's profile from its sizes and each device's flops_per_s.

    operation_s: launching one operation.  memory_bytes_per_s: of activations, which connections, sums and softmax are bound by; None
    counts their FLOPs alone.  weight_bytes_per_s: of weights, which a single token's pass is bound by; None leaves them out, since with
    tens of tokens they hide behind arithmetic.  head 'language': the last token's logits.
    """
    described = describe(model) if isinstance(model, str) else model
    first, last = end_bytes(described)
    return analytic_from(
        described.name,
        stack_sizes(described),
        cluster,
        first_bytes=first,
        last_bytes=last,
        operation_s=operation_s,
        memory_bytes_per_s=memory_bytes_per_s,
        weight_bytes_per_s=weight_bytes_per_s,
        vocabulary=described.vocab if head == "language" else 0,
    )


def analytic_from(
    name: str,
    stacks: Sequence[StackSizes],
    cluster: Cluster,
    *,
    first_bytes: int = 0,
    last_bytes: int = 0,
    operation_s: float = 0.0,
    memory_bytes_per_s: float | None = None,
    weight_bytes_per_s: float | None = None,
    vocabulary: int = 0,
) -> InferenceProfile:
    """Return the profile of any stacks whose sizes are known (see analytic_inference).  vocabulary: rows of the head, 0 for none."""
    rows = tuple(
        tuple(
            analytic_costs(
                sizes,
                flops_per_s=device.flops_per_s,
                memory_bytes_per_s=memory_bytes_per_s,
                weight_bytes_per_s=weight_bytes_per_s,
                operation_s=operation_s,
                vocabulary=vocabulary,
            )
            for sizes in stacks
        )
        for device in cluster.devices
    )
    return InferenceProfile(
        model=name,
        source="analytic",
        stacks=tuple(sizes.shape for sizes in stacks),
        costs=rows,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        working_bytes_per_token=max(map(working_bytes, stacks)),
    )


def analytic_costs(
    sizes: StackSizes,
    *,
    flops_per_s: float,
    memory_bytes_per_s: float | None = None,
    weight_bytes_per_s: float | None = None,
    operation_s: float = 0.0,
    vocabulary: int = 0,
) -> StackCosts:
    """Return the seconds of one layer's operations on one device."""
    hidden = sizes.shape.hidden_size

    def moved(nbytes: float) -> float:
        return 0.0 if memory_bytes_per_s is None else nbytes / memory_bytes_per_s

    def weights(nbytes: float) -> float:
        return 0.0 if weight_bytes_per_s is None else nbytes / weight_bytes_per_s

    pieces = {}
    for kind in sizes.kinds:
        flops = sizes.unit_flops(kind)
        if kind in ("ATT", "CATT"):
            scores = moved(SCORE_MOVES * FP32_BYTES * sizes.heads_per_unit)
            pieces[kind] = PieceCost(fixed_s=operation_s, token_unit_s=flops / flops_per_s + scores)
        else:
            read = weights(FP32_BYTES * hidden * sizes.unit_width(kind))
            pieces[kind] = PieceCost(fixed_s=operation_s, unit_s=read, token_unit_s=flops / flops_per_s)
    connection = CONNECTION_FLOPS * hidden / flops_per_s + moved(CONNECTION_MOVES * FP32_BYTES * hidden)
    pieces["CONN"] = PieceCost(fixed_s=operation_s, token_s=connection)
    pieces["ADD"] = PieceCost(fixed_s=operation_s, token_s=hidden / flops_per_s + moved(3 * FP32_BYTES * hidden))
    pieces["ENTER"] = PieceCost(fixed_s=operation_s, token_s=connection)
    pieces["EMB"] = PieceCost(fixed_s=operation_s, token_s=connection)
    logits = 2.0 * hidden * vocabulary / flops_per_s + weights(FP32_BYTES * hidden * vocabulary)
    pieces["HEAD"] = PieceCost(fixed_s=operation_s + logits, token_s=connection)
    return StackCosts(pieces=pieces)


def working_bytes(sizes: StackSizes) -> int:
    """Return the activations of one token on a device that has the whole layer: hidden states, queries, keys, values, columns."""
    shape = sizes.shape
    own = 3 * shape.hidden_size + shape.num_units * (2 * sizes.query_width + 2 * sizes.kv_width) + (sizes.matrices - 1) * shape.columns
    return FP32_BYTES * own


def scaled_to(host: InferenceProfile, cluster: Cluster) -> InferenceProfile:
    """Return every emulated device's profile: the host's one core, divided by the device's share of it.

    Raises ConfigError for a profile of several devices, and for a device without host_share.
    """
    if host.world_size != 1:
        raise ConfigError(
            f"Scaling the profile of '{host.model}' to '{cluster.name}' was asked for.",
            f"It has {host.world_size} devices.",
            "Give this host's: one core, one device.",
        )
    for device in cluster.devices:
        if device.host_share is None:
            raise ConfigError(
                f"Cluster '{cluster.name}' was to be emulated here.",
                f"Device '{device.name}' has no host_share.",
                "Give each device one (0.5 is half as fast as a core of this machine), or use --mode simulate.",
            )
    rows = tuple(tuple(costs.scaled(1 / (device.host_share or 1.0)) for costs in host.costs[0]) for device in cluster.devices)
    return replace(host, source="scaled", costs=rows)
