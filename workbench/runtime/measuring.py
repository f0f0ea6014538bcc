"""Job functions that measure a cluster's devices: the links that start at each, and its processor, memory and disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from workbench.profiler.host import (
    HostProfile,
    LinkSample,
    measure_at_once,
    measure_host,
    measure_links,
    sustained_rates,
)
from workbench.runtime.context import RankContext
from workbench.runtime.health import Health
from workbench.runtime.pacing import RankLinks
from workbench.runtime.process_group import group


def measure_rank_links(
    context: RankContext, payload: tuple[tuple[int, ...], int]
) -> tuple[tuple[LinkSample, ...], ...]:
    """Return the samples of each link that starts at this rank.  payload: message sizes and repeats."""
    sizes, repeats = payload
    with paced_group(context, 60.0, "links") as opened:
        return tuple(measure_links(opened, context.rank, sizes=sizes, repeats=repeats).values())


def measure_rank_at_once(context: RankContext, payload: tuple[tuple[int, ...], int]) -> LinkSample:
    """Return the time of a message to this rank while all send.  payload: the bytes of each rank's, and repeats."""
    sizes, repeats = payload
    with paced_group(context, 60.0, "at once") as opened:
        return measure_at_once(opened, context.rank, sizes, repeats=repeats)


@contextmanager
def paced_group(context: RankContext, timeout_s: float = 30.0, name: str = "main") -> Iterator[PacedGroup]:
    """Open a group of all ranks (see open_group) whose messages take as long as the cluster's links."""
    with group(context, timeout_s, name) as opened:
        yield PacedGroup(opened, RankLinks(cluster=context.cluster, rank=context.rank, fidelity=context.fidelity))


class PacedGroup:
    """A process group that delays its messages like the runtime's transport: by the part of the links' time that the
    kernel does not emulate.
    """

    def __init__(self, opened: Any, links: RankLinks, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._group, self._links, self._sleep = opened, links, sleep

    def send(self, tensors: Sequence[Any], destination: int, tag: int) -> Any:
        """Wait for this part of the link's time, then send."""
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self._sleep(self._links.added_s(self._links.rank, destination, nbytes))
        return self._group.send(tensors, destination, tag)

    def __getattr__(self, name: str) -> Any:
        """Return a method that no link delays: recv, barrier, size."""
        return getattr(self._group, name)


class HeatSample(NamedTuple):
    """A device after busy_s seconds of computing: its rate, its temperature, and whether it says that heat slows it
    down.
    """

    busy_s: float
    flops_per_s: float
    temperature_c: float | None
    is_throttled: bool


def measure_rank_sustained(context: RankContext, seconds: float) -> tuple[HeatSample, ...]:
    """Return samples of this device while it computes for so many seconds."""
    health = Health()
    return tuple(
        HeatSample(busy_s, rate, health.temperature_c, health.read().is_throttled)
        for busy_s, rate in sustained_rates(seconds)
    )


def measure_rank_host(context: RankContext, seconds: float) -> HostProfile:
    """Return this device's rates, after `seconds` of arithmetic and as many of copying."""
    return measure_host(seconds=seconds)
