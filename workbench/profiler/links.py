"""Measure links from inside: bandwidth by message size and latency between ranks of a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.core.cluster import Link
from workbench.core.errors import ConfigError

SIZES = (1, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
SMALL_BYTES = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One message size from rank to rank.  seconds: one way, the median of the repeats; lowest_s: the fastest."""

    source: int
    destination: int
    nbytes: int
    seconds: float
    lowest_s: float

    @property
    def bytes_per_s(self) -> float:
        """Return the payload rate of a message of this size, latency included."""
        return self.nbytes / self.seconds


def measure_link(
    group: Any,
    rank: int,
    source: int,
    destination: int,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LinkSample, ...]:
    """Return one sample for each message size on rank `source`, () on every other.

    group: a torch.distributed process group, whose ranks are meant.  Source and destination must both call it; others may.
    Each message is answered by one byte; half the round trip of one byte is taken off for the answer.
    """
    if source == destination:
        raise ConfigError(f"A link from rank {source} to itself was asked for.", "There is none.", "Name two ranks.")
    if repeats < 1 or not sizes or min(sizes) < 1:
        raise ConfigError(f"{repeats} messages of {list(sizes)} bytes were asked for.", "All must be at least 1.", "Raise them.")
    if rank not in (source, destination):
        return ()
    answer = torch.zeros(1, dtype=torch.uint8)
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (1, *sizes)]
    times: list[list[float]] = [[] for _ in messages]
    for repeat in range(repeats + 1):  # the first round opens connections and is not counted
        for index, message in enumerate(messages):
            if rank == source:
                began = clock()
                group.send([message], destination, 0).wait()
                group.recv([answer], destination, 0).wait()
                if repeat:
                    times[index].append(clock() - began)
            else:
                group.recv([message], source, 0).wait()
                group.send([answer], source, 0).wait()
    if rank != source:
        return ()
    back = _median(times[0]) / 2
    return tuple(
        LinkSample(
            source=source,
            destination=destination,
            nbytes=size,
            seconds=max(_median(values) - back, 1e-9),
            lowest_s=max(min(values) - back, 1e-9),
        )
        for size, values in zip(sizes, times[1:], strict=True)
    )


def measure_links(
    group: Any, rank: int, *, sizes: Sequence[int] = SIZES, repeats: int = 5
) -> dict[tuple[int, int], tuple[LinkSample, ...]]:
    """Return the samples of every link that leaves this rank, (source, destination) -> samples; every rank of the group must call it.

    Links are measured one after the other: none disturbs another.
    """
    count = group.size()
    found = {}
    for source in range(count):
        for destination in range(count):
            if source != destination:
                samples = measure_link(group, rank, source, destination, sizes=sizes, repeats=repeats)
                if rank == source:
                    found[source, destination] = samples
                group.barrier().wait()
    return found


def fit_link(samples: Sequence[LinkSample]) -> Link:
    """Return the link that explains the samples: latency from the small messages, rate from how much longer the large ones take.

    Raises ConfigError without two message sizes.
    """
    by_size = sorted(samples, key=lambda sample: sample.nbytes)
    if len({sample.nbytes for sample in by_size}) < 2:
        raise ConfigError(f"A link was to be fitted to {len(by_size)} samples.", "It needs two message sizes.", "Measure more sizes.")
    small = [sample.seconds for sample in by_size if sample.nbytes <= SMALL_BYTES] or [by_size[0].seconds]
    latency = min(small)
    largest = by_size[-1]
    # The largest message sets the rate: that is what activations are, and small ones are all latency.
    rate = largest.nbytes / max(largest.seconds - latency, 1e-9)
    return Link(bytes_per_s=rate, latency_s=max(0.0, latency - by_size[0].nbytes / rate))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
