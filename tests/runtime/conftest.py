"""Fixtures of the runtime's tests: small clusters, engines started once per module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workbench.core.cluster import Cluster, Device, Link
from workbench.runtime.engines import EngineCluster
from workbench.runtime.network import probe


@pytest.fixture(scope="session")
def make_cluster() -> Callable[[int], Cluster]:
    def make(num_devices: int, *, mbit_per_s: float = 1000.0, memory_bytes: int = 400_000_000) -> Cluster:
        link = Link(bytes_per_s=mbit_per_s * 125e3, latency_s=2e-4)
        devices = tuple(
            Device(name=f"device-{rank}", flops_per_s=1e10, memory_bytes=memory_bytes, link=link, host_share=0.5)
            for rank in range(num_devices)
        )
        return Cluster(name=f"test of {num_devices}", devices=devices)

    return make


@pytest.fixture(scope="module")
def engines(make_cluster: Callable[[int], Cluster]) -> Iterator[EngineCluster]:
    with EngineCluster.start(make_cluster(3), fidelity="paced") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kernel_links() -> None:
    support = probe()
    if support.fidelity != "kernel":
        pytest.skip(f"no network namespaces here: {support.reason}")


@pytest.fixture(scope="session")
def engine_jobs_folder() -> Path:
    return Path(__file__).parent
