"""Find out what a step's seconds go to, by simulating it again on better links.

What a step takes less without the links' latency is the latency's part, and what it then takes less without the links
is the bytes' part.  Of the rest, the busiest device computes for a part, and in the other part it waits for others.
Memory decides where the planner makes a clearly faster plan if memory has no limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.errors import WorkbenchError
from workbench.core.step_parts import StepParts, Term
from workbench.core.timeline import Timeline, busy_of
from workbench.methods.base import Method, Planned

ROOMY = 1000
"""Times its memory a device has where memory has no limit."""
CLEARLY = 0.05
"""The share of a step's time that a plan with more memory must save."""
FREE_BYTES_PER_S = 1e15
"""Rate of a link on which bytes take no time."""


def step_parts(method: Method, planned: Planned[Any], *, is_planners: bool = True) -> StepParts:
    """Return the parts of a plan's typical first step.  is_planners: the planner made the plan."""
    timeline = method.typical_step(planned)

    def seconds(cluster: Cluster) -> float:
        return typical_step_s(method, planned._replace(cluster=cluster))

    step_s = seconds(planned.cluster)
    roomy_s, roomy_plan = _roomy(method, planned) if is_planners else (math.inf, "")
    is_faster = roomy_s < step_s * (1 - CLEARLY)
    busy_s = list(map(busy_of, timeline.by_rank()))
    parts = parts_s(timeline, step_s, planned.cluster, seconds)
    return StepParts(
        step_s=step_s,
        shares={term: part_s / step_s for term, part_s in parts.items()},
        busiest=timeline.device_names[busy_s.index(max(busy_s))],
        roomy_s=roomy_s if is_faster else None,
        roomy_plan=roomy_plan if is_faster else "",
    )


def parts_s(
    timeline: Timeline, step_s: float, cluster: Cluster, seconds: Callable[[Cluster], float]
) -> dict[Term, float]:
    """Return the seconds of each part of a step.  seconds: returns those of the same step on other links."""
    without_latency = cluster.with_links(lambda link: replace(link, latency_s=0.0))
    without_links = without_latency.with_links(lambda link: replace(link, bytes_per_s=FREE_BYTES_PER_S))
    # A schedule may take longer where something is faster (Graham's anomalies); no part is below 0.
    sends = any(span.op.is_communication for span in timeline.spans)
    prompt_s = min(step_s, seconds(without_latency)) if sends else step_s
    free_s = min(prompt_s, seconds(without_links)) if sends else step_s
    compute_s = min(free_s, step_s * max(map(busy_of, timeline.by_rank())) / timeline.makespan_s)
    return {
        "compute": compute_s,
        "bubble": free_s - compute_s,
        "bandwidth": prompt_s - free_s,
        "latency": step_s - prompt_s,
    }


def typical_step_s(method: Method, planned: Planned[Any]) -> float:
    """Return the seconds of a plan's typical first step, simulated."""
    # Nothing is written to the folder of a sweep's point that is only simulated.
    return method.sweep_point(planned, "", None, num_steps=1, folder=Path()).predicted_s


def _roomy(method: Method, planned: Planned[Any]) -> tuple[float, str]:
    """Return the seconds of a step of the plan where memory has no limit, and that plan in words; infinity if memory
    cannot matter.
    """
    if _holds_all(planned):
        return math.inf, ""
    cluster = planned.cluster.with_each(lambda device: replace(device, memory_bytes=ROOMY * device.memory_bytes))
    try:
        plan = method.plan(planned.prepared, planned.profile, cluster)
        words = f"{plan.partition()} on {plan.grouping()}"
        return typical_step_s(method, planned._replace(cluster=cluster, plan=plan)), words
    except WorkbenchError:  # a limit besides memory
        return math.inf, ""


def _holds_all(planned: Planned[Any]) -> bool:
    """Return whether each device has memory for all layers and the activations of all samples of a step."""
    prepared, profile = planned.prepared, planned.profile
    batch, length = prepared.job.batch_size, prepared.longest
    activations = sum(
        layer.context_bytes(batch, length) + layer.tap_bytes(batch, length) + layer.output_bytes(batch, length)
        for layer in profile.layers[0]
    ) + max(layer.workspace_bytes(batch, length) for layer in profile.layers[0])
    return profile.stored_bytes(profile.layers[0]) + activations <= min(
        device.memory_bytes for device in planned.cluster.devices
    )
