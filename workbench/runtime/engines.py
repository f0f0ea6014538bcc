"""Engines for emulated devices, kept for a whole notebook: run a job function on every device, survive what dies."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import ipyparallel

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, RuntimeSetupError
from workbench.runtime.context import STOP_FILE, RankContext
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.failures import error_of, lost_device, memory_killed, only_peers_blamed, root_cause, silent_device, unfinished
from workbench.runtime.jobs import DONE, Outcome, run_job
from workbench.runtime.memory import MemoryReading, read_memory
from workbench.runtime.network import Fidelity, probe

R = TypeVar("R")
P = TypeVar("P")
_POLL_S = 0.05
# After the first failure the other ranks get this long to end by themselves (and to tell a better cause).
_GRACE_S = 2.0


class EngineCluster:
    """A cluster of emulated devices, each with its engine process.

    `run` may be called any number of times.  Engines that died or had to be killed are started anew by the next `run`.
    """

    def __init__(self, cluster: Cluster, fidelity: Fidelity, reason: str, *, hard_memory: bool = False) -> None:
        self.cluster = cluster
        self.fidelity: Fidelity = fidelity
        self.fidelity_reason = reason
        self._hard_memory = hard_memory
        self._session: EngineSession | None = None
        self._generation = 0
        self._rendezvous: Path | None = None
        self._busy = threading.Lock()

    @classmethod
    def start(cls, cluster: Cluster, *, fidelity: Literal["auto", "kernel", "paced"] = "auto", hard_memory: bool = False) -> EngineCluster:
        """Start an engine for each device.

        fidelity: 'kernel' (links shaped by the kernel), 'paced' (links paced by our transport), 'auto' the better of what works.
        hard_memory: a memory cgroup per device, with a real out-of-memory kill.  Raises RuntimeSetupError.
        """
        real = [device.name for device in cluster.devices if device.address]
        if real:
            raise RuntimeSetupError(
                f"Cluster '{cluster.name}' with real devices ({', '.join(real)}) was asked for.",
                "This version attaches emulated devices only.",
                "Start your program on the devices with torchrun, or leave their address out to emulate them.",
            )
        if fidelity not in ("auto", "kernel", "paced"):
            raise ConfigError(f"fidelity '{fidelity}' was asked for.", "Known: auto, kernel, paced.", "Choose one.")
        reason = "asked for"
        if fidelity == "auto":
            support = probe()
            fidelity, reason = support.fidelity, support.reason
        engines = cls(cluster, fidelity, reason, hard_memory=hard_memory)
        engines._ready_session()
        return engines

    @property
    def device_names(self) -> tuple[str, ...]:
        """Return the names by rank."""
        return tuple(device.name for device in self.cluster.devices)

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Return the engines' process numbers by rank; empty when none run."""
        return tuple(engine.pid for engine in self._session.engines) if self._session else ()

    @property
    def client(self) -> ipyparallel.Client:
        """Return the ipyparallel client, to look into devices with %%px.  Engine numbers are ranks."""
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
        """
        if len(payloads) != self.cluster.world_size:
            raise ConfigError(
                f"A job with {len(payloads)} payloads was asked for.",
                f"The cluster has {self.cluster.world_size} devices.",
                "Give one each.",
            )
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError(
                "A job was asked for.", "These engines are running another.", "Wait for it, or stop it with request_stop()."
            )
        try:
            session = self._ready_session()
            self._generation += 1
            folder = self._rendezvous = session.folder / f"run-{self._generation}"
            folder.mkdir()
            job = _Run(self, session, function, on_event)
            try:
                return job.results(payloads, timeout_s)
            except BaseException:
                job.abort()
                raise
            finally:
                self._rendezvous = None
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            self._busy.release()

    def _contexts(self) -> tuple[RankContext, ...]:
        """Return what the ranks of the current generation are told."""
        session = self._session
        assert session is not None and self._rendezvous is not None
        ends = session.endpoints
        return tuple(
            RankContext(
                rank=rank,
                world_size=self.cluster.world_size,
                device=device,
                cluster=self.cluster,
                fidelity=self.fidelity,
                interface=ends[rank].interface if ends else _loopback(),
                address=ends[rank].address if ends else "127.0.0.1",
                rendezvous=str(self._rendezvous),
                generation=self._generation,
            )
            for rank, device in enumerate(self.cluster.devices)
        )

    def stop(self) -> None:
        """End the engines and remove everything they used; a later `run` starts them anew."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
            atexit.unregister(session.close)

    def __enter__(self) -> EngineCluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _ready_session(self) -> EngineSession:
        if self._session is not None and not self._session.healthy:
            self.stop()
        if self._session is None:
            session = EngineSession(self.cluster, self.fidelity, hard_memory=self._hard_memory)
            session.open()
            atexit.register(session.close)
            self._session = session
        return self._session


