"""Engines for emulated devices, kept alive for a whole notebook: run a job on every device and recover from dead engines."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, GroupNotFormedError, RuntimeSetupError
from workbench.runtime.context import STOP_FILE, RankContext
from workbench.runtime.engine_service import EngineService
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.engine_starter import EnginesLate
from workbench.runtime.jobs import GRACE_S, WholeJob
from workbench.runtime.memory import MemoryReading, read_memory
from workbench.runtime.network import Fidelity, probe

if TYPE_CHECKING:
    import ipyparallel

R = TypeVar("R")
P = TypeVar("P")

FIRST_TRY_S = 45.0
"""Engines usually start in 2 to 15 s.  After this time it is better to try again."""
IDLE_S = 60.0
"""Engines end after being idle for this long, and the next run restarts them.  Engines of four devices take 1.3 GB with their helpers."""


class _NothingDone(Exception):
    """A job ended before doing anything.  The cause says why."""


class EngineCluster:
    """A cluster of emulated devices with one engine process each.

    `run` may be called any number of times.  The next `run` restarts engines that died or had to be killed.
    """

    def __init__(self, cluster: Cluster, fidelity: Fidelity, reason: str) -> None:
        self.cluster = cluster
        self.fidelity: Fidelity = fidelity
        self.fidelity_reason = reason
        self._dilation = 1.0
        self._session: EngineSession | None = None
        self._generation = 0
        self._rendezvous: Path | None = None
        self._busy = threading.Lock()
        self._starting = threading.RLock()  # held while engines start or are released after being idle
        self._idle: threading.Timer | None = None
        self._is_looked_into = False

    @classmethod
    def start(cls, cluster: Cluster, *, fidelity: Literal["auto", "kernel", "paced"] = "auto") -> EngineCluster:
        """Start an engine for each device.

        fidelity: 'kernel' (links shaped by the kernel), 'paced' (links paced by our transport), 'auto' (the better one that works here).
        Raises RuntimeSetupError.
        """
        real = [device.name for device in cluster.devices if device.address]
        if real:
            raise RuntimeSetupError(
                f"Cluster '{cluster.name}' with real devices ({', '.join(real)}) was asked for.",
                "Engines that start here are emulated devices.",
                "Run a job on them with `workbench run`, or leave their address out to emulate them.",
            )
        if fidelity not in ("auto", "kernel", "paced"):
            raise ConfigError(f"fidelity '{fidelity}' was asked for.", "Known: auto, kernel, paced.", "Choose one.")
        reason = "asked for"
        if fidelity == "auto":
            support = probe()
            fidelity, reason = support.fidelity, support.reason
        engines = cls(cluster, fidelity, reason)
        engines.open()
        return engines

    def open(self) -> None:
        """Start the engines if they are not running.  Raises RuntimeSetupError."""
        if self._busy.acquire(blocking=False):
            try:
                self._ready_session()
            finally:
                self._busy.release()

    def _release(self) -> None:
        """Release the engines after a run.  They end after an idle time, unless they are used or inspected before."""
        self._busy.release()
        if self._session is not None and not self._is_looked_into:
            self._idle = threading.Timer(IDLE_S, self._end_idle)
            self._idle.daemon = True
            self._idle.start()

    def _end_idle(self) -> None:
        with self._starting:
            if self._idle is threading.current_thread() and not self._busy.locked():
                self.stop()

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the device names by rank."""
        return tuple(device.name for device in self.cluster.devices)

    @property
    def dilation(self) -> float:
        """Return the emulation's dilation: how many times slower than real all devices and links run."""
        return self._dilation

    def dilate(self, factor: float) -> None:
        """Slow all devices and links down by `factor`, from the next job on.  Reported times stay in emulated seconds."""
        if factor != self._dilation:
            self._dilation = factor
            if self._session is not None:
                self._session.shape_links(self.cluster.with_slower_links(factor))

    def now_s(self) -> float:
        """Return the monotonic clock in the devices' seconds."""
        return time.monotonic() / self._dilation

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Return the engines' process numbers by rank.  Empty if none run."""
        return tuple(engine.pid for engine in self._session.engines) if self._session else ()

    @property
    def client(self) -> ipyparallel.Client:
        """Return the ipyparallel client, to inspect devices with %%px.  Engine numbers are ranks."""
        self._is_looked_into = True
        client = self._ready_session().client
        assert client is not None
        return client

    def memory(self) -> tuple[MemoryReading, ...]:
        """Return the engines' memory by rank, read from outside.  May be called from any thread, also during a job."""
        return tuple(read_memory(pid) for pid in self.engine_pids)

    def request_stop(self) -> None:
        """Make should_stop() true on every rank of the running job.  May be called from any thread."""
        folder = self._rendezvous
        if folder is not None and folder.is_dir():
            (folder / STOP_FILE).touch()

    def run(
        self,
        function: Callable[[RankContext, P], R],
        payloads: Sequence[P],
        *,
        on_event: Callable[[int, Any], None] | None = None,
    ) -> list[R]:
        """Run function(context, payloads[rank]) on every device at once; return the results by rank.

        on_event(rank, event): called in this process with the events that ranks publish.
        Raises the device's own WorkbenchError, DeviceLostError when an engine dies, MemoryBudgetError when the kernel killed an engine
        for its memory use, RuntimeSetupError, or another exception of the function with a note that names the device.
        If the job's process group does not form before any rank has published an event, the job runs once more on new engines.
        """
        if len(payloads) != self.cluster.world_size:
            raise ConfigError(
                f"A job with {len(payloads)} payloads was asked for.",
                f"The cluster has {self.cluster.size_words}.",
                "Give one each.",
            )
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError(
                "A job was asked for.", "These engines are running another.", "Wait for it, or stop it with request_stop()."
            )
        try:
            try:
                return self._run(function, payloads, on_event)
            except _NothingDone:
                # Seen on busy machines: gloo's connections hang in one process, and then in every later group of that process.
                self.stop()
                return self._run(function, payloads, on_event)
        except _NothingDone as error:
            assert error.__cause__ is not None
            raise error.__cause__ from None
        finally:
            self._release()

    def _run(
        self,
        function: Callable[[RankContext, P], R],
        payloads: Sequence[P],
        on_event: Callable[[int, Any], None] | None,
    ) -> list[R]:
        """Run a job once.  Raises _NothingDone if the process group did not form and no rank had published an event."""
        with self._lent() as session:
            service = EngineService(session, self._context)
            job = WholeJob(
                service,
                self.device_names,
                function,
                on_event=on_event,
                request_stop=self.request_stop,
                is_frozen=lambda rank: session.engines[rank].frozen,
            )
            try:
                return job.results(payloads)
            except GroupNotFormedError as error:
                if job.last_events:
                    raise
                raise _NothingDone from error
            finally:
                self._take_back(service, 0.0 if job.failures else GRACE_S)

    def _take_back(self, service: EngineService, timeout_s: float = 10.0) -> None:
        """End a service's jobs, and all engines if a job does not end in time."""
        is_free = False
        try:
            self.request_stop()
            is_free = service.close(timeout_s)
        finally:
            if not is_free:
                self.stop()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[EngineSession]:
        """Lend the session to one run, whose ranks meet in a new folder."""
        session = self._ready_session()
        self._generation += 1
        folder = self._rendezvous = session.folder / f"run-{self._generation}"
        folder.mkdir()
        try:
            yield session
        finally:
            self._rendezvous = None
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def service(self) -> Iterator[EngineService]:
        """Lend the engines to a service: a separate job on each engine, which may die and be restarted while the others continue.

        Afterwards the engines can be used as before.  Engines that do not end their jobs are restarted then.
        Raises RuntimeSetupError while another job runs.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError("A service was asked for.", "These engines are running a job.", "Wait for it.")
        try:
            with self._lent() as session:
                service = EngineService(session, self._next_context)
                try:
                    yield service
                finally:
                    self._take_back(service)
        finally:
            self._release()

    def _next_context(self, rank: int) -> RankContext:
        self._generation += 1
        return self._context(rank)

    def _context(self, rank: int) -> RankContext:
        session = self._session
        assert session is not None and self._rendezvous is not None
        ends, loopback = session.endpoints, "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
        return RankContext(
            rank=rank,
            world_size=self.cluster.world_size,
            device=self.cluster.devices[rank],
            cluster=self.cluster,
            fidelity=self.fidelity,
            interface=ends[rank].interface if ends else loopback,
            address=ends[rank].address if ends else "127.0.0.1",
            rendezvous=str(self._rendezvous),
            generation=self._generation,
            dilation=self._dilation,
        )

    def stop(self) -> None:
        """End the engines and remove all their files.  A later `run` restarts them."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            atexit.unregister(session.close)

    def __enter__(self) -> EngineCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _ready_session(self) -> EngineSession:
        with self._starting:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            if self._session is not None and not self._session.healthy:
                self.stop()
            if self._session is None:
                cluster = self.cluster.with_slower_links(self._dilation)
                try:
                    session = EngineSession(cluster, self.fidelity)
                    session.open(FIRST_TRY_S)
                except EnginesLate:
                    # Seen once in several hundred starts: the controller never finished one engine's registration.
                    session = EngineSession(cluster, self.fidelity)
                    session.open()
                atexit.register(session.close)
                self._session = session
            return self._session


class EnginePool:
    """Keeps the engines of recently used clusters running, so that a notebook starts them only once."""

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._running: OrderedDict[str, EngineCluster] = OrderedDict()

    def acquire(self, cluster: Cluster, fidelity: Literal["auto", "kernel", "paced"] = "auto") -> EngineCluster:
        """Return running engines for the cluster, reused or newly started.  Raises RuntimeSetupError."""
        key = f"{fidelity} {cluster!r}"
        if key not in self._running:
            while len(self._running) >= self._capacity:
                _, oldest = self._running.popitem(last=False)
                oldest.stop()
            self._running[key] = EngineCluster.start(cluster, fidelity=fidelity)
        self._running[key].open()
        self._running.move_to_end(key)
        return self._running[key]

    def stop(self) -> None:
        """End all engines."""
        while self._running:
            self._running.popitem()[1].stop()


@functools.cache
def default_pool() -> EnginePool:
    """Return the engine pool of this process.  Its engines end with the process."""
    return EnginePool()
