"""Fixtures of the runtime's tests: small clusters, engines started once per module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clusters import cluster_of
from workbench.core.cluster import Cluster
from workbench.runtime.engines import EngineCluster
from workbench.runtime.network import probe


@pytest.fixture(scope="session")
def make_cluster() -> Callable[[int], Cluster]:
    def make(num_devices: int, *, mbit_per_s: float = 1000.0, memory_bytes: int = 400_000_000) -> Cluster:
        names = [f"device-{rank}" for rank in range(num_devices)]
        settings = {"flops_per_s": 1e10, "memory_bytes": memory_bytes, "host_share": 0.5}
        return cluster_of(
            names, name=f"test of {num_devices}", bytes_per_s=mbit_per_s * 125e3, latency_s=2e-4, **settings
        )

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
