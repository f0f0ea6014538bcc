"""Start one dead engine anew while the others go on with their work."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

from workbench.core.errors import RuntimeSetupError
from workbench.runtime.engine import START_TIMEOUT_S
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.jobs import identify

_POLL_S = 0.05


def restart_engine(
    session: EngineSession, rank: int, *, timeout_s: float = START_TIMEOUT_S, cancelled: threading.Event | None = None
) -> None:
    """End what is left of a rank's engine and start a new one in its place: same namespace, cgroup and number; takes seconds.

    May be called from any thread, for several ranks at a time.  cancelled: given up when it is set; the session ends what was begun.
    Raises RuntimeSetupError; the other engines are left alone.
    """
    wait = _Patience(time.monotonic() + timeout_s, cancelled or threading.Event())
    asked = f"The engine of device '{session.cluster.devices[rank].name}' was to be started anew."
    session.engines[rank].kill()
    session.engines[rank].wait(5.0)
    client = session.client
    assert client is not None
    # The hub does not look after engines (see engine_session): it is told, and gives the number free.
    client._io_loop.add_callback(client.session.send, client._query_stream, "unregistration_request", content={"id": rank})
    while rank in client.ids:
        wait.a_moment(asked, "The controller did not let go of its number")
    assert session.starter is not None
    engine = session.starter.start(rank, max(0.0, wait.deadline_s - time.monotonic()))
    session.engines = (*session.engines[:rank], engine, *session.engines[rank + 1 :])
    while rank not in client.ids:
        if not engine.alive:
            raise RuntimeSetupError(asked, "It ended at once.", f"See {session.starter.log(rank)}.")
        wait.a_moment(asked, "It did not register")
    reply = client[rank].apply_async(identify)
    while not reply.ready():
        wait.a_moment(asked, "It did not answer")
    if reply.get() != engine.pid:
        raise RuntimeSetupError(asked, f"Process {reply.get()} answered, not {engine.pid}.", "Start the engines again.")


class _Patience(NamedTuple):
    deadline_s: float
    cancelled: threading.Event

    def a_moment(self, asked: str, found: str) -> None:
        """Wait a moment.  Raises RuntimeSetupError when the time is over or nobody needs the engine any more."""
        if time.monotonic() > self.deadline_s:
            raise RuntimeSetupError(asked, f"{found} in time.", "Close other programs and try again.")
        if self.cancelled.wait(_POLL_S):
            raise RuntimeSetupError(asked, "It was given up.", "Start the engines again.")
