"""Four emulated devices that the tests of this folder share."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.clusters import cluster_of
from workbench.core import Cluster
from workbench.runtime.engines import EngineCluster

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed (pip install '.[jax]')")


def four_devices(memory_bytes: int = 2_000_000_000) -> Cluster:
    """Return four equal devices whose links and pace do not slow the tests down."""
    return cluster_of([f"device-{rank}" for rank in range(4)], memory_bytes=memory_bytes, host_share=1.0)


@pytest.fixture(scope="session")
def engines() -> Iterator[EngineCluster]:
    """Yield four running engines."""
    with EngineCluster.start(four_devices(), fidelity="paced") as cluster:
        yield cluster
