"""Faults injected into running devices by a schedule, so that what the portal does about them can be watched."""

from __future__ import annotations

import math
import random
from bisect import insort
from collections.abc import Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.serving import Fault


def never_begun(faults: Sequence[Fault], cluster: Cluster, end_s: float) -> tuple[str, ...]:
    """Return a note for each fault that was asked for at a time after the last answer: the report shows nothing of it."""
    return tuple(
        f"The fault '{fault.kind}' of {cluster.devices[fault.rank].name} at {fault.start_s:g} s never began: "
        f"the stream ended after {end_s:.3g} s. Send more requests, or begin it earlier."
        for fault in faults
        if fault.start_s >= end_s
    )


class FaultSchedule:
    """What is due when.  due(now) names each beginning and each end once, in order.

    faults: those it was made of and those that were added while it ran.
    """

    def __init__(self, faults: Sequence[Fault] = ()) -> None:
        self.faults: list[Fault] = []
        self._moments: list[tuple[float, int, bool]] = []
        self._factors: dict[int, dict[int, float]] = {}
        for fault in faults:
            self.add(fault)

    def add(self, fault: Fault) -> None:
        """Let one more happen; what it should have done before now it does now."""
        number = len(self.faults)
        self.faults.append(fault)
        insort(self._moments, (fault.start_s, number, True))
        if fault.end_s is not None:
            insort(self._moments, (fault.end_s, number, False))

    def end(self, rank: int, now_s: float) -> None:
        """Let the faults of a device that have no end yet end now."""
        for number, fault in enumerate(self.faults):
            if fault.rank == rank and fault.end_s is None:
                self.faults[number] = replace(fault, end_s=max(now_s, math.nextafter(fault.start_s, math.inf)))
                insort(self._moments, (self.faults[number].end_s or now_s, number, False))

    @property
    def next_s(self) -> float:
        """Return when the next is due, infinity if none is left."""
        return self._moments[0][0] if self._moments else math.inf

    def due(self, now_s: float) -> list[tuple[Fault, bool]]:
        """Return the faults that begin (True) or end (False) by now."""
        found = []
        while self._moments and self._moments[0][0] <= now_s:
            _, number, begins = self._moments.pop(0)
            fault = self.faults[number]
            if fault.kind == "slow":
                factors = self._factors.setdefault(fault.rank, {})
                if begins:
                    factors[number] = fault.factor
                else:
                    factors.pop(number, None)
            found.append((fault, begins))
        return found

    def factor(self, rank: int) -> float:
        """Return how many times slower a device is now by all faults in force."""
        return math.prod(self._factors.get(rank, {}).values())


def random_faults(world_size: int, until_s: float, *, every_s: float = 12.0, seed: int = 0) -> tuple[Fault, ...]:
    """Return slow-downs, kills and freezes with returns at random times up to until_s, on average one every `every_s`.

    Faults of one device do not overlap, and the device has time to come back between them; at most half of the devices, and never all,
    are down at a time.
    """
    draws = random.Random(seed)
    faults: list[Fault] = []
    free_s = [0.0] * world_size
    now_s = 0.0
    while True:
        now_s += draws.expovariate(1 / every_s)
        rank = draws.randrange(world_size)
        lasts_s = draws.uniform(0.3, 1.0) * every_s
        if now_s + lasts_s > until_s:
            return tuple(faults)
        kind = draws.choices(("slow", "kill", "freeze"), (5, 4, 1))[0]
        down = sum(fault.kind != "slow" and fault.start_s <= now_s < (fault.end_s or 0.0) + every_s for fault in faults)
        if free_s[rank] > now_s or (kind != "slow" and down >= max(1, world_size // 2)) or (kind != "slow" and world_size == 1):
            continue
        free_s[rank] = now_s + lasts_s + every_s
        factor = draws.uniform(2.0, 8.0) if kind == "slow" else 1.0
        faults.append(Fault(kind=kind, rank=rank, start_s=now_s, end_s=now_s + lasts_s, factor=factor))  # type: ignore[arg-type]
