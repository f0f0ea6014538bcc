"""Ranks as threads of this process, joined by a real gloo group over the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from tests.clusters import cluster_of
from tests.simulated import program_of
from tests.waiting import LIMIT_S
from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts
from workbench.core.program import Program
from workbench.core.schedule import Schedule, Value
from workbench.runtime.executor import Executor
from workbench.runtime.pacing import Pacer
from workbench.runtime.transport import Transport


def program(schedule: Schedule, spec: Callable[[Value], Spec], **seconds: float) -> Program:
    """Return a program whose compute operations take so many seconds by kind; what is not given takes none."""

    class Costs(TableCosts):
        def spec(self, value: Value) -> Spec:
            return spec(value)

    return program_of(schedule, Costs(seconds_by_kind=seconds))


def cluster_of_two(bytes_per_s: float = 1e9, latency_s: float = 0.0) -> Cluster:
    """latency_s: of a device's link; the path between the two has both."""
    return cluster_of("ab", bytes_per_s=bytes_per_s, latency_s=latency_s, host_share=1.0)


def on_two_ranks(work: Callable[[int, Transport], Any], *, timeout_s: float = 60.0, **settings: Any) -> list[Any]:
    """Return what work(rank, transport) returns on each of two ranks (see on_ranks)."""
    return on_ranks(2, work, timeout_s=timeout_s, **settings)


def on_executors(count: int, work: Callable[[Executor], Any], *, factor: float = 1.0, **settings: Any) -> list[Any]:
    """Return what work(executor) returns on each rank (see on_ranks).  factor: of the pacer."""
    return on_ranks(count, lambda rank, transport: work(Executor(rank, transport, Pacer(factor))), **settings)


def on_ranks(
    count: int, work: Callable[[int, Transport], Any], *, timeout_s: float = 60.0, **settings: Any
) -> list[Any]:
    """Return what work(rank, transport) returns on each rank; an exception of any is raised.

    timeout_s: of the transport.
    No rank closes its transport before all are done: as in a run, what a rank does not read itself still arrives.
    settings: of the Transport; a callable is called with the rank.
    """
    store, done = dist.HashStore(), threading.Barrier(count)
    results: list[Any] = [None] * count
    errors: list[BaseException] = []
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if any(one.address == "127.0.0.1" for one in found)
    )

    def options() -> Any:
        result = dist.ProcessGroupGloo._Options()
        result._devices = [dist.ProcessGroupGloo.create_device(interface=loopback)]
        result._timeout = timedelta(seconds=60)
        return result

    def serve(rank: int) -> None:
        groups: dict[tuple[int, ...], Any] = {}

        def subgroup(ranks: tuple[int, ...]) -> Any:
            members = tuple(sorted(ranks))
            if members not in groups:
                part = dist.PrefixStore(f"{members}", store)
                groups[members] = dist.ProcessGroupGloo(part, members.index(rank), len(members), options())
            return groups[members]

        try:
            group = dist.ProcessGroupGloo(store, rank, count, options())
            own = {name: value(rank) if callable(value) else value for name, value in settings.items()}
            with closing(Transport(group, rank, subgroup=subgroup, timeout_s=timeout_s, **own)) as transport:
                results[rank] = work(rank, transport)
                with suppress(threading.BrokenBarrierError):
                    done.wait()
        except BaseException as error:
            errors.append(error)
            done.abort()

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    if errors:
        raise errors[0]
    return results
