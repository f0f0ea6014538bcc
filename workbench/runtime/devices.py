"""The devices' processes: started, given faults, found silent, ended and started again.  Emulated, real or virtual."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, FaultSchedule, parse_faults
from workbench.core.job import Job
from workbench.runtime.commands import Leave, Leaving, Ping, Pong, Ready, Slow, Stop
from workbench.runtime.context import RankContext
from workbench.runtime.jobs import error_of


class News(NamedTuple):
    """What came from a device: 'event' (what it published), 'ended' (an Outcome), 'died' (None), 'restarted' (None, or an error)."""

    rank: int
    kind: Literal["event", "ended", "died", "restarted"]
    content: Any = None


class Devices(Protocol):
    """All that a coordinator needs to know of devices: EngineDevices, virtual_devices.VirtualDevices."""

    def start(self, rank: int) -> None:
        """Start a device's job; it publishes Ready once it takes commands."""
        ...

    def command(self, rank: int, message: Any) -> None:
        """Send a command to a device's job."""
        ...

    def kill(self, rank: int) -> None:
        """End a device's process; `news` says when it has died."""
        ...

    def freeze(self, rank: int) -> None:
        """Stop a device's process without ending it."""
        ...

    def restart(self, rank: int) -> None:
        """Start a device's process again, in the background; `news` says when it is there."""
        ...

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds that a device's process has used, 0 if nobody knows."""
        ...

    def news(self, timeout_s: float) -> list[News]:
        """Return what happened since the last call, waiting up to timeout_s for something to come."""
        ...

    def now_s(self) -> float:
        """Return the seconds of the devices' clock."""
        ...


class Service(Protocol):
    """A job on each engine by itself, so that one may die and come back while the others go on.

    engine_service.EngineService, ssh_devices.SshService.  address: where a job finds its commands.
    """

    address: str

    def start(self, rank: int, function: Callable[[RankContext, Any], Any], payload: Any) -> None:
        """Start function(context, payload) on one engine, which must not be at another job."""
        ...

    def command(self, rank: int, content: Any) -> bool:
        """Send a command to a rank's job; return False if it has none."""
        ...

    def kill(self, rank: int) -> None:
        """End a rank's engine at once."""
        ...

    def freeze(self, rank: int) -> None:
        """Stop a rank's engine without ending it."""
        ...

    def restart(self, rank: int) -> None:
        """Start a rank's engine again in the background."""
        ...

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds that a rank's engine has used."""
        ...

    def news(self, timeout_s: float) -> list[News]:
        """Return what happened since the last call, waiting up to timeout_s for something to come."""
        ...


@runtime_checkable
class Lender(Protocol):
    """Engines whose devices may be lost while the others go on: engines.EngineCluster, ssh_devices.SshEngines."""

    cluster: Cluster

    def now_s(self) -> float:
        """Return the monotonic clock in the devices' seconds."""
        ...

    def service(self) -> AbstractContextManager[Service]:
        """Lend the engines to a service."""
        ...


class EngineDevices:
    """Devices that are an engine's process each, emulated or real.

    job: what each runs, with the payload that `setup` returns for its rank.  clock: the devices' (see Lender.now_s).
    """

    def __init__(
        self,
        service: Service,
        job: Callable[[RankContext, Any], None],
        setup: Callable[[int], Any],
        clock: Callable[[], float],
    ) -> None:
        self._service, self._job, self._setup = service, job, setup
        self.kill, self.freeze, self.restart, self.cpu_s = service.kill, service.freeze, service.restart, service.cpu_s
        self.news, self.now_s = service.news, clock

    def start(self, rank: int) -> None:
        """Start a device's job."""
        self._service.start(rank, self._job, self._setup(rank))

    def command(self, rank: int, message: Any) -> None:
        """Send a command to a device's job."""
        self._service.command(rank, message)


class Told(NamedTuple):
    """What became known of a device: it is 'ready', is 'back', is 'leaving', has 'left', was 'lost', or 'said' something (content)."""

    rank: int
    what: Literal["ready", "back", "leaving", "left", "lost", "said"]
    content: Any = None


