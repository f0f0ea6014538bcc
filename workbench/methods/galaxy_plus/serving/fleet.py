"""The devices' processes: started, given the faults of the schedule, found silent, ended and started anew."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.serving import ReschedulingSettings
from workbench.methods.galaxy_plus.serving import messages as m
from workbench.methods.galaxy_plus.serving.faults import FaultSchedule
from workbench.methods.galaxy_plus.serving.log import ServingLog
from workbench.methods.galaxy_plus.serving.samples import Samples
from workbench.methods.galaxy_plus.serving.worker import WorkerSetup, serve_worker
from workbench.methods.galaxy_plus.session import SessionSetup
from workbench.runtime.engine_service import EngineService

_PING_EVERY_S = 1.0
_STUCK = 3.0
"""A device that has been at one command for so many times the timeout of a request will not end it."""
_RESTARTS = 3
"""A device that dies by itself is started anew so often."""


class Told(NamedTuple):
    """What the portal should know: a device is 'ready', was 'lost', is 'back', or 'said' something (content: a message)."""

    rank: int
    what: Literal["ready", "lost", "back", "said"]
    content: Any = None


class Fleet:
    """ready: the devices whose job runs and takes commands."""

    def __init__(
        self,
        service: EngineService,
        setup: SessionSetup,
        cluster: Cluster,
        faults: FaultSchedule,
        log: ServingLog,
        samples: Samples,
        *,
        settings: ReschedulingSettings,
    ) -> None:
        self._service, self._setup, self._cluster, self._log, self._samples = service, setup, cluster, log, samples
        self._faults, self._settings = faults, settings
        self.ready: set[int] = set()
        self._known: set[int] = set()  # devices that were ready once
        self._kept_down: set[int] = set()  # by a fault, until it ends
        self._num_restarts: dict[int, int] = defaultdict(int)
        self._heard_s: dict[int, float] = {}
        self._pinged_s = 0.0

    @property
    def next_fault_s(self) -> float:
        """Return when something is due by the schedule, infinity if nothing is."""
        return self._faults.next_s

    @property
    def may_grow(self) -> bool:
        """Return whether a device that is down may come back."""
        return bool(self._service.restarting) or self._faults.next_s < math.inf or len(self._service.running) > len(self.ready)

    def name(self, rank: int) -> str:
        """Return a device's name."""
        return self._cluster.devices[rank].name

    def start(self) -> None:
        """Start the job of every device."""
        for rank in range(self._cluster.world_size):
            self._start(rank)

    def _start(self, rank: int) -> None:
        setup = WorkerSetup(
            session=self._setup,
            address=self._service.address,
            timeout_s=self._settings.request_timeout_s,
            report_every_s=self._settings.report_every_s,
            slow_down=self._faults.factor(rank),
            storage_bytes_per_s=self._cluster.devices[rank].storage_bytes_per_s,
        )
        self._service.start(rank, serve_worker, setup)

    def stop(self) -> None:
        """Tell all jobs to end."""
        self.command(self._service.running, m.Stop())

    def command(self, ranks: Iterable[int], content: Any) -> None:
        """Send a command to some devices; those that are not ready do not get it."""
        for rank in ranks:
            self._service.command(rank, content)

    def news(self, timeout_s: float) -> list[Told]:
        """Return what became known since the last call, waiting up to timeout_s for something to come."""
        found: list[Told] = []
        for rank, kind, content in self._service.news(timeout_s):
            if kind == "event":
                self._heard_s[rank] = time.monotonic()
                if isinstance(content, m.Pong):
                    if content.busy_s > _STUCK * self._settings.request_timeout_s:
                        self._service.kill(rank)
                elif isinstance(content, m.Ready):
                    self.ready.add(rank)
                    found.append(Told(rank, "back" if rank in self._known else "ready"))
                    self._known.add(rank)
                else:
                    found.append(Told(rank, "said", content))
            elif kind == "restarted":
                if content is None:
                    self._start(rank)
                else:
                    self._come_back(rank)
            else:
                if kind == "ended":
                    if rank not in self._known and content.error is not None:
                        raise content.error  # it could not even begin
                    self._service.kill(rank)  # it was not told to end: its engine is in an unknown state
                self.ready.discard(rank)
                if rank not in self._kept_down:
                    self._come_back(rank)
                found.append(Told(rank, "lost"))
        return found

    def _come_back(self, rank: int) -> None:
        self._num_restarts[rank] += 1
        if self._num_restarts[rank] <= _RESTARTS:
            self._service.restart(rank)

    def inject(self, now_s: float) -> None:
        """Do what the schedule of faults wants done by now."""
        for fault, begins in self._faults.due(now_s):
            rank = fault.rank
            if fault.kind == "slow":
                factor = self._faults.factor(rank)
                self._log.add(now_s, "slowed" if begins else "restored", rank, value=factor)
                self._samples.load(rank, now_s, 1 - 1 / max(1.0, factor))
                self._service.command(rank, m.Slow(factor))
            elif begins and rank in self.ready:
                self._kept_down.add(rank)
                self._log.add(now_s, "killed" if fault.kind == "kill" else "frozen", rank)
                (self._service.kill if fault.kind == "kill" else self._service.freeze)(rank)
            elif not begins and rank in self._kept_down:
                self._kept_down.discard(rank)
                if rank in self.ready:  # frozen, and not found silent yet
                    self._service.kill(rank)
                else:
                    self._service.restart(rank)

    def listen(self) -> None:
        """Ask for signs of life, and end the devices that give none; the news will tell that they are lost."""
        now_s = time.monotonic()
        if now_s - self._pinged_s > _PING_EVERY_S:
            if now_s - self._pinged_s > 2 * _PING_EVERY_S:
                self._heard_s = dict.fromkeys(self.ready, now_s)  # it was we who were silent
            self._pinged_s = now_s
            self.command(self.ready, m.Ping())
        for rank in self.ready:
            if now_s - self._heard_s[rank] > self._settings.silence_s:
                self._heard_s[rank] = now_s
                self._service.kill(rank)

    def end(self, rank: int) -> None:
        """End a device's process, with which something is wrong; the news will tell that it is lost."""
        self._service.kill(rank)

    def memory(self) -> tuple[int, ...]:
        """Return the resident bytes of each device's process, 0 of the dead."""
        return tuple(reading.rss_bytes if reading is not None else 0 for reading in self._service.memory())
