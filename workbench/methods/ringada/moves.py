"""How long a ring pauses while its layers move to other devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.costs import on_air_s
from workbench.core.plan import Stage
from workbench.core.profile import Profile

_TURN_S = 0.6
"""Seconds between two plans besides reading and sending: measured once on four emulated devices (.9 s in all, .3 s of
them predicted)."""


def change_s(
    profile: Profile,
    cluster: Cluster,
    former: Stages,
    stages: Stages,
    *,
    rest_bytes: int = 0,
    inputs: Mapping[int, int] | None = None,
) -> float:
    """Return the seconds for which a run pauses while its layers move.

    Each device reads its new block, and its other weights (rest_bytes), from its own disk, which has the whole model.
    An adapter with both moments crosses a link, and so do the cached inputs of a layer (inputs: bytes by layer).  The
    transfers that a device sends, or receives, are sequential; on shared air all of them are.  Ending one group of
    processes and forming the next takes _TURN_S.
    """
    busy_s, moved = np.zeros((2, cluster.world_size)), list[tuple[int, int, float]]()
    for layer, (source, target) in enumerate(zip(ring_homes(former), ring_homes(stages), strict=True)):
        if source != target:
            nbytes = 3 * profile.layers[0][layer].trainable_bytes + (inputs or {}).get(layer, 0)
            busy_s[(0, 1), (source, target)] += cluster.link(source, target).transfer_s(nbytes)
            moved.append((source, target, nbytes))
    loads_s = []
    for stage in stages:
        device = cluster.devices[stage.ranks[0]]
        block = sum(layer.frozen_bytes for layer in profile.layers[stage.ranks[0]][stage.start : stage.stop])
        loads_s.append(device.loaded_s(block + rest_bytes))
    return _TURN_S + max(loads_s) + max(float(busy_s.max()), on_air_s(cluster, moved))


def ring_homes(stages: Stages) -> tuple[int, ...]:
    """Return the rank that has each layer."""
    return tuple(stage.ranks[0] for stage in stages for _ in range(stage.num_layers))


Stages = tuple[Stage, ...]