class _Run:
    """One job in progress: what arrived, what failed, who is still at it."""

    def __init__(
        self, engines: EngineCluster, session: EngineSession, function: Callable[..., Any], on_event: Callable[[int, Any], None] | None
    ) -> None:
        self.engines = engines
        self.session = session
        self.function = function
        self.name = getattr(function, "__name__", "the job")
        self.on_event = on_event
        self.contexts = engines._contexts()
        self.replies: dict[int, ipyparallel.AsyncResult] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, BaseException] = {}
        self.died: set[int] = set()
        self.done: set[int] = set()
        self.last_events: dict[int, Any] = {}

    @property
    def pending(self) -> list[int]:
        """Return the ranks that have neither answered nor failed."""
        return [rank for rank in self.replies if rank not in self.outcomes and rank not in self.failures]

    def results(self, payloads: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Send the job out, wait for all ranks, return their results or raise the root cause."""
        self._send(payloads)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        grace_s: float | None = None
        while self.pending:
            # A rank that said it is done has its answer on the way: look for that soon.
            self._take_events(0.002 if self.done.intersection(self.pending) else _POLL_S)
            self._take_answers()
            now_s = time.monotonic()
            if self.failures and grace_s is None:
                grace_s = now_s + _GRACE_S
                self.engines.request_stop()
            if grace_s is not None and now_s > grace_s:
                break
            if deadline_s is not None and now_s > deadline_s and not self.failures:
                raise unfinished([self.engines.device_names[rank] for rank in self.pending], self.name, timeout_s or 0.0)
        if self.failures:
            self._blame_the_silent()
            raise self.failures[root_cause(self.failures, frozenset(self.died))]
        self._take_last_events()
        client = self.session.client
        assert client is not None
        client.purge_local_results("all")  # the client would keep every answer
        return [self.outcomes[rank].result for rank in range(len(payloads))]

    def abort(self) -> None:
        """Let ranks that are still at it end by themselves for a moment, else end all engines; the next run starts new ones."""
        try:
            self.engines.request_stop()
            deadline_s = time.monotonic() + (0.0 if self.failures else _GRACE_S)
            while self.pending and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                self._take_answers()
        finally:
            if self.pending or not self.session.healthy:
                self.engines.stop()

    def _send(self, payloads: Sequence[Any]) -> None:
        function = self._portable_function()
        client = self.session.client
        assert client is not None
        for rank, (context, payload) in enumerate(zip(self.contexts, payloads, strict=True)):
            try:
                request = pickle.dumps((context, payload))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"A payload for device '{context.device.name}' was given.",
                    f"It cannot be pickled: {error}.",
                    "Send data, not live objects.",
                ) from error
            self.replies[rank] = client[rank].apply_async(run_job, request, function, self.session.events_address)

    def _portable_function(self) -> Any:
        """Return the function pickled by reference, or as it is (ipyparallel sends its code) when a notebook defines it."""
        if getattr(self.function, "__module__", "__main__") == "__main__":
            return self.function
        try:
            return pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return self.function

    def _take_events(self, timeout_s: float) -> None:
        for rank, generation, kind, event in self.session.receive(timeout_s):
            if generation != self.engines._generation:
                continue  # of a job that was given up
            if kind == DONE:
                self.done.add(rank)
                continue
            self.last_events[rank] = event
            if self.on_event is not None:
                self.on_event(rank, event)

    def _blame_the_silent(self) -> None:
        """Name the device that does not answer when all others only say that a peer did not."""
        if self.pending and only_peers_blamed(self.failures):
            frozen = [rank for rank in self.pending if self.session.engines[rank].frozen]
            rank = (frozen or self.pending)[0]
            raise silent_device(self.contexts[rank].device.name, rank, self.name, self.last_events.get(rank))

    def _take_last_events(self) -> None:
        """Take what was published just before the ranks ended: it comes by another way than their answers."""
        deadline_s = time.monotonic() + 0.5
        while len(self.done) < len(self.replies) and time.monotonic() < deadline_s:
            self._take_events(0.01)

    def _take_answers(self) -> None:
        for rank in self.pending:
            device = self.contexts[rank].device
            engine = self.session.engines[rank]
            alive = engine.alive  # looked at before the answer: an engine may answer and then end
            if self.replies[rank].ready():
                try:
                    outcome: Outcome = pickle.loads(self.replies[rank].get())
                except Exception as error:
                    self.failures[rank] = RuntimeSetupError(
                        f"The job {self.name} was sent to device '{device.name}'.",
                        f"Its engine could not take it or answer: {error}.",
                        "See the note.",
                    )
                    continue
                if outcome.error is None:
                    self.outcomes[rank] = outcome
                else:
                    self.failures[rank] = error_of(outcome, device.name)
            elif not alive:
                self.died.add(rank)
                self._take_events(0.001)  # its last events may lie waiting
                last = self.last_events.get(rank)
                if rank < len(self.session.cgroups) and self.session.cgroups[rank].oom_kills:
                    self.failures[rank] = memory_killed(device.name, rank, device.memory_bytes, last)
                else:
                    self.failures[rank] = lost_device(device.name, rank, engine.pid, self.name, last)


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
