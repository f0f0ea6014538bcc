"""Engines that do not come up in time are started a second time, and the first attempt leaves nothing behind."""

import pytest

from workbench.core import Cluster, Device, Link
from workbench.runtime import engines as engines_module
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.engine_starter import EnginesLate
from workbench.runtime.engines import EngineCluster

CLUSTER = Cluster(
    name="one", devices=(Device(name="only", flops_per_s=1e9, memory_bytes=10**9, link=Link(bytes_per_s=1e9), host_share=1.0),)
)


def test_a_late_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt gets no time at all and is late; the second has the usual time."""
    monkeypatch.setattr(engines_module, "FIRST_TRY_S", 0.0)
    opened = []
    original = EngineSession.open

    def noted(session: EngineSession, *timeout_s: float) -> None:
        opened.append(session)
        original(session, *timeout_s)

    monkeypatch.setattr(EngineSession, "open", noted)
    with EngineCluster.start(CLUSTER, fidelity="paced") as cluster:
        assert len(opened) == 2
        assert not opened[0].healthy
        assert cluster.run(_rank, [None]) == [0]


def test_being_late_is_said_with_what_to_do() -> None:
    """Without a second attempt the error names the cluster and the time."""
    session = EngineSession(CLUSTER, "paced")
    with pytest.raises(EnginesLate, match=r"cluster 'one'.*not up after 0 s.*try again"):
        session.open(0.0)
    assert not session.healthy


def _rank(context, payload) -> int:
    return context.rank
