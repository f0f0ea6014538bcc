"""The devices of a cluster during a run: which are ready, leaving or lost, and the faults that are injected."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from workbench.core.cluster import Cluster, Device
from workbench.core.device_faults import Fault, FaultSchedule, parse_faults
from workbench.core.heat import Heat
from workbench.core.job import Job
from workbench.runtime.commands import Leave, Leaving, Pong, Ready, Slow, Stop
from workbench.runtime.devices import Devices
from workbench.runtime.jobs import error_of
from workbench.runtime.watch import Watch


class DeviceNotice(NamedTuple):
    """A change of a device: it is 'ready', is 'back', is 'leaving', has 'left' or was 'lost'; or it published an event
    ('said', with the event as content).
    """

    rank: int
    what: Literal["ready", "back", "leaving", "left", "lost", "said"]
    content: Any = None


RETURNS = 3
"""How often a real device is restarted that was lost: its cable may be in its place again, or its system up."""
NO_REPLY = Pong()


class Fleet(Watch):
    """The devices of a cluster during one run.

    ready: devices whose job accepts commands.  leaving: devices that still accept commands but get no new work.
    awaited: devices that are starting.
    """

    def __init__(
        self,
        devices: Devices,
        names: Sequence[str],
        faults: FaultSchedule,
        *,
        silence_s: float | None = None,
        num_restarts: int = 0,
        described: Sequence[Device] = (),
    ) -> None:
        """names: the devices' names.

        silence_s: see Watch; the default is the devices' own value.

        num_restarts: how often a device is restarted after its process dies or its job fails; with 0 a job's error is
        raised.
        described: the devices, for those that leave by themselves (see departures), and real ones, which may come back
        (see RETURNS).
        """
        super().__init__(devices, names, devices.silence_s if silence_s is None else silence_s)
        self.faults, self._num_restarts, self._described = faults, num_restarts, described
        self.ready: set[int] = set()
        self.leaving: set[int] = set()
        self.awaited: set[int] = set()
        self._was_ready: set[int] = set()  # devices that were ready before
        self._kept_down: set[int] = set()  # devices kept down by a fault until the fault ends
        self._restarted: dict[int, int] = defaultdict(int)
        self._heats = {rank: self._cold(rank) for rank in range(len(described))}
        self._leavers = [
            rank for rank, device in enumerate(described) if device.leave_below or device.leave_if_throttled
        ]

    def start(self) -> None:
        """Start the job of every device."""
        for rank in range(len(self._names)):
            self._start(rank)

    def _start(self, rank: int) -> None:
        self.awaited.add(rank)
        self._devices.start(rank)

    def stop(self) -> None:
        """Ask all jobs to end."""
        for rank in (*self.ready, *self.leaving):
            self._devices.command(rank, Stop())

    def rank_or_pair(self, fault: Fault) -> int | str:
        """Return the rank of a fault's device, or 'sender>receiver' of its link."""
        return fault.rank if fault.to is None else f"{self._names[fault.rank]}>{self._names[fault.to]}"

    @property
    def absent(self) -> str:
        """Return the names of the devices that accept no commands."""
        return ", ".join(name for rank, name in enumerate(self._names) if rank not in self.ready)

    def awaits_return(self) -> bool:
        """Return whether a device that is down will return even if no step is completed.  Returns that were due at a
        step happen now.
        """
        return any([rank in self.ready or rank in self.leaving or self.faults.hasten(rank) for rank in self._kept_down])

    def command(self, ranks: Iterable[int], message: Any) -> None:
        """Send a command to some devices, skipping those that are down."""
        for rank in ranks:
            if rank in self.ready or rank in self.leaving:
                self._devices.command(rank, message)

    @property
    def losses(self) -> str:
        """Describe what happened to the devices that accept no commands."""
        absent = [rank for rank in range(len(self._names)) if rank not in self.ready]
        return ", ".join(f"{self._names[rank]} ({self.reasons.get(rank, 'its process ended')})" for rank in absent)

    def why(self, rank: int) -> str:
        """Return why a device is lost, as far as known, as the end of a sentence."""
        return f": {self.reasons[rank].rstrip('.')}" if rank in self.reasons else ""

    def news(self, timeout_s: float) -> list[DeviceNotice]:
        """Return the device changes since the last call.  Waits up to timeout_s for the first one.

        Raises the error of a failed job, unless its device may be restarted.
        """
        news: list[DeviceNotice] = []
        for rank, kind, content in self._devices.news(timeout_s):
            if kind == "event":
                self._hear(rank, content, news)
            elif kind == "restarted":
                self.awaited.discard(rank)
                if content is None:
                    self._start(rank)
                else:
                    self._come_back(rank)
            else:
                self._gone(rank, content, news)
        return news

    def _hear(self, rank: int, content: Any, news: list[DeviceNotice]) -> None:
        match content:
            case Pong():
                self.replied(rank, content)
            case Ready():
                self.ready.add(rank)
                self.awaited.discard(rank)
                self.reasons.pop(rank, None)
                if self.faults.factor(rank) != 1:
                    self._devices.command(rank, Slow(self.faults.factor(rank)))
                news.append(DeviceNotice(rank, "back" if rank in self._was_ready else "ready"))
                self._was_ready.add(rank)
            case Leaving():
                self.ready.discard(rank)
                self.leaving.add(rank)
                news.append(DeviceNotice(rank, "leaving"))
            case _:
                news.append(DeviceNotice(rank, "said", content))

    def _gone(self, rank: int, outcome: Any, news: list[DeviceNotice]) -> None:
        """Record that a device's process has died (outcome: why, if known) or its job has ended."""
        self.forget(rank, outcome if isinstance(outcome, str) else None)
        if isinstance(outcome, str):
            outcome = None
        if (
            outcome is not None
            and outcome.error is not None
            and (rank not in self._was_ready or not self._num_restarts)
        ):
            raise error_of(outcome, self._names[rank])
        has_left = rank in self.leaving and outcome is not None
        if outcome is not None and not has_left:
            self.end(rank, "its job ended")  # unexpectedly: its process is in an unknown state
        if has_left:
            self.reasons[rank] = "it left"
        for ranks in (self.ready, self.leaving, self.awaited):
            ranks.discard(rank)
        if rank in self._heats:
            self._heats[rank] = self._cold(rank)  # a new process is a cold device
        if rank not in self._kept_down:
            self._come_back(rank)
        news.append(DeviceNotice(rank, "left" if has_left else "lost"))

    def _come_back(self, rank: int) -> None:
        self._restarted[rank] += 1
        returns = RETURNS if self._described and self._described[rank].address else 0
        if self._restarted[rank] <= max(self._num_restarts, returns):
            self.awaited.add(rank)
            self._devices.restart(rank)

    def inject(self, now_s: float, step: int = 0) -> list[tuple[Fault, bool]]:
        """Apply the faults that are due; return those that began (True) or ended (False).

        A fault whose device is already down is left out.
        """
        changes = []
        for fault, begins in self.faults.due(now_s, step):
            rank = fault.rank
            is_there = rank in self.ready or rank in self.leaving
            if fault.kind == "memory":
                pass  # see memory_shares
            elif fault.kind == "slow":
                self.command(
                    (rank,), Slow(self.faults.factor(rank, fault.to), "" if fault.to is None else self._names[fault.to])
                )
            elif begins and is_there:
                self._kept_down.add(rank)
                if fault.kind == "leave":
                    self._devices.command(rank, Leave())
                else:
                    (self._devices.kill if fault.kind == "kill" else self._devices.freeze)(rank)
            elif not begins and rank in self._kept_down:
                self._kept_down.discard(rank)
                self._restarted[rank] = -1  # it returns once its process has ended
                if is_there:  # frozen but not yet detected, or about to leave
                    self._devices.kill(rank)
                else:
                    self._come_back(rank)
            else:
                continue
            changes.append((fault, begins))
        return changes

    @property
    def metered_j(self) -> dict[str, float]:
        """Return the joules that each device with a meter has used since its first reply, for whatever purpose."""
        meters_j = {self._names[rank]: (self._first[rank].meter_j, last.meter_j) for rank, last in self._health.items()}
        return {
            name: last - first
            for name, (first, last) in meters_j.items()
            if first is not None and last is not None and last > first
        }

    def memory_shares(self) -> dict[str, float]:
        """Return the share of its described memory that each device has for the run now, by its name.

        For an emulated device the injected faults decide it; a real one adds its free memory and the memory that the
        run uses.
        """
        shares = {}
        for rank, device, health in self._replies(self._heats):
            memory_bytes = health.memory_bytes
            share = 1.0 if memory_bytes is None else min(1.0, max(0, memory_bytes) / device.memory_bytes)
            shares[device.name] = share / self.faults.factor(rank, kind="memory")
        return shares

    def charges(self, now_s: float, busy: Collection[int]) -> dict[str, float]:
        """Return the charge of the devices that are ready, from 0 to 1, by name: a real one's as it reports it, an
        emulated one's by the power model.

        now_s: seconds since the run began.  busy: the devices that have computed since then; the others have waited.
        """
        charges = {
            device.name: _charge(device, health, now_s, is_idle=rank not in busy)
            for rank, device, health in self._replies(self._heats)
        }
        return {name: charge for name, charge in charges.items() if charge is not None}

    def _replies(self, ranks: Iterable[int]) -> Iterator[tuple[int, Device, Pong]]:
        """Yield each of some described devices that is ready, with its last reply."""
        for rank in ranks:
            if rank in self.ready:
                yield rank, self._described[rank], self._health.get(rank, NO_REPLY)

    def departures(self, now_s: float) -> list[tuple[int, str]]:
        """Let devices leave on notice if their charge is too low or heat slows them down.  Return each with its reason.

        now_s: seconds since the run began.  The charge of an emulated device falls as if it computed all the time.  It
        is throttled while its curve makes it slower; an injected slowdown counts as heat, too.
        """
        departures = []
        for rank, device, health in self._replies(self._leavers):
            charge = _charge(device, health, now_s)
            reason = ""
            if rank in self._kept_down:
                continue
            if charge is not None and charge < device.leave_below:
                reason = f"its charge is below {device.leave_below:.0%}"
            elif device.leave_if_throttled and (
                health.is_throttled or self._heats[rank].speed < 1 or self.faults.factor(rank) > 1
            ):
                reason = "heat slows it down"
            if reason:
                self._kept_down.add(rank)
                self._devices.command(rank, Leave())
                departures.append((rank, reason))
        return departures

    def _cold(self, rank: int) -> Heat:
        """Return the heat of a device that begins.  A real one reports its own throttling instead."""
        device = self._described[rank]
        return Heat(() if device.address else device.sustained)

    def worked(self, rank: int, busy_s: float) -> None:
        """Record the seconds for which a device has computed in the step that ends now: they heat an emulated one."""
        if rank in self._heats:
            self._heats[rank].advance(self.now_s(), busy_s)

    def listen(self) -> None:
        """Ping the devices (see Watch)."""
        self.ping((*self.ready, *self.leaving))


def _charge(device: Device, health: Pong, now_s: float, *, is_idle: bool = False) -> float | None:
    """Return a device's charge; None for a real one on mains power."""
    return device.charge(now_s, is_idle=is_idle) if device.address is None else health.charge


def fleet_of(devices: Devices, cluster: Cluster, job: Job) -> Fleet:
    """Return a cluster's devices with the faults that a job requests."""
    names, faults = cluster.names, FaultSchedule(parse_faults(job.faults, cluster))
    is_described = (
        cluster.is_real or not devices.is_real
    )  # a rank of torchrun has no battery or throttle that is known here
    return Fleet(devices, names, faults, described=cluster.devices if is_described else ())
