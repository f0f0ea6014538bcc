"""Faults at random times, for trials of recovery."""

from __future__ import annotations

import random
from collections.abc import Sequence

from workbench.core.device_faults import WITH_FACTOR, Fault, FaultKind, Unit


def random_faults(
    world_size: int,
    until: float,
    *,
    every: float = 12.0,
    seed: int = 0,
    unit: Unit = "s",
    kinds: Sequence[FaultKind] = ("slow", "kill", "freeze"),
) -> tuple[Fault, ...]:
    """Return faults, with returns, at random times up to `until`, on average one every `every`.

    seed: seed of the random draws.

    Faults of one device do not overlap, and the device has time to return between them.  At any time at most half of
    the devices are down, and never all.
    """
    draws, weights = random.Random(seed), {"slow": 5, "memory": 1, "kill": 4, "freeze": 1, "leave": 2}
    faults: list[Fault] = []
    free = [0.0] * world_size
    now = 0.0
    while True:
        now += draws.expovariate(1 / every)
        rank = draws.randrange(world_size)
        lasts = draws.uniform(0.3, 1.0) * every
        if now + lasts > until:
            return tuple(faults)
        kind = draws.choices(kinds, [weights[kind] for kind in kinds])[0]
        down = sum(
            fault.kind not in WITH_FACTOR and fault.start <= now < (fault.end or 0.0) + every for fault in faults
        )
        if free[rank] > now or (kind not in WITH_FACTOR and (down >= max(1, world_size // 2) or world_size == 1)):
            continue
        free[rank] = now + lasts + every
        factor = draws.uniform(2.0, 8.0) if kind in WITH_FACTOR else 1.0
        faults.append(Fault(kind=kind, rank=rank, start=now, end=now + lasts, factor=factor, unit=unit))
