"""Profiles of single-shot inference: from FLOPs and a device's speed, or scaled from this host's measurements (Galaxy+,
section III-C).

FLOPs: 2 for each weight and token, 4 x width for each query-key pair (a causal mask is computed, not skipped).
Connections are element-wise: their cost is memory traffic if a memory rate is given, and otherwise a few FLOPs for each
number.

The sizes of stacks, with the parts that inference splits (heads or their groups, columns and tokens), are Table V's and
Eq. 8's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import StackShape
from workbench.core.names import FP32_BYTES
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.profiler.descriptions import ModelDescription, describe

CONNECTION_FLOPS = 10
"""FLOPs for each number of a hidden state: bias, residual, mean, variance, scale and shift."""
CONNECTION_MOVES = 5
"""Memory accesses: reads of block output and residual, a write of their sum, a read and a write of the norm."""
SCORE_MOVES = 4
"""Memory accesses for each score: written, read and written by the softmax, read."""


def analytic_inference(model: ModelDescription | str, cluster: Cluster, **rates: Any) -> InferenceProfile:
    """Return a described model's profile from its sizes and each device's rates (see analytic_from)."""
    described = describe(model)
    first, last = end_bytes(described)
    return analytic_from(described.name, stack_sizes(described), cluster, first_bytes=first, last_bytes=last, **rates)


def analytic_from(
    name: str,
    stacks: Sequence[StackShape],
    cluster: Cluster,
    *,
    first_bytes: int = 0,
    last_bytes: int = 0,
    **rates: Any,
) -> InferenceProfile:
    """Return the profile of any stacks of known sizes.

    rates: see analytic_costs; without weight_bytes_per_s each device reads weights at its memory_bytes_per_s.
    """
    rows = tuple(
        tuple(
            analytic_costs(
                sizes, flops_per_s=device.flops_per_s, **{"weight_bytes_per_s": device.memory_bytes_per_s} | rates
            )
            for sizes in stacks
        )
        for device in cluster.devices
    )
    return InferenceProfile(
        model=name,
        source="analytic",
        stacks=tuple(stacks),
        costs=rows,
        first_bytes=first_bytes,
        last_bytes=last_bytes,
        working_bytes_per_token=max(map(working_bytes, stacks)),
    )


def analytic_costs(
    sizes: StackShape,
    *,
    flops_per_s: float,
    memory_bytes_per_s: float | None = None,
    weight_bytes_per_s: float | None = None,
    operation_s: float = 0.0,
    vocabulary: int = 0,
) -> StackTimes:
    """Return the seconds of one layer's operations on one device.

    operation_s: the launch time of an operation.  memory_bytes_per_s: rate of reading and writing activations, which
    bounds connections, sums and softmax; None counts only their FLOPs.  weight_bytes_per_s: rate of reading weights,
    which bounds a single token's pass; None leaves it out, because with tens of tokens arithmetic takes longer.
    vocabulary: rows of the head, 0 for no head.
    """
    hidden = sizes.hidden_size

    def moved(nbytes: float) -> float:
        return 0.0 if memory_bytes_per_s is None else nbytes / memory_bytes_per_s

    def weights(nbytes: float) -> float:
        return 0.0 if weight_bytes_per_s is None else nbytes / weight_bytes_per_s

    pieces = {}
    for kind in divided_kinds(sizes):
        flops = unit_flops(sizes, kind)
        if kind in ("ATT", "CATT"):
            scores = moved(SCORE_MOVES * FP32_BYTES * sizes.heads_per_unit)
            pieces[kind] = PieceCost(fixed_s=operation_s, token_unit_s=flops / flops_per_s + scores)
        else:
            weights_s = weights(FP32_BYTES * hidden * unit_width(sizes, kind))
            pieces[kind] = PieceCost(fixed_s=operation_s, unit_s=weights_s, token_unit_s=flops / flops_per_s)
    connection = CONNECTION_FLOPS * hidden / flops_per_s + moved(CONNECTION_MOVES * FP32_BYTES * hidden)
    pieces["CONN"] = PieceCost(fixed_s=operation_s, token_s=connection)
    pieces["ADD"] = PieceCost(fixed_s=operation_s, token_s=hidden / flops_per_s + moved(3 * FP32_BYTES * hidden))
    pieces["ENTER"] = PieceCost(fixed_s=operation_s, token_s=connection)
    pieces["EMB"] = PieceCost(fixed_s=operation_s, token_s=connection)
    logits = 2.0 * hidden * vocabulary / flops_per_s + weights(FP32_BYTES * hidden * vocabulary)
    pieces["HEAD"] = PieceCost(fixed_s=operation_s + logits, token_s=connection)
    return StackTimes(pieces=pieces)


def query_width(shape: StackShape) -> int:
    """Return the width of one token's queries in one unit.  Raises ConfigError if the heads' size is not known."""
    if shape.head_size < 1:
        request = f"The FLOPs of a stack of {shape.num_layers} layers were asked for."
        raise ConfigError(request, f"Its heads are {shape.head_size} wide.", "Give head_size, at least 1.")
    return shape.heads_per_unit * shape.head_size


def unit_width(shape: StackShape, kind: str) -> int:
    """Return the width of the part of a product's weights in one unit or column; the other dimension is the hidden
    size.
    """
    query, both = query_width(shape), 2 * shape.keys_per_unit * shape.head_size
    return {
        "QKV": query + both,
        "OUT": query,
        "CQ": query,
        "CKV": both,
        "COUT": query,
        "UP": 1 + shape.is_gated,
        "DOWN": 1,
    }[kind]


def unit_flops(shape: StackShape, kind: str) -> float:
    """Return the FLOPs of one unit for one token; for ATT and CATT for one query-key pair.  The kinds are those of
    StackTimes.
    """
    if kind in ("ATT", "CATT"):
        return 4.0 * query_width(shape)
    return 2.0 * shape.hidden_size * unit_width(shape, kind)


def divided_kinds(shape: StackShape) -> tuple[str, ...]:
    """Return the kinds of a layer's operations that are split by units or columns."""
    crossed = ("CQ", "CKV", "CATT", "COUT") if shape.has_cross_attention else ()
    return ("QKV", "ATT", "OUT", *crossed, "UP", "DOWN")


