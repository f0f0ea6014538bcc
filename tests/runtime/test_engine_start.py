"""Engines that do not come up in time leave nothing behind."""

import pytest

from tests.clusters import cluster_of
from workbench.runtime.engine_session import EngineSession, LocalSlot
from workbench.runtime.engine_slots import Inbox
from workbench.runtime.engine_starter import EnginesLate

CLUSTER = cluster_of(1, name="one", host_share=1.0)


def test_being_late_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSlot, "_take_message", lambda slot, message: None)  # otherwise it may be up at once
    session = EngineSession(CLUSTER, "paced", Inbox(1))
    with pytest.raises(EnginesLate, match=r"cluster 'one'.*not up after 0 s.*try again"):
        session.open(0.0)
    assert not session.healthy and not session.slots[0].is_alive