PING_EVERY_S, SILENCE_S = 0.5, 2.0
"""Seconds between two pings of a device, and after which one without a sign of life is ended."""
_SLOW_ANSWERS = 4.0
"""A device is silent for so many times as long as the slowest answer of late took: on a busy host all answer late."""
_TURN_S = 0.2
"""A coordinator that listens less often than this was kept waiting itself by a busy host."""
_STARVED_SHARE, _MOST_STARVED = 0.02, 10.0
"""A silent process that got this share of a processor is not frozen but starved by the host; it may be, for so many times as long."""


class Fleet:
    """The devices of a cluster as one run sees them.

    ready: those whose job runs and takes commands.  leaving: those that still do, but will not be asked for more.
    awaited: those that are being started.
    """

    def __init__(
        self,
        devices: Devices,
        names: Sequence[str],
        faults: FaultSchedule,
        *,
        silence_s: float = SILENCE_S,
        num_restarts: int = 0,
    ) -> None:
        """names: of the devices.  silence_s: a device without a sign of life for so long is ended.

        num_restarts: so often a device that dies by itself, or whose job fails, is started again; with none a job's error is raised.
        """
        self._devices, self._names, self.faults = devices, names, faults
        self._silence_s, self._num_restarts = silence_s, num_restarts
        self.ready: set[int] = set()
        self.leaving: set[int] = set()
        self.awaited: set[int] = set()
        self._known: set[int] = set()  # devices that were ready once
        self._kept_down: set[int] = set()  # by a fault, until it ends
        self._restarted: dict[int, int] = defaultdict(int)
        self._asked_s: dict[int, float] = {}  # the last pings
        self._pinged_s: dict[int, float] = {}  # those of them that were not answered yet
        self._cpu_s: dict[int, float] = {}  # of the processes at the last pings
        self._answers_s: dict[int, float] = {}  # what the last answer took
        self._listened_s = 0.0
        self._reasons: dict[int, str] = {}  # why devices were ended

    def start(self) -> None:
        """Start the job of every device."""
        for rank in range(len(self._names)):
            self._start(rank)

    def _start(self, rank: int) -> None:
        self.awaited.add(rank)
        self._devices.start(rank)

    def stop(self) -> None:
        """Tell all jobs to end."""
        for rank in (*self.ready, *self.leaving):
            self._devices.command(rank, Stop())

    def now_s(self) -> float:
        """Return the seconds of the devices' clock."""
        return self._devices.now_s()

    def name(self, rank: int) -> str:
        """Return a device's name."""
        return self._names[rank]

    @property
    def absent(self) -> str:
        """Return the names of the devices that take no commands."""
        return ", ".join(name for rank, name in enumerate(self._names) if rank not in self.ready)

    def awaits_return(self) -> bool:
        """Return whether a device that is down comes back, although no step is done until then: one that was to at a step comes now."""
        return any([rank in self.ready or rank in self.leaving or self.faults.hasten(rank) for rank in self._kept_down])

    def command(self, ranks: Iterable[int], message: Any) -> None:
        """Send a command to some devices; those that have gone do not get it."""
        for rank in ranks:
            if rank in self.ready or rank in self.leaving:
                self._devices.command(rank, message)

    @property
    def losses(self) -> str:
        """Return what became of the devices that take no commands."""
        absent = [rank for rank in range(len(self._names)) if rank not in self.ready]
        return ", ".join(f"{self._names[rank]} ({self._reasons.get(rank, 'its process ended')})" for rank in absent)

    def end(self, rank: int, reason: str) -> None:
        """End a device's process, with which something is wrong; the news will say that it is lost."""
        self._reasons[rank] = reason
        self._devices.kill(rank)

    def news(self, timeout_s: float) -> list[Told]:
        """Return what became known since the last call, waiting up to timeout_s for something to come.

        Raises the error of a job that failed, unless its device may be started again.
        """
        found: list[Told] = []
        for rank, kind, content in self._devices.news(timeout_s):
            if kind == "event":
                self._hear(rank, content, found)
            elif kind == "restarted":
                self.awaited.discard(rank)
                if content is None:
                    self._start(rank)
                else:
                    self._come_back(rank)
            else:
                self._gone(rank, content, found)
        return found

    def _hear(self, rank: int, content: Any, found: list[Told]) -> None:
        match content:
            case Pong():
                if rank in self._pinged_s:
                    self._answers_s[rank] = self.now_s() - self._pinged_s.pop(rank)
            case Ready():
                self.ready.add(rank)
                self.awaited.discard(rank)
                self._reasons.pop(rank, None)
                if self.faults.factor(rank) != 1:
                    self._devices.command(rank, Slow(self.faults.factor(rank)))
                found.append(Told(rank, "back" if rank in self._known else "ready"))
                self._known.add(rank)
            case Leaving():
                self.ready.discard(rank)
                self.leaving.add(rank)
                found.append(Told(rank, "leaving"))
            case _:
                found.append(Told(rank, "said", content))

    def _gone(self, rank: int, outcome: Any, found: list[Told]) -> None:
        """Take note that a device's process has died (outcome None) or its job has ended."""
        if outcome is not None and outcome.error is not None and (rank not in self._known or not self._num_restarts):
            raise error_of(outcome, self._names[rank])
        has_left = rank in self.leaving and outcome is not None
        if outcome is not None and not has_left:
            self.end(rank, "its job ended")  # it was not told to: its process is in an unknown state
        if has_left:
            self._reasons[rank] = "it left"
        for ranks in (self.ready, self.leaving, self.awaited):
            ranks.discard(rank)
        self._pinged_s.pop(rank, None)
        self._answers_s.pop(rank, None)
        if rank not in self._kept_down:
            self._come_back(rank)
        found.append(Told(rank, "left" if has_left else "lost"))

    def _come_back(self, rank: int) -> None:
        self._restarted[rank] += 1
        if self._restarted[rank] <= self._num_restarts:
            self._restart(rank)

    def _restart(self, rank: int) -> None:
        self.awaited.add(rank)
        self._devices.restart(rank)

    def inject(self, now_s: float, step: int = 0) -> list[tuple[Fault, bool]]:
        """Do what the faults want done by now; return those that began (True) or ended (False).

        One that finds its device gone already is left out.
        """
        found = []
        for fault, begins in self.faults.due(now_s, step):
            rank = fault.rank
            is_there = rank in self.ready or rank in self.leaving
            if fault.kind == "slow":
                self.command((rank,), Slow(self.faults.factor(rank)))
            elif begins and is_there:
                self._kept_down.add(rank)
                if fault.kind == "leave":
                    self._devices.command(rank, Leave())
                else:
                    (self._devices.kill if fault.kind == "kill" else self._devices.freeze)(rank)
            elif not begins and rank in self._kept_down:
                self._kept_down.discard(rank)
                self._restarted[rank] = -1  # once it has gone, it comes back
                if is_there:  # frozen and not found silent yet, or about to leave
                    self._devices.kill(rank)
                else:
                    self._come_back(rank)
            else:
                continue
            found.append((fault, begins))
        return found

    def listen(self) -> None:
        """Ask for signs of life, and end the devices that give none; the news will say that they are lost."""
        now_s = self.now_s()
        late_s = now_s - self._listened_s
        if late_s > _TURN_S:  # it was we who were silent
            self._pinged_s = {rank: pinged_s + late_s for rank, pinged_s in self._pinged_s.items()}
        self._listened_s = now_s
        silence_s = max(self._silence_s, _SLOW_ANSWERS * max(self._answers_s.values(), default=0.0))
        for rank in (*self.ready, *self.leaving):
            if rank not in self._pinged_s:
                if now_s - self._asked_s.get(rank, 0.0) >= PING_EVERY_S:
                    self._pinged_s[rank] = self._asked_s[rank] = now_s
                    self._cpu_s[rank] = self._devices.cpu_s(rank)
                    self._devices.command(rank, Ping())
            elif now_s - self._pinged_s[rank] > silence_s:
                self._pinged_s[rank] = now_s
                before_s, self._cpu_s[rank] = self._cpu_s[rank], self._devices.cpu_s(rank)
                is_starved = self._cpu_s[rank] - before_s > _STARVED_SHARE * silence_s
                if not is_starved or now_s - self._asked_s[rank] > _MOST_STARVED * silence_s:
                    self.end(rank, f"no sign of life for {now_s - self._asked_s[rank]:.0f} s")


def fleet_of(devices: Devices, cluster: Cluster, job: Job) -> Fleet:
    """Return a cluster's devices with the faults that a job asks for."""
    return Fleet(devices, [device.name for device in cluster.devices], FaultSchedule(parse_faults(job.faults, cluster)))