def layer_flops(shape: StackShape, tokens: int, memory_tokens: int = 0) -> float:
    """Return the FLOPs of one layer.

    memory_tokens: number of tokens of the encoder's output, for cross-attention.
    """
    flops = 0.0
    for kind in divided_kinds(shape):
        units = shape.columns if kind in ("UP", "DOWN") else shape.num_units
        count = {"ATT": tokens * tokens, "CATT": tokens * memory_tokens, "CKV": memory_tokens}.get(kind, tokens)
        flops += unit_flops(shape, kind) * units * count
    return flops


def working_bytes(sizes: StackShape) -> int:
    """Return the bytes of one token's activations on a device with the whole layer: hidden states, queries, keys,
    values, columns.
    """
    units = sizes.num_units * 2 * (query_width(sizes) + sizes.keys_per_unit * sizes.head_size)
    return FP32_BYTES * (3 * sizes.hidden_size + units + (1 + sizes.is_gated) * sizes.columns)


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
    rows = tuple(tuple(costs.scaled(1 / share) for costs in host.costs[0]) for share in cluster.host_shares())
    return replace(host, source="scaled", costs=rows)


def stack_sizes(model: ModelDescription | str) -> tuple[StackShape, ...]:
    """Return the sizes of a described model's stacks in fp32: one, or encoder and decoder."""
    described = describe(model)
    first = _sizes(described, decoder=False)
    return (first, _sizes(described, decoder=True)) if described.kind == "encoder-decoder" else (first,)


def end_bytes(model: ModelDescription | str) -> tuple[int, int]:
    """Return the bytes of embedding and head in fp32; an output matrix tied to the embedding counts once, in the
    embedding.
    """
    described = describe(model)
    return FP32_BYTES * described.embedding_params, FP32_BYTES * described.head_params


def _sizes(model: ModelDescription, *, decoder: bool) -> StackShape:
    groups = model.kv_heads or model.heads
    if model.heads % groups:
        raise ConfigError(
            f"Cutting '{model.name}' by heads was asked for.",
            f"{model.heads} heads share {groups} keys and values.",
            "Choose a multiple.",
        )
    query, kv = model.query_width // groups, model.kv_width // groups
    matrices = 3 if model.gated else 2
    biased = int(model.biases)
    attentions = 2 if decoder else 1
    unit_bytes = FP32_BYTES * (model.hidden * (2 * query + 2 * kv) + biased * (query + 2 * kv))
    return StackShape(
        num_layers=model.num_layers,
        num_units=groups,
        hidden_size=model.hidden,
        columns=model.feed_forward,
        unit_bytes=unit_bytes,
        column_bytes=FP32_BYTES * (matrices * model.hidden + biased * (matrices - 1)),
        layer_bytes=FP32_BYTES * ((attentions + 1) * (model.norm_vectors + biased) * model.hidden),
        cross_unit_bytes=unit_bytes if decoder else 0,
        hidden_bytes=FP32_BYTES * model.hidden,
        kv_unit_bytes=FP32_BYTES * 2 * kv,
        has_cross_attention=decoder,
        is_causal=decoder or model.kind == "decoder",
        head_size=kv,
        heads_per_unit=model.heads // groups,
        is_gated=model.gated,
    )
