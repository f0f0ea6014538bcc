"""Engines for emulated devices, which live as long as a notebook: run a job on every device and recover from dead
engines.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from workbench.core.cluster import Cluster
from workbench.core.errors import RuntimeSetupError, check_choice
from workbench.core.job import Fidelity as FidelityChoice
from workbench.runtime.commands import Slow
from workbench.runtime.context import RankContext
from workbench.runtime.engine_service import Engines
from workbench.runtime.engine_session import EngineSession, LocalSlot, OnReady, unheard
from workbench.runtime.engine_starter import warm_up
from workbench.runtime.memory import MemoryReading, read_memory
from workbench.runtime.messages import Call, calls_of_emulated
from workbench.runtime.network import Fidelity, probe
from workbench.runtime.own_calls import Own, run_own

IDLE_S = 60.0
"""Engines end after being idle for this long, and the next run restarts them.  After a run those of four devices take
0.6 GB."""


def emulated_links(cluster: Cluster, fidelity: FidelityChoice) -> tuple[Fidelity, str]:
    """Return how the links of a cluster's emulated devices are emulated here, and why so.  fidelity: see
    EngineCluster.start.

    Raises ConfigError, or RuntimeSetupError if the cluster's medium cannot be emulated so.
    """
    check_choice("fidelity", fidelity, get_args(FidelityChoice))
    if fidelity == "auto":
        support = probe()
        links, reason = support.fidelity, support.reason
    else:
        links, reason = fidelity, "asked for"
    if cluster.medium == "wifi":
        if links == "paced":
            raise RuntimeSetupError(
                f"Cluster '{cluster.name}' was to be emulated with paced links.",
                "Its devices share the air, which only the kernel emulates here.",
                'Use --mode simulate, or kernel links (see `workbench doctor`), or set medium = "switch".',
            )
        from workbench.runtime.radio import require_similar_rates  # needs pyroute2, which only Linux has

        require_similar_rates(cluster)
    return links, reason


class EngineCluster(Engines):
    """A cluster of emulated devices with one engine process each.

    `run` may be called any number of times.  The next `run` restarts engines that died or had to be killed.
    keeps_variables: engines do not end when they are idle, because a notebook's cells have left variables there.
    dilation: how many times slower than real all devices and links run (see dilate).
    """

    patience_s = 1.0
    slots: Sequence[LocalSlot] = ()

    def __init__(self, cluster: Cluster, fidelity: Fidelity, reason: str) -> None:
        super().__init__(cluster)
        self.fidelity = fidelity
        self.fidelity_reason = reason
        self.keeps_variables = False
        self.inbox.most_bytes = 1 << 32  # its engines are our own processes
        self.dilation = 1.0
        self._session: EngineSession | None = None
        self._slow_paths = dict[str, float]()  # on shared air, by 'sender>receiver'
        self._starting = (
            threading.RLock()
        )  # held while engines start, are released after being idle, or get other links
        self._idle: threading.Timer | None = None

    @classmethod
    def start(
        cls, cluster: Cluster, *, fidelity: FidelityChoice = "auto", on_ready: OnReady = unheard
    ) -> EngineCluster:
        """Start an engine for each device.  on_ready: see EngineSession.open.

        fidelity: 'kernel' (links shaped by the kernel), 'paced' (links paced by our transport), 'auto' (the better one
        that works here).
        Raises RuntimeSetupError.
        """
        real = [device.name for device in cluster.devices if device.address]
        if real:
            raise RuntimeSetupError(
                f"Cluster '{cluster.name}' with real devices ({', '.join(real)}) was asked for.",
                "Engines that start here are emulated devices.",
                "Run a job on them with `workbench run`, or leave their address out to emulate them.",
            )
        warm_up(with_models=False)  # while the network is tried out and set up
        links, reason = emulated_links(cluster, fidelity)
        engines = cls(cluster, links, reason)
        engines.open(on_ready)
        return engines

    def open(self, on_ready: OnReady = unheard) -> None:
        """Start the engines if they are not running.  Raises RuntimeSetupError."""
        if self._busy.acquire(blocking=False):
            try:
                self._prepare(on_ready)
            finally:
                self._busy.release()

    def dilate(self, factor: float) -> None:
        """Slow all devices and links down by `factor`, from the next job on.  Reported times stay in
        emulated seconds.
        """
        with self._starting:  # engines that were idle may end just now
            if factor != self.dilation:
                self.dilation = factor
                self._shape_links()

    def slowed(self, rank: int, slow: Slow) -> Slow:
        """Let messages on shared air take more of its time, if the kernel can; their sender then does nothing."""
        if self.cluster.medium != "wifi":
            return slow
        from workbench.runtime.radio import require_similar_rates  # needs pyroute2, which only Linux has

        left, path = slow._replace(factor=1.0), f"{self.cluster.names[rank]}>{slow.to}"
        self._slow_paths[path] = slow.factor
        try:
            require_similar_rates(self.cluster.with_slow_links(self._slow_paths))
        except RuntimeSetupError:
            del self._slow_paths[path]
            left = slow
        self._shape_links()
        return left

    def _shape_links(self) -> None:
        with self._starting:
            if self._session is not None:
                slowed = self.cluster.with_slow_links(self._slow_paths)
                self._session.shape_links(slowed.with_slower_links(self.dilation))

    def now_s(self) -> float:
        """Return the monotonic clock in the devices' seconds."""
        return time.monotonic() / self.dilation

    @property
    def engine_pids(self) -> tuple[int, ...]:
        """Return the engines' process numbers by rank.  Empty if none run."""
        return tuple(slot.engine.pid for slot in self.slots if slot.engine is not None)

    def memory(self) -> tuple[MemoryReading, ...]:
        """Return the engines' memory by rank, read from outside.  May be called from any thread, also during a job."""
        return tuple(read_memory(pid) for pid in self.engine_pids)

    def call(self, function: Callable[..., Any], payload: Any) -> tuple[Call, Any]:
        """Return a function's entry in the call table, or the call that runs any other function."""
        self.table = calls_of_emulated()  # here, because it imports every method's declaration
        if self.table.knows(function):
            return super().call(function, payload)
        return super().call(run_own, Own.of((function, payload)))

    def context(self, rank: int) -> RankContext:
        """Return the context of a rank's next job."""
        session = self._session
        assert session is not None
        loopback = "lo" if os.path.isdir("/sys/class/net/lo") else "lo0"
        return RankContext(
            rank=rank,
            world_size=self.cluster.world_size,
            device=self.cluster.devices[rank],
            cluster=self.cluster,
            fidelity=self.fidelity,
            interface=session.endpoints[rank].interface if session.endpoints else loopback,
            generation=self.number,
            dilation=self.dilation,
            is_watched=self.is_watched,
        )

    def _prepare(self, on_ready: OnReady = unheard) -> None:
        with self._starting:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            if self._session is not None and not self._session.healthy:
                self.stop()
            if self._session is None:
                session = EngineSession(self.cluster.with_slower_links(self.dilation), self.fidelity, self.inbox)
                session.open(on_ready=on_ready)
                atexit.register(session.close)
                self._session, self.slots = session, session.slots

    def _finish(self, busy: Sequence[int]) -> None:
        if busy or self._session is None or not self._session.healthy:
            self.stop()
            return
        if self._slow_paths:
            self._slow_paths.clear()
            self._shape_links()
        if not self.keeps_variables:
            self._idle = threading.Timer(IDLE_S, self._end_idle)
            self._idle.daemon = True
            self._idle.start()

    def _end_idle(self) -> None:
        with self._starting:
            if self._idle is threading.current_thread() and not self._busy.locked():
                self.stop()

    def _give_up(self) -> None:
        self.stop()

    def stop(self) -> None:
        """End the engines and remove all their files.  A later `run` restarts them."""
        session, self._session, self.slots = self._session, None, ()
        self._slow_paths.clear()
        if session is not None:
            session.close()
            atexit.unregister(session.close)

    def __enter__(self) -> EngineCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class EnginePool:
    """Keeps the engines of recently used clusters running, so that a notebook starts them only once."""

    def __init__(self, capacity: int = 2) -> None:
        self._capacity = capacity
        self._running: dict[str, EngineCluster] = {}  # those used last come last

    def acquire(
        self, cluster: Cluster, fidelity: FidelityChoice = "auto", *, on_ready: OnReady = unheard
    ) -> EngineCluster:
        """Return running engines for the cluster, reused or newly started.  Raises RuntimeSetupError.

        on_ready: see EngineSession.open.
        """
        key = f"{fidelity} {cluster!r}"
        engines = self._running.pop(key, None)
        if engines is None:
            while len(self._running) >= self._capacity:
                self._running.pop(next(iter(self._running))).stop()
            engines = EngineCluster.start(cluster, fidelity=fidelity, on_ready=on_ready)
        self._running[key] = engines
        engines.open(on_ready)
        return engines

    def stop(self) -> None:
        """End all engines."""
        while self._running:
            self._running.popitem()[1].stop()


@functools.cache
def default_pool() -> EnginePool:
    """Return the engine pool of this process.  Its engines end with the process."""
    return EnginePool()
