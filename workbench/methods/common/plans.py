"""Reject a plan made for another model, cluster or batch; time-outs, and how long a plan is refined."""

from __future__ import annotations

from collections.abc import Iterable

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.plan import Plan

SILENT_AFTER_STEPS = 10
"""A peer counts as silent when a step takes this multiple of its expected time."""

REAL_TIMEOUT_S = 300.0
"""How long a real device waits for a silent one, which may need this time to load its layers.  A lost connection is detected at once."""

MAX_SIMULATIONS = 200
"""Maximum number of steps that the refinement of a plan may simulate: a second or two."""


def require_plan(plan: Plan, cluster: Cluster, *, model: str, num_layers: int, others: Iterable[tuple[bool, str, str]] = ()) -> None:
    """Raise ConfigError for a plan with other layers or devices.  others: further checks as (is wrong, found, advice)."""
    stages = plan.stages + ((plan.cached,) if plan.cached is not None else ())
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    outside = max(rank for stage in stages for rank in stage.ranks) >= cluster.world_size
    for is_wrong, found, todo in (
        (
            any(layers != num_layers for layers in (plan.num_layers, stages[-1].stop)),
            f"It has {plan.num_layers} layers; '{model}' has {num_layers}.",
            "Cut all layers into stages.",
        ),
        (
            outside or len(ranks) > len(set(ranks)),
            f"It uses ranks {ranks}; the cluster has {cluster.size_words}.",
            "Use each device once.",
        ),
        *others,
    ):
        if is_wrong:
            raise ConfigError(f"The plan {plan.partition()} on {plan.grouping()} was asked for.", found, todo)
