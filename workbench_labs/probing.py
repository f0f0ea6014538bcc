"""Measure operations and messages on emulated devices: what a student's model of a device is compared with.

An operation is real work, which ends no earlier than the device's own rates allow; a message is real, and is held back
by what its link takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from typing import NamedTuple

import torch

from workbench.core.cluster import Cluster
from workbench.core.job import Fidelity
from workbench.profiler.host import HostProfile, measure_link
from workbench.runtime.context import RankContext
from workbench.runtime.engine_starter import share_module
from workbench.runtime.engines import default_pool
from workbench.runtime.measuring import paced_group
from workbench.runtime.pacing import Pacer

share_module(__name__)  # its functions run on devices

Amounts = dict[str, float]
"""flops, memory_bytes, sent_bytes of an operation."""
REPEATS = 5
MEMORY_PART = 0.25
WITHIN = 0.1
"""A prediction is right if its error is at most this share of the measurement."""


class Probe(NamedTuple):
    """Something to measure.  kind: 'product' of two n x n matrices, 'vector' times an n x n matrix, 'message' of n
    bytes.
    """

    kind: str
    n: int

    @property
    def amounts(self) -> Amounts:
        """Return what it needs: float32 numbers are read and written once."""
        n = float(self.n)
        flops, memory, sent = {
            "product": (2 * n**3, 12 * n**2, 0.0),
            "vector": (2 * n**2, 4 * n**2 + 8 * n, 0.0),
            "message": (0.0, 0.0, n),
        }[self.kind]
        return {"flops": flops, "memory_bytes": memory, "sent_bytes": sent}

    def __str__(self) -> str:
        size = f"{self.n} x {self.n}"
        return {"product": f"{size} times {size}", "vector": f"{size} times a vector"}.get(
            self.kind, f"message of {self.n:,} bytes"
        )


def own_rates(cluster: Cluster, rank: int, host: HostProfile) -> tuple[float, float]:
    """Return an emulated device's FLOP/s and bytes of memory per second: its share of one core of this machine.

    All devices use one memory, so each gets a part of its rate only.
    """
    share = cluster.devices[rank].host_share or 1.0
    return share * host.gemm_flops_per_s, share * MEMORY_PART * host.memory_bytes_per_s


def measure_work(
    cluster: Cluster, rank: int, probes: Sequence[Probe], host: HostProfile, fidelity: Fidelity
) -> list[float]:
    """Return the seconds of products on one device.

    Each is the shortest of REPEATS: this computer does other things, too, and a device is never faster than it is.
    """
    work = [(probe.kind, probe.n, _least_s(probe, own_rates(cluster, rank, host))) for probe in probes]
    engines = default_pool().acquire(cluster, fidelity)
    return engines.run(_work, [work if other == rank else [] for other in range(cluster.world_size)])[rank]


def _least_s(probe: Probe, rates: tuple[float, float]) -> float:
    flops_per_s, bytes_per_s = rates
    return max(probe.amounts["flops"] / flops_per_s, probe.amounts["memory_bytes"] / bytes_per_s)


def _work(context: RankContext, work: Sequence[tuple[str, int, float]]) -> list[float]:
    torch.set_num_threads(1)
    seconds = []
    for kind, n, least_s in work:
        matrix, other = torch.randn(n, n), torch.randn(n, n) if kind == "product" else torch.randn(n)
        product = partial(torch.matmul, matrix, other)
        seconds.append(min(_taken_s(context, product, least_s) for _ in range(REPEATS)) / context.dilation)
    return seconds


def _taken_s(context: RankContext, product: Callable[[], object], least_s: float) -> float:
    """Return the seconds until a paced product has ended, on this machine's clock: a student measures from outside the
    device.
    """
    began_s = time.monotonic()
    Pacer(1.0, dilation=context.dilation).run(product, least_s)
    return time.monotonic() - began_s


def measure_messages(
    cluster: Cluster, sizes: Sequence[int], fidelity: Fidelity, *, source: int = 0, to: int = 1
) -> list[list[float]]:
    """Return [bytes, seconds] of messages from one device to another, each size REPEATS times."""
    engines = default_pool().acquire(cluster, fidelity)
    settings = (tuple(sizes), source, to)
    return engines.run(_messages, [settings] * cluster.world_size)[source]


def _messages(context: RankContext, settings: tuple[tuple[int, ...], int, int]) -> list[list[float]]:
    sizes, source, to = settings
    with paced_group(context) as links:
        repeated = [measure_link(links, context.rank, source, to, sizes=sizes, repeats=1) for _ in range(REPEATS)]
    # An answer that this computer delayed would make its message shorter than the link lets it be.
    answer_s = min((sample.answer_s for samples in repeated for sample in samples), default=0.0)
    return [[timing.nbytes, replace(timing, answer_s=answer_s).seconds] for samples in repeated for timing in samples]


def fresh_probes(draws: Random, cluster: Cluster, rank: int, host: HostProfile, most_s: float) -> list[Probe]:
    """Return twelve things to measure: four products, four vectors, four messages, none longer than `most_s`."""
    flops_per_s, bytes_per_s = own_rates(cluster, rank, host)
    link = cluster.link(rank, (rank + 1) % cluster.world_size)
    largest = {
        "product": (most_s * flops_per_s / 2) ** (1 / 3),
        "vector": (most_s * bytes_per_s / 4) ** 0.5,
        "message": most_s * link.bytes_per_s,
    }
    return [
        Probe(kind, max(1, round(most * draws.uniform(0.7, 1.0)))) for kind, most in largest.items() for _ in range(4)
    ]


def measure(cluster: Cluster, rank: int, probes: Sequence[Probe], host: HostProfile, fidelity: Fidelity) -> list[float]:
    """Return the seconds of products on a device and of messages from it to the next one, in the probes' order."""
    sizes = [probe.n for probe in probes if probe.kind == "message"]
    work = [probe for probe in probes if probe.kind != "message"]
    seconds = dict(zip(work, measure_work(cluster, rank, work, host, fidelity), strict=True))
    if sizes:
        to = (rank + 1) % cluster.world_size
        times = measure_messages(cluster, sizes, fidelity, source=rank, to=to)
        for size in sizes:
            seconds[Probe("message", size)] = median(each_s for nbytes, each_s in times if nbytes == size)
    return [seconds[probe] for probe in probes]
