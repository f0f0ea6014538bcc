"""Profiles and clusters of single-shot inference for the planners' tests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tests.clusters import cluster_of
from workbench.core.cluster import Cluster, Link
from workbench.core.inference import InferencePlan, StackShape
from workbench.methods.galaxy_plus.memory import InferenceNeed
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.planners import check, needs
from workbench.planners import Problem
from workbench_studies.papers.galaxy_plus.testbed import as_printed


def costs(
    speed: float, *, hidden: int, unit_width: int, per_op_s: float = 0.0, conn: float = 1.0, cross: bool = False
) -> StackTimes:
    """Return the costs of one layer on a device of `speed` FLOP/s."""

    def gemm(flops: float) -> PieceCost:
        return PieceCost(fixed_s=per_op_s, token_unit_s=flops / speed)

    pieces = {
        "QKV": gemm(6 * hidden * unit_width),
        "ATT": gemm(4 * unit_width),
        "OUT": gemm(2 * hidden * unit_width),
        "UP": gemm(2 * hidden),
        "DOWN": gemm(2 * hidden),
        "CONN": PieceCost(fixed_s=per_op_s, token_s=conn * 40 * hidden / speed),
        "ADD": PieceCost(token_s=conn * 4 * hidden / speed),
        "EMB": PieceCost(token_s=hidden / speed),
        "HEAD": PieceCost(token_s=hidden / speed),
    }
    if cross:
        pieces |= {
            "CQ": gemm(2 * hidden * unit_width),
            "CKV": gemm(4 * hidden * unit_width),
            "CATT": gemm(4 * unit_width),
            "COUT": gemm(2 * hidden * unit_width),
        }
    return StackTimes(pieces=pieces)


def shape(
    num_layers: int, num_units: int, *, unit_width: int = 64, columns: int | None = None, cross: bool = False
) -> StackShape:
    """Return a stack in fp32: four square matrices, and a feed-forward network four times as wide unless given."""
    hidden = num_units * unit_width
    return StackShape(
        num_layers=num_layers,
        num_units=num_units,
        hidden_size=hidden,
        columns=4 * hidden if columns is None else columns,
        unit_bytes=16 * hidden * unit_width,
        column_bytes=8 * hidden,
        layer_bytes=24 * hidden,
        cross_unit_bytes=16 * hidden * unit_width if cross else 0,
        hidden_bytes=4 * hidden,
        has_cross_attention=cross,
    )


def instance(
    speeds: list[float],
    stacks: tuple[StackShape, ...],
    *,
    memory_bytes: list[int] | int = 10**12,
    mbit_per_s: list[float] | float = 500.0,
    pairs: dict[str, Link] | None = None,
    per_op_s: list[float] | float = 0.0,
    conn: list[float] | float = 1.0,
    first_bytes: int = 0,
    latency_s: float = 2e-4,
) -> tuple[InferenceProfile, Cluster]:
    """Return a profile and a cluster of devices d0, d1, ... of these FLOP/s; numbers that are not lists hold for every
    device."""

    def each(given, rank):
        return given[rank] if isinstance(given, list) else given

    rows = tuple(
        tuple(
            costs(
                speed,
                hidden=stack.hidden_size,
                unit_width=stack.hidden_size // stack.num_units,
                per_op_s=each(per_op_s, rank),
                conn=each(conn, rank),
                cross=stack.has_cross_attention,
            )
            for stack in stacks
        )
        for rank, speed in enumerate(speeds)
    )
    profile = InferenceProfile(model="toy", source="analytic", stacks=stacks, costs=rows, first_bytes=first_bytes)
    links = [Link(bytes_per_s=each(mbit_per_s, rank) * 125e3, latency_s=latency_s) for rank in range(len(speeds))]
    cluster = cluster_of(len(speeds), name="toy", memory_bytes=memory_bytes, link=links)
    return profile, replace(cluster, pairs=pairs or {})


def unequal(
    seed: int, *, world_size: int | None = None, stack: StackShape | None = None
) -> tuple[InferenceProfile, Cluster, int]:
    """Return a random instance and a number of tokens: 2 to 8 devices of unequal speed, overheads, memory and links."""
    draw = random.Random(seed)
    count = world_size or draw.randint(2, 8)
    one = stack or shape(
        draw.choice((6, 12, 24, 48)),
        draw.choice((8, 12, 16, 20, 32)),
        unit_width=draw.choice((32, 64, 128)),
        columns=None,
    )
    fast = draw.choice((2e9, 2e10, 2e11))
    speeds = [fast * draw.choice((1.0, 0.5, 0.27, 0.13)) * draw.uniform(0.8, 1.2) for _ in range(count)]
    total_bytes = one.num_layers * (one.attention_bytes + one.feed_forward_bytes)
    tightness = draw.choice((1.2, 2.0, 4.0))
    budgets = [int(total_bytes * max(draw.uniform(0.2, 2.0) * tightness / count, 0.05)) for _ in range(count)]
    bandwidths = [draw.choice((125.0, 250.0, 500.0, 1000.0)) for _ in range(count)]
    pairs = {}
    if draw.random() < 0.4:
        for i in range(count):
            for j in range(count):
                if i != j and draw.random() < 0.4:
                    pairs[f"d{i}>d{j}"] = Link(
                        bytes_per_s=125e3 * draw.choice((60, 125, 500, 1000)), latency_s=draw.uniform(0, 1e-3)
                    )
    profile, cluster = instance(
        speeds,
        (one,),
        memory_bytes=budgets,
        mbit_per_s=bandwidths,
        pairs=pairs,
        per_op_s=[draw.choice((0.0, 1e-4, 1e-3)) * 2e9 / fast for _ in range(count)],
        conn=[draw.uniform(0.5, 3) for _ in range(count)],
        first_bytes=int(0.02 * total_bytes) if draw.random() < 0.3 else 0,
    )
    return profile, cluster, draw.choice((17, 64, 197, 284, 512))


def sequence(
    profile: InferenceProfile, cluster: Cluster, *, length: int, is_printed: bool = False, **given: Any
) -> Problem[InferenceProfile]:
    """Return the problem of a sequence.  is_printed: memory counts as in Eq. 8-9."""
    profile, cluster = as_printed(profile, cluster) if is_printed else (profile, cluster)
    return Problem(profile, cluster, sequence_length=length, **given)


def check_inference(plan: InferencePlan, profile: InferenceProfile, cluster: Cluster, **given: Any) -> None:
    """Raise PlanError if a plan does not fit."""
    check(sequence(profile, cluster, length=plan.length, **given), plan)


def inference_needs(plan: InferencePlan, profile: InferenceProfile) -> dict[int, InferenceNeed]:
    """Return what each rank of a plan needs; the cluster does not matter."""
    cluster: Any = None
    return needs(sequence(profile, cluster, length=plan.length), plan)
