"""Energy of a timeline: busy power while a device computes, idle power otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """busy_joules[rank], idle_joules[rank]: what each device takes, from the first operation to the end of the last on any device."""

    busy_joules: tuple[float, ...]
    idle_joules: tuple[float, ...]


def energy(timeline: Timeline, cluster: Cluster) -> Energy:
    """Return each device's energy in joules.  Raises ConfigError if the cluster is not the timeline's or has no power figures."""
    if cluster.world_size != timeline.world_size:
        raise ConfigError(
            f"The energy of a timeline of {timeline.world_size} devices was asked for.",
            f"Cluster '{cluster.name}' has {cluster.world_size}.",
            "Give the cluster that the timeline was made on.",
        )
    unknown = [device.name for device in cluster.devices if device.watts_busy == 0]
    if unknown:
        raise ConfigError(
            "The energy of a timeline was asked for.", f"Device '{unknown[0]}' has no watts_busy.", "Set watts_busy and watts_idle."
        )
    busy_s = [0.0] * timeline.world_size
    reached_s = [0.0] * timeline.world_size
    for span in sorted((s for s in timeline.spans if not s.op.is_communication), key=lambda s: s.start_s):
        busy_s[span.rank] += max(0.0, span.end_s - max(span.start_s, reached_s[span.rank]))
        reached_s[span.rank] = max(reached_s[span.rank], span.end_s)
    return Energy(
        busy_joules=tuple(device.watts_busy * busy for device, busy in zip(cluster.devices, busy_s, strict=True)),
        idle_joules=tuple(device.watts_idle * (timeline.makespan_s - busy) for device, busy in zip(cluster.devices, busy_s, strict=True)),
    )
