"""Simulate devices in virtual time: steps take their predicted seconds, processes die and return, and no real time passes."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from workbench.runtime import commands as c
from workbench.runtime.devices import SILENCE_S, News
from workbench.runtime.jobs import Outcome


class Agenda:
    """A queue of actions in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._actions)

    @property
    def next_s(self) -> float:
        """Return the time of the next action.  Infinity if there are none."""
        return self._actions[0][0] if self._actions else float("inf")

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule an action.  Actions due at the same time run in the order in which they were scheduled."""
        heapq.heappush(self._actions, (time_s, next(self._order), action))

    def step(self) -> None:
        """Advance to the next action and run it."""
        self.now_s, _, action = heapq.heappop(self._actions)
        action()


class VirtualWork(Protocol):
    """A method's work on virtual devices.  Jobs have first_step, last_step (exclusive) and timeout_s."""

    def seconds(self, job: Any, step: int, factors: Mapping[int, float]) -> float:
        """Return the seconds of a step.  factors: each device's slowdown relative to its profile, by position among the members."""

    def done(self, job: Any, place: int, step: int, factor: float) -> c.StepDone:
        """Return the event that a member publishes after a step."""

    def part(self, job: Any, place: int, end: c.End, stop: int) -> Any:
        """Return a member's part of a job that it ended before step `stop`, or during that step if another device was lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorld:
    """The overheads of virtual devices outside computing, in seconds.

    start_s: from the start of a process until it accepts commands.  restart_s: to start a new process.  notice_s: until the end of a
    process is noticed.  join_s: to form a group.  prepare_s: to load data.  probe_s: of a probe.  message_s: maximum for a message.
    seed: of the random durations, and of which members have completed the step in which a device is lost.  None: every duration is its
    maximum, and no member has completed that step.
    """

    start_s: float = 0.5
    restart_s: float = 2.0
    notice_s: float = 0.05
    join_s: float = 0.05
    prepare_s: float = 0.2
    probe_s: float = 0.05
    message_s: float = 0.001
    seed: int | None = None


@dataclass(slots=True)
class _Process:
    """life: counts a device's processes.  factor: the injected slowdown.  train: its current job."""

    life: int = 0
    is_alive: bool = True
    is_frozen: bool = False
    has_job: bool = False
    factor: float = 1.0
    train: c.Train | None = None


@dataclass(slots=True)
class _Group:
    """The members of a working generation.  ticket: identifies the current step; it changes if the step is aborted."""

    train: c.Train
    step: int
    joined: set[int] = field(default_factory=set)
    ticket: int = 0
    pauses: bool = False


