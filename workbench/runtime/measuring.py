"""Job functions that measure a cluster's devices: the links that start at each, and its processor, memory and disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.profiler.host import HostProfile, LinkSample, measure_host, measure_links
from workbench.runtime.context import RankContext
from workbench.runtime.pacing import PacedLinks
from workbench.runtime.process_group import group


def measure_rank_links(context: RankContext, asked: tuple[tuple[int, ...], int]) -> tuple[tuple[LinkSample, ...], ...]:
    """Return the samples of each link that starts at this rank.  asked: message sizes and repeats."""
    sizes, repeats = asked
    with group(context, 60.0, "links") as opened:
        links = PacedLinks(cluster=context.cluster, rank=context.rank) if context.fidelity == "paced" else None
        measured = measure_links(opened if links is None else PacedGroup(opened, links), context.rank, sizes=sizes, repeats=repeats)
    return tuple(measured.values())


class PacedGroup:
    """A process group that delays its messages where the kernel does not shape the links, as the runtime's transport does."""

    def __init__(self, opened: Any, links: PacedLinks, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._group, self._links, self._sleep = opened, links, sleep

    def send(self, tensors: Sequence[Any], destination: int, tag: int) -> Any:
        """Wait for the link's time, then send."""
        self._sleep(self._links.transfer_s(destination, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return self._group.send(tensors, destination, tag)

    def __getattr__(self, name: str) -> Any:
        """Return a method that no link delays: recv, barrier, size."""
        return getattr(self._group, name)


def measure_rank_host(context: RankContext, seconds: float) -> HostProfile:
    """Return this device's rates, after `seconds` of arithmetic and as many of copying."""
    return measure_host(seconds=seconds)
