"""Find out what a step's seconds go to, by simulating it again on better links.

What a step takes less without the links' latency is the latency's part, and what it then takes less without the links
is the bytes' part.  Of the rest, the busiest device computes for a part, and in the other part it waits for others.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.step_parts import StepParts
from workbench.methods.base import Method, Planned

FREE_BYTES_PER_S = 1e15
"""Of a link on which bytes take no time."""


def step_parts(method: Method, planned: Planned[Any]) -> StepParts:
    """Return the parts of a plan's typical first step."""
    timeline = method.typical_step(planned)

    def seconds(cluster: Cluster) -> float:
        # Nothing is written to the folder of a sweep's point that is only simulated.
        return method.sweep_point(planned._replace(cluster=cluster), "", None, num_steps=1, folder=Path()).predicted_s

    step_s = seconds(planned.cluster)
    without_latency = planned.cluster.with_links(lambda link: replace(link, latency_s=0.0))
    without_links = without_latency.with_links(lambda link: replace(link, bytes_per_s=FREE_BYTES_PER_S))
    # A schedule may take longer where something is faster (Graham's anomalies); no part is below 0.
    prompt_s = min(step_s, seconds(without_latency))
    free_s = min(prompt_s, seconds(without_links))
    busy_s = [timeline.busy_s(rank) for rank in range(timeline.world_size)]
    busiest = max(range(timeline.world_size), key=busy_s.__getitem__)
    compute_s = min(free_s, step_s * busy_s[busiest] / timeline.makespan_s)
    return StepParts(
        step_s=step_s,
        shares={
            "compute": compute_s / step_s,
            "bubble": (free_s - compute_s) / step_s,
            "bandwidth": (prompt_s - free_s) / step_s,
            "latency": (step_s - prompt_s) / step_s,
        },
        busiest=timeline.device_names[busiest],
    )
