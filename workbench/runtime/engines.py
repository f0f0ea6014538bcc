"""Engines for emulated devices, kept for a whole notebook: run a job function on every device, survive what dies."""

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
from workbench.runtime.engine_run import EngineRun
from workbench.runtime.engine_service import EngineService
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.engine_starter import EnginesLate
from workbench.runtime.memory import MemoryReading, read_memory
from workbench.runtime.network import Fidelity, probe

if TYPE_CHECKING:
    import ipyparallel

R = TypeVar("R")
P = TypeVar("P")

FIRST_TRY_S = 45.0
"""Engines are up after 2 to 15 s; after this long it pays to start again."""
IDLE_S = 60.0
"""Engines of four devices take 1.3 GB with their helpers; so long after a run they end, and the next run starts them again."""


class _NothingDone(Exception):
    """A job did not get as far as doing anything; the cause says why."""


class EngineCluster:
    """A cluster of emulated devices, each with its engine process.

    `run` may be called any number of times.  Engines that died or had to be killed are started again by the next `run`.
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
        self._starting = threading.RLock()  # held while engines start, or end because nobody uses them
        self._idle: threading.Timer | None = None
        self._is_looked_into = False

    @classmethod
    def start(cls, cluster: Cluster, *, fidelity: Literal["auto", "kernel", "paced"] = "auto") -> EngineCluster:
        """Start an engine for each device.

        fidelity: 'kernel' (links shaped by the kernel), 'paced' (links paced by our transport), 'auto' the better of what works.
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
        """Start the engines if they do not run.  Raises RuntimeSetupError."""
        if self._busy.acquire(blocking=False):
            try:
                self._ready_session()
            finally:
                self._busy.release()

    def _release(self) -> None:
        """End a run; the engines end a while later, unless they are used before or someone looks into them."""
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
        """Return the names by rank."""
        return tuple(device.name for device in self.cluster.devices)

    @property
    def dilation(self) -> float:
        """Return how many times slower than they are all devices and links are emulated."""
        return self._dilation

    def dilate(self, factor: float) -> None:
        """Emulate all devices and links `factor` times slower than they are, from the next job on; reported times stay their own."""
        if factor != self._dilation:
            self._dilation = factor
            if self._session is not None:
                self._session.shape_links(self.cluster.with_slower_links(factor))

    def now_s(self) -> float:
        """Return the monotonic clock in the devices' seconds."""
        return time.monotonic() / self._dilation

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Return the engines' process numbers by rank; empty when none run."""
        return tuple(engine.pid for engine in self._session.engines) if self._session else ()

    @property
    def client(self) -> ipyparallel.Client:
        """Return the ipyparallel client, to look into devices with %%px.  Engine numbers are ranks."""
        self._is_looked_into = True
        client = self._ready_session().client
        assert client is not None
        return client

    def memory(self) -> tuple[MemoryReading, ...]:
        """Return the engines' memory by rank, read from outside; from any thread, also while a job runs."""
        return tuple(read_memory(pid) for pid in self.engine_pids)

    def request_stop(self) -> None:
        """Make should_stop() true on every rank of the job that runs now; from any thread."""
        folder = self._rendezvous
        if folder is not None and folder.is_dir():
            (folder / STOP_FILE).touch()

    def run(
        self,
        function: Callable[[RankContext, P], R],
        payloads: Sequence[P],
        *,
        on_event: Callable[[int, Any], None] | None = None,
        timeout_s: float | None = None,
    ) -> list[R]:
        """Run function(context, payloads[rank]) on every device at once; return the results by rank.

        on_event(rank, event): called here with what the ranks publish.  timeout_s: for the whole job.
        Raises the device's own WorkbenchError, DeviceLostError when an engine dies, MemoryBudgetError when the kernel ended
        it for its memory, another exception of the function with a note that names the device, RuntimeSetupError.
        A job whose group did not form, before any rank had published anything, is begun once more on fresh engines.
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
                return self._run(function, payloads, on_event, timeout_s)
            except _NothingDone:
                # Seen on busy machines: gloo's connections hang in one process, and do so for every later group of it.
                self.stop()
                return self._run(function, payloads, on_event, timeout_s)
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
        timeout_s: float | None,
    ) -> list[R]:
        """Run a job once.  Raises _NothingDone from a GroupNotFormedError of a job that had published nothing."""
        session = self._ready_session()
        self._generation += 1
        folder = self._rendezvous = session.folder / f"run-{self._generation}"
        folder.mkdir()
        job = EngineRun(session, self._contexts(), function, on_event=on_event, request_stop=self.request_stop)
        try:
            return job.results(payloads, timeout_s)
        except BaseException as error:
            try:
                job.abort()
            finally:
                if not job.over:
                    self.stop()
            if isinstance(error, GroupNotFormedError) and not job.last_events:
                raise _NothingDone from error
            raise
        finally:
            self._rendezvous = None
            shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def service(self) -> Iterator[EngineService]:
        """Lend the engines to a service: a job on each by itself, which may die and be started again while the others go on.

        Afterwards the engines can be used as before; those that do not end their jobs are started again then.
        Raises RuntimeSetupError while another job runs.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError("A service was asked for.", "These engines are running a job.", "Wait for it.")
        try:
            session = self._ready_session()
            self._generation += 1
            folder = self._rendezvous = session.folder / f"run-{self._generation}"
            folder.mkdir()
            service = EngineService(session, self._next_context)
            is_free = False
            try:
                yield service
            finally:
                try:
                    self.request_stop()
                    is_free = service.close()
                finally:
                    self._rendezvous = None
                    shutil.rmtree(folder, ignore_errors=True)
                    if not is_free:
                        self.stop()
        finally:
            self._release()

    def _contexts(self) -> tuple[RankContext, ...]:
        """Return what the ranks of the current generation are told."""
        return tuple(self._context(rank) for rank in range(self.cluster.world_size))

    def _next_context(self, rank: int) -> RankContext:
        self._generation += 1
        return self._context(rank)

    def _context(self, rank: int) -> RankContext:
        session = self._session
        assert session is not None and self._rendezvous is not None
        ends = session.endpoints
        return RankContext(
            rank=rank,
            world_size=self.cluster.world_size,
            device=self.cluster.devices[rank],
            cluster=self.cluster,
            fidelity=self.fidelity,
            interface=ends[rank].interface if ends else _loopback(),
            address=ends[rank].address if ends else "127.0.0.1",
            rendezvous=str(self._rendezvous),
            generation=self._generation,
            dilation=self._dilation,
        )

    def stop(self) -> None:
        """End the engines and remove everything they used; a later `run` starts them again."""
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
                    # Seen once in some hundred starts: the controller never finished one engine's registration.
                    session = EngineSession(cluster, self.fidelity)
                    session.open()
                atexit.register(session.close)
                self._session = session
            return self._session


class EnginePool:
    """Keeps engines running for the clusters used last, so that a notebook starts them once."""

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._running: OrderedDict[str, EngineCluster] = OrderedDict()

    def acquire(self, cluster: Cluster, fidelity: Literal["auto", "kernel", "paced"] = "auto") -> EngineCluster:
        """Return running engines for the cluster: those of an earlier call, or new ones.  Raises RuntimeSetupError."""
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
    """Return this process's pool; its engines end with the process."""
    return EnginePool()


def _loopback() -> str:
    return "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