class VirtualDevices:
    """A runtime.devices.Devices whose clock advances only while somebody waits for news.

    commands: (seconds, rank, command) of all commands sent.
    """

    silence_s, timeout_s, is_real = SILENCE_S, 0.0, False

    def __init__(self, world_size: int, work: VirtualWork, world: VirtualWorld | None = None) -> None:
        self._work, self._world = work, world or VirtualWorld()
        self._agenda = Agenda()
        self._processes = [_Process() for _ in range(world_size)]
        self._groups: dict[int, _Group] = {}
        self._pending: list[News] = []
        self._last_s: dict[tuple[int, bool], float] = {}  # last arrival to or from a device: messages do not overtake each other
        self._draws = None if self._world.seed is None else random.Random(self._world.seed)
        self.commands: list[tuple[float, int, Any]] = []
        self.slow_links: dict[tuple[int, str], float] = {}  # by rank of the sender and name of the receiver

    def now_s(self) -> float:
        """Return the virtual seconds."""
        return self._agenda.now_s

    def news(self, timeout_s: float) -> list[News]:
        """Advance the time until an event arrives, or by timeout_s."""
        until_s = self._agenda.now_s + timeout_s
        while not self._pending and self._agenda.next_s <= until_s:
            self._agenda.step()
        if not self._pending:
            self._agenda.now_s = until_s
        found, self._pending = self._pending, []
        return found

    def start(self, rank: int) -> None:
        """Start a device's job."""
        self._after(rank, self._world.start_s, partial(self._begin_job, rank))

    def _begin_job(self, rank: int) -> None:
        self._processes[rank].has_job = True
        self._tell(rank, c.Ready())

    def command(self, rank: int, message: Any) -> None:
        """Send a command."""
        self.commands.append((self.now_s(), rank, message))
        life = self._processes[rank].life
        self._send(rank, True, lambda: self._take(rank, message, life))

    def kill(self, rank: int) -> None:
        """Kill a device's process."""
        process = self._processes[rank]
        if process.is_alive:
            had_job = self._end_process(rank)
            if had_job:
                self._agenda.at(self.now_s() + self._some(self._world.notice_s), lambda: self._pending.append(News(rank, "died")))

    def _end_process(self, rank: int) -> bool:
        process = self._processes[rank]
        self._break_off(rank, self._world.notice_s)
        self._processes[rank] = _Process(life=process.life + 1, is_alive=False)
        return process.has_job

    def freeze(self, rank: int) -> None:
        """Suspend a device's process, so that the others wait for it."""
        process = self._processes[rank]
        if process.is_alive and not process.is_frozen:
            if process.train is not None:
                self._break_off(rank, process.train.job.timeout_s)
            process.is_frozen = True

    def cpu_s(self, rank: int) -> float:
        """Return 0, because virtual devices are never starved by a host."""
        return 0.0

    def restart(self, rank: int) -> None:
        """Restart a device's process."""
        if self._processes[rank].is_alive:
            self._end_process(rank)
        self._agenda.at(self.now_s() + self._some(self._world.restart_s), partial(self._restarted, rank))

    def _restarted(self, rank: int) -> None:
        self._processes[rank] = _Process(life=self._processes[rank].life + 1)
        self._pending.append(News(rank, "restarted"))

    # Messages.

    def _some(self, most_s: float) -> float:
        return most_s if self._draws is None else self._draws.uniform(0.2, 1.0) * most_s

    def _send(self, rank: int, is_command: bool, action: Callable[[], Any]) -> None:
        time_s = max(self.now_s() + self._some(self._world.message_s), self._last_s.get((rank, is_command), 0.0))
        self._last_s[rank, is_command] = time_s
        self._agenda.at(time_s, action)

    def _tell(self, rank: int, event: Any) -> None:
        self._send(rank, False, lambda: self._pending.append(News(rank, "event", event)))

    def _after(self, rank: int, seconds: float, action: Callable[[], None]) -> None:
        """Run an action for a process after a delay, if the process still exists."""
        life = self._processes[rank].life

        def act() -> None:
            process = self._processes[rank]
            if process.life == life and process.is_alive and not process.is_frozen:
                action()

        self._agenda.at(self.now_s() + self._some(seconds), act)

    def _take(self, rank: int, message: Any, life: int) -> None:
        process = self._processes[rank]
        if process.life != life or not process.has_job or process.is_frozen:
            return
        match message:
            case c.Train():
                self._join(rank, message)
            case c.Pause() if process.train is not None and process.train.generation == message.generation:
                self._groups[message.generation].pauses = True
            case c.Abort() if process.train is not None and process.train.generation == message.generation:
                self._give_up(rank, process.train)
            case c.Slow() if message.to:
                self.slow_links[rank, message.to] = message.factor
            case c.Slow():
                process.factor = message.factor
            case c.Probe():
                self._after(rank, process.factor * self._world.probe_s, partial(self._tell, rank, c.Probed(process.factor)))
            case c.Prepare():
                self._after(rank, self._world.prepare_s, partial(self._tell, rank, c.Prepared()))
            case c.Ping():
                self._tell(rank, c.Pong())
            case c.Leave():
                self._tell(rank, c.Leaving())
            case c.Stop():
                process.has_job = False
                self._send(rank, False, lambda: self._pending.append(News(rank, "ended", Outcome(rank=rank))))

    # Work.

    def _join(self, rank: int, train: c.Train) -> None:
        group = self._groups.setdefault(train.generation, _Group(train, train.job.first_step))
        train = self._processes[rank].train = group.train
        group.joined.add(rank)
        if group.joined == set(train.members):
            self._agenda.at(self.now_s() + self._some(self._world.join_s), partial(self._begin_step, group))
        else:  # the other members may never come
            self._after(rank, train.job.timeout_s, partial(self._give_up, rank, train, group))

    def _begin_step(self, group: _Group) -> None:
        if not self._is_whole(group):
            return
        factors = {place: self._processes[rank].factor for place, rank in enumerate(group.train.members)}
        seconds = self._work.seconds(group.train.job, group.step, factors)
        self._agenda.at(self.now_s() + seconds, partial(self._end_step, group, group.ticket))

    def _is_whole(self, group: _Group) -> bool:
        return all(self._is_at(rank, group.train) for rank in group.train.members)

    def _is_at(self, rank: int, train: c.Train) -> bool:
        process = self._processes[rank]
        return process.is_alive and not process.is_frozen and process.train is train

    def _end_step(self, group: _Group, ticket: int) -> None:
        if ticket != group.ticket or not self._is_whole(group):
            return
        job, members = group.train.job, group.train.members
        for place, rank in enumerate(members):
            self._tell(rank, self._work.done(job, place, group.step, self._processes[rank].factor))
        group.step += 1
        end: c.End | None = "finished" if group.step >= job.last_step else "paused" if group.pauses else None
        if end is None:
            self._begin_step(group)
            return
        for rank in members:
            self._end_job(rank, group.train, end, group.step)

    def _end_job(self, rank: int, train: c.Train, end: c.End, stop: int) -> None:
        self._processes[rank].train = None
        part = self._work.part(train.job, train.members.index(rank), end, stop)
        self._tell(rank, c.Ended(train.generation, end, part))

    def _break_off(self, rank: int, others_wait_s: float) -> None:
        """Make the members of a device's group notice, after a delay, that it does not answer."""
        train = self._processes[rank].train
        if train is None:
            return
        group = self._groups[train.generation]
        group.ticket += 1
        for other in train.members:
            if other != rank and self._is_at(other, train):
                self._after(other, others_wait_s, partial(self._give_up, other, train))

    def _give_up(self, rank: int, train: c.Train, forming: _Group | None = None) -> None:
        """Make a member end its job because another does not answer.  forming: act only if that group has not formed."""
        if self._processes[rank].train is not train or (forming is not None and forming.joined == set(train.members)):
            return
        group, stop = self._groups[train.generation], None
        self._break_off(rank, self._world.notice_s)  # the others lose their connection to this device
        has_begun = group.joined == set(train.members) and group.step < train.job.last_step
        if has_begun and self._draws is not None and self._draws.random() < 0.2:  # it already had all inputs of the step
            self._tell(rank, self._work.done(train.job, train.members.index(rank), group.step, 1.0))
            stop = group.step + 1
        self._end_job(rank, train, "lost", group.step if stop is None else stop)
