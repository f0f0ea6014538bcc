"""Run a separate long-lived job on each engine, so that one engine may die and return while the others continue.

`EngineCluster.run` is one job on all devices, which fails with the first device; here the caller decides how to handle a death.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import zmq

from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.runtime.context import RankContext, listener_name
from workbench.runtime.devices import News
from workbench.runtime.engine import START_TIMEOUT_S
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.jobs import DONE, Outcome, identify, run_job
from workbench.runtime.memory import MemoryReading, read_memory

if TYPE_CHECKING:
    import ipyparallel

_POLL_S = 0.05
_LAST_EVENTS_S = 0.5
"""A job's last events travel over another channel than its answer: the answer is reported this much later, at most."""


def restart_engine(session: EngineSession, rank: int, cancelled: threading.Event) -> None:
    """Restart a rank's engine with the same namespace and number, ending any remains of the old one.  This takes seconds.

    May be called from any thread, for several ranks at a time.  cancelled: set it to give up; the session cleans up.
    Raises RuntimeSetupError.  Other engines are not affected.
    """
    asked = f"The engine of device '{session.cluster.devices[rank].name}' was to be started again."
    deadline_s = time.monotonic() + START_TIMEOUT_S

    def wait(found: str) -> None:
        if time.monotonic() > deadline_s:
            raise RuntimeSetupError(asked, f"{found} in time.", "Close other programs and try again.")
        if cancelled.wait(_POLL_S):
            raise RuntimeSetupError(asked, "It was given up.", "Start the engines again.")

    session.engines[rank].kill()
    session.engines[rank].wait(5.0)
    client = session.client
    assert client is not None and session.starter is not None
    # The hub does not monitor engines (see engine_session): we notify it, and it frees the engine's number.
    client._io_loop.add_callback(client.session.send, client._query_stream, "unregistration_request", content={"id": rank})
    while rank in client.ids:
        wait("The controller did not let go of its number")
    engine = session.starter.start(rank, max(0.0, deadline_s - time.monotonic()))
    session.engines = (*session.engines[:rank], engine, *session.engines[rank + 1 :])
    while rank not in client.ids:
        if not engine.alive:
            raise RuntimeSetupError(asked, "It ended at once.", f"See {session.starter.log(rank)}.")
        wait("It did not register")
    reply = client[rank].apply_async(identify)
    while not reply.ready():
        wait("It did not answer")
    if reply.get() != engine.pid:
        raise RuntimeSetupError(asked, f"Process {reply.get()} answered, not {engine.pid}.", "Start the engines again.")


