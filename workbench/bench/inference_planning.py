"""How long our planner of hybrid model parallelism takes, beside Algorithm 1 (Galaxy+, section III-C): 8 devices, 48 layers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.planners.galaxy_plus import algorithm_1, plan, price_plan
from workbench.profiler.descriptions import describe
from workbench.profiler.inference import analytic_from
from workbench.profiler.inference_sizes import end_bytes, stack_sizes

MODELS = ("BERT-Large", "GPT2-Large", "OPT-1.3B")
LAYERS, LENGTH, COPIES, ROUNDS = 48, 284, 2, 5
MEMORY = 3
"""Devices have so many times the memory of Env. B's: two times eight would not hold 48 layers of every model otherwise."""


def planning_point(progress: Callable[[str], None]) -> dict[str, Any]:
    """Return the planner's seconds by Eq. 9 for each model with 48 layers, on Env. B's devices twice, and what it gains on Algorithm 1."""
    known = load_cluster("galaxy-env-b").devices
    devices = [
        replace(device, name=f"{device.name}-{copy}", memory_bytes=MEMORY * device.memory_bytes)
        for copy in range(COPIES)
        for device in known
    ]
    cluster = Cluster(name="Env. B twice", devices=tuple(devices))
    points: dict[str, Any] = {}
    for name in MODELS:
        described = replace(describe(name), num_layers=LAYERS)
        first, last = end_bytes(described)
        profile = analytic_from(name, stack_sizes(described), cluster, first_bytes=first, last_bytes=last)
        seconds = []
        for _ in range(ROUNDS):
            begin_s = time.perf_counter()
            ours = plan(profile, cluster, length=LENGTH)
            seconds.append(time.perf_counter() - begin_s)
        try:
            printed = price_plan(algorithm_1(profile, cluster, length=LENGTH), profile, cluster).layers_s
            gain = printed / price_plan(ours, profile, cluster).layers_s
        except PlanError:
            gain = None
        points[name] = {"s": median(seconds), "from, to": (round(min(seconds), 3), round(max(seconds), 3)), "algorithm 1 over ours": gain}
        gained = f"; Algorithm 1's plan takes {gain:.2f} times as long" if gain is not None else "; Algorithm 1 finds none"
        progress(
            f"Planner, {name} with {LAYERS} layers, {len(devices)} devices: {median(seconds):.2f} s "
            f"({min(seconds):.2f} to {max(seconds):.2f}){gained}"
        )
    return {
        f"planner, {len(devices)} devices and {LAYERS} layers, longest median s": max(point["s"] for point in points.values()),
        "planner": points,
    }