class EngineService:
    """Runs jobs on single engines, with a command socket to each.  Created by EngineCluster; used from one thread."""

    def __init__(self, session: EngineSession, contexts: Callable[[int], RankContext]) -> None:
        """contexts: creates the context of a rank's next job."""
        self._session, self._make_context = session, contexts
        self._replies: dict[int, ipyparallel.AsyncResult] = {}
        self._contexts: dict[int, RankContext] = {}
        self._unsent: dict[int, list[bytes]] = {}
        self._heard_s: dict[int, float] = {}  # until when to wait for a job's last events; 0: they have come
        self._restarts: dict[int, tuple[threading.Thread, list[BaseException]]] = {}
        self._cancelled = threading.Event()
        self._zmq = zmq.Context()
        self._commands = self._zmq.socket(zmq.ROUTER)
        self._commands.linger = 0
        self._commands.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.address = f"ipc://{session.folder}/commands"
        self._commands.bind(self.address)

    def start(self, rank: int, function: Callable[[RankContext, Any], Any], payload: Any) -> None:
        """Start function(context, payload) on one engine, which must be idle.  Raises ConfigError for a payload that is no data."""
        context, client = self._make_context(rank), self._session.client
        assert client is not None
        try:
            request = pickle.dumps((context, payload))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            asked = f"A payload for device '{context.device.name}' was given."
            raise ConfigError(asked, f"It cannot be pickled: {error}.", "Send data, not live objects.") from error
        self._contexts[rank] = context
        self._replies[rank] = client[rank].apply_async(run_job, request, _portable(function), self._session.events_address)

    @property
    def running(self) -> tuple[int, ...]:
        """Return the ranks whose job has neither ended nor died, as far as `news` has reported."""
        return tuple(self._replies)

    def command(self, rank: int, content: Any) -> bool:
        """Send a command to a rank's job, or queue it until the job listens.  Returns False if the rank has no job."""
        if rank not in self._contexts:
            return False
        self._unsent.setdefault(rank, []).append(pickle.dumps(content))
        self._send(rank)
        return True

    def _send(self, rank: int) -> None:
        waiting, listener = self._unsent[rank], listener_name(rank, self._contexts[rank].generation)
        while waiting:
            try:
                self._commands.send_multipart([listener, waiting[0]], zmq.DONTWAIT)
            except zmq.ZMQError:
                return
            waiting.pop(0)
        del self._unsent[rank]

    def news(self, timeout_s: float) -> list[News]:
        """Return the events since the last call.  Waits up to timeout_s for the first one."""
        for rank in list(self._unsent):
            self._send(rank)
        # After a job's last event its answer follows at once.
        found = self._events(min(timeout_s, 0.002) if 0.0 in self._heard_s.values() else timeout_s)
        for rank, reply in list(self._replies.items()):
            alive = self._session.engines[rank].alive  # checked first: an engine may answer and then end
            if reply.ready():
                now_s = time.monotonic()
                if alive and now_s < self._heard_s.setdefault(rank, now_s + _LAST_EVENTS_S):
                    continue
                self._forget(rank)
                found.append(News(rank, "ended", _outcome(rank, reply)))
                self._session.client.purge_local_results([reply])  # type: ignore[union-attr]
            elif not alive:
                found += self._events(0.001)
                self._forget(rank)
                found.append(News(rank, "died"))
        for rank, (thread, errors) in list(self._restarts.items()):
            if not thread.is_alive():
                thread.join()
                del self._restarts[rank]
                found.append(News(rank, "restarted", errors[0] if errors else None))
        return found

    def _events(self, timeout_s: float) -> list[News]:
        found = []
        for rank, generation, kind, event in self._session.receive(timeout_s):
            if rank not in self._contexts or generation != self._contexts[rank].generation:
                continue  # from an abandoned job
            if kind == DONE:
                self._heard_s[rank] = 0.0
            else:
                found.append(News(rank, "event", event))
        return found

    def restart(self, rank: int) -> None:
        """Restart a rank's engine in the background, ending any remains of it.  `news` reports when it is up."""
        if rank in self._restarts:
            return
        self._forget(rank)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                restart_engine(self._session, rank, self._cancelled)
            except BaseException as error:  # reported by `news`
                errors.append(error)

        thread = threading.Thread(target=work, name=f"restart {rank}", daemon=True)
        self._restarts[rank] = (thread, errors)
        thread.start()

    def _forget(self, rank: int) -> None:
        for known in (self._replies, self._contexts, self._unsent, self._heard_s):
            known.pop(rank, None)

    def kill(self, rank: int) -> None:
        """Kill a rank's engine at once (SIGKILL)."""
        self._session.engines[rank].kill()

    def freeze(self, rank: int) -> None:
        """Suspend a rank's engine without ending it.  It stops answering."""
        engine = self._session.engines[rank]
        if engine.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGSTOP)

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds used by a rank's engine.  0 if it is dead."""
        return self._session.engines[rank].cpu_s

    def memory(self) -> tuple[MemoryReading | None, ...]:
        """Return the engines' memory by rank.  None for dead engines."""
        return tuple(read_memory(engine.pid) if engine.alive else None for engine in self._session.engines)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for the jobs, which were asked to end, and for restarts.  Returns whether all engines are alive and idle again."""
        deadline_s = time.monotonic() + timeout_s
        while (self._replies or self._restarts) and time.monotonic() < deadline_s:
            self.news(0.02)
        self._commands.close()
        self._zmq.term()
        self._cancelled.set()
        for thread, _ in self._restarts.values():
            thread.join()
        return not self._replies and self._session.healthy


def _portable(function: Callable[..., Any]) -> Any:
    """Return a function pickled by reference, or unchanged if a notebook defines it: ipyparallel then sends its code."""
    if getattr(function, "__module__", "__main__") == "__main__":
        return function
    try:
        return pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError):
        return function


def _outcome(rank: int, reply: ipyparallel.AsyncResult) -> Outcome:
    try:
        return pickle.loads(reply.get())
    except Exception as error:
        return Outcome(rank=rank, error=RuntimeSetupError("A job's answer was awaited.", f"{error}.", "Run again."), text=str(error))
