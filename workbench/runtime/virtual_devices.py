"""Simulate devices in virtual time: steps take their predicted seconds, processes die and return, and no real time
passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workbench.core.heat import Heat, Levels
from workbench.runtime import commands as c
from workbench.runtime.devices import News
from workbench.runtime.jobs import Outcome
from workbench.runtime.virtual_work import Agenda, VirtualWork, VirtualWorld
from workbench.runtime.watch import SILENCE_S


@dataclass(slots=True)
class _Process:
    """life: counts a device's processes.  factor: the injected slowdown.  train: its current job.
    free_s: when it ends the operation in which its last step was broken off.
    """

    life: int = 0
    is_alive: bool = True
    is_frozen: bool = False
    has_job: bool = False
    factor: float = 1.0
    train: c.Train | None = None
    free_s: float = 0.0


@dataclass(slots=True)
class _Group:
    """The members of a working generation.

    ticket: identifies the current attempt at a step; it changes if the step is aborted or takes another time.
    done: the finished part of the current step, as of since_s, after before_s; the whole step takes whole_s at the
    present speeds.
    waits: for the step's time to begin.
    """

    train: c.Train
    step: int
    joined: set[int] = field(default_factory=set)
    ticket: int = 0
    pauses: bool = False
    waits: bool = False
    is_busy: bool = False
    begun_s: float = 0.0
    since_s: float = 0.0
    before_s: float = 0.0
    done: float = 0.0
    whole_s: float = 0.0


class VirtualDevices:
    """A runtime.devices.Devices whose clock advances only while somebody waits for news.

    commands: (seconds, rank, command) of all commands sent.  taken_s: the seconds of each step when it was last done,
    by its number.
    """

    silence_s, timeout_s, is_real = SILENCE_S, 0.0, False

    def __init__(
        self, world_size: int, work: VirtualWork, world: VirtualWorld | None = None, *, curves: Sequence[Levels] = ()
    ) -> None:
        """curves: each device's speed as it gets hot (see core.heat); by default all keep their speed."""
        self._work, self._world = work, world or VirtualWorld()
        self._curves = curves or [()] * world_size
        self._heats = list(map(Heat, self._curves))
        self._agenda = Agenda()
        self._processes = [_Process() for _ in range(world_size)]
        self._groups: dict[int, _Group] = {}
        self._pending: list[News] = []
        self._last_s: dict[
            tuple[int, bool], float
        ] = {}  # last arrival to or from a device: messages do not overtake each other
        self._draws = None if self._world.seed is None else random.Random(self._world.seed)
        self.commands: list[tuple[float, int, Any]] = []
        self.taken_s: dict[int, float] = {}
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
        news, self._pending = self._pending, []
        return news

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
                self._agenda.at(
                    self.now_s() + self._some(self._world.notice_s), lambda: self._pending.append(News(rank, "died"))
                )

    def _end_process(self, rank: int) -> bool:
        process = self._processes[rank]
        self._break_off(rank, self._world.notice_s)
        self._processes[rank] = _Process(life=process.life + 1, is_alive=False)
        self._heats[rank] = Heat(self._curves[rank])
        self._work.ended(rank)
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

    def _tell_all(self, rank: int, events: Iterable[Any]) -> None:
        for event in events:
            self._tell(rank, event)

    def _after(self, rank: int, seconds: float, action: Callable[[], None]) -> None:
        """Run an action for a process after a delay, if the process still exists."""
        self._at(rank, self.now_s() + self._some(seconds), action)

    def _at(self, rank: int, time_s: float, action: Callable[[], None]) -> None:
        """Run an action for a process at a time, if the process still exists."""
        life = self._processes[rank].life

        def act() -> None:
            process = self._processes[rank]
            if process.life == life and process.is_alive and not process.is_frozen:
                action()

        self._agenda.at(time_s, act)

    def _take(self, rank: int, message: Any, life: int) -> None:
        process = self._processes[rank]
        if process.life != life or not process.has_job or process.is_frozen:
            return
        match message:
            case c.Train():
                self._join(rank, message)
            case c.Pause() if process.train is not None and process.train.generation == message.generation:
                group = self._groups[message.generation]
                group.pauses = True
                if group.waits:
                    self._end_group(group, "paused")
            case c.Abort() if process.train is not None and process.train.generation == message.generation:
                self._give_up(rank, process.train)
            case c.Slow() if message.to:
                self.slow_links[rank, message.to] = message.factor
            case c.Slow():
                self._slow_down(rank, message.factor)
            case c.Probe():
                self._heats[rank].advance(self.now_s())
                slowness = self._work.slowness(rank, self._factor(rank))
                self._after(rank, slowness * self._world.probe_s, partial(self._tell, rank, c.Probed(slowness)))
            case c.Prepare():
                seconds, events = self._work.prepare(message.job, message.place)
                self._after(rank, seconds, partial(self._tell_all, rank, (*events, c.Prepared())))
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
            self._agenda.at(self.now_s() + self._some(self._world.join_s), partial(self._begin_work, group))
        else:  # the other members may never come
            self._after(rank, train.job.timeout_s, partial(self._give_up, rank, train, group))

    def _begin_work(self, group: _Group) -> None:
        if self._is_whole(group):
            seconds, events = self._work.begin(group.train.job, self.now_s())
            self._agenda.at(self.now_s() + seconds, partial(self._begin_first, group, group.ticket, events))

    def _begin_first(self, group: _Group, ticket: int, events: Iterable[tuple[int, Any]]) -> None:
        if ticket == group.ticket and self._is_whole(group):
            for place, event in events:
                self._tell(group.train.members[place], event)
            self._begin_step(group, ticket)

    def _begin_step(self, group: _Group, ticket: int) -> None:
        if ticket != group.ticket or not self._is_whole(group):
            return
        due_s = self._work.due_s(group.train.job, group.step)
        group.waits = due_s > self.now_s()
        if group.waits:
            self._agenda.at(due_s, partial(self._begin_step, group, ticket))
            return
        group.is_busy, group.done, group.before_s = True, 0.0, 0.0
        group.begun_s = group.since_s = self.now_s()
        for rank in group.train.members:
            self._heats[rank].advance(self.now_s())
        self._report(group, 0.0)
        self._time_step(group)
        self._report_later(group, group.step)

    def _time_step(self, group: _Group) -> None:
        """Schedule the end of a group's step at its members' present speeds."""
        group.ticket += 1
        group.whole_s = self._work.seconds(group.train.job, group.step, self._factors(group))
        self._agenda.at(self.now_s() + (1 - group.done) * group.whole_s, partial(self._end_step, group, group.ticket))

    def _factors(self, group: _Group) -> dict[int, float]:
        return {place: self._factor(rank) for place, rank in enumerate(group.train.members)}

    def _factor(self, rank: int) -> float:
        """Return how many times slower than described a device is: by what was injected, and by its heat."""
        return self._processes[rank].factor / self._heats[rank].speed

    def _slow_down(self, rank: int, factor: float) -> None:
        """Change a device's speed, also during a step, whose remaining part then takes another time."""
        process = self._processes[rank]
        group = None if process.train is None else self._groups[process.train.generation]
        is_under_way = group is not None and group.is_busy and self._is_whole(group)
        if group is not None and is_under_way:
            self._advance(group)
        process.factor = factor
        if group is not None and is_under_way:
            self._time_step(group)

    def _advance(self, group: _Group) -> None:
        """Bring the finished part of a group's step up to now."""
        if self.now_s() > group.since_s:
            past_s = self.now_s() - group.since_s
            part, group.since_s, group.before_s = past_s / group.whole_s, self.now_s(), group.before_s + past_s
            self._report(group, min(1.0, group.done + part))

    def _report(self, group: _Group, done: float) -> None:
        before, group.done, factors = group.done, done, self._factors(group)
        for place, rank in enumerate(group.train.members):
            self._tell_all(rank, self._work.reports(group.train.job, place, group.step, before, done, factors))

    def _report_later(self, group: _Group, step: int) -> None:
        if self._world.report_s < group.whole_s:
            self._agenda.at(self.now_s() + self._world.report_s, partial(self._report_now, group, step, group.begun_s))

    def _report_now(self, group: _Group, step: int, begun_s: float) -> None:
        if group.is_busy and (group.step, group.begun_s) == (step, begun_s) and self._is_whole(group):
            self._advance(group)
            self._report_later(group, step)

    def _is_whole(self, group: _Group) -> bool:
        return all(self._is_at(rank, group.train) for rank in group.train.members)

    def _is_at(self, rank: int, train: c.Train) -> bool:
        process = self._processes[rank]
        return process.is_alive and not process.is_frozen and process.train is train

    def _end_step(self, group: _Group, ticket: int) -> None:
        if ticket != group.ticket or not self._is_whole(group):
            return
        job = group.train.job
        group.since_s, group.is_busy = self.now_s(), False
        self.taken_s[group.step] = group.before_s + (1 - group.done) * group.whole_s
        self._report(group, 1.0)
        for place, rank in enumerate(group.train.members):
            self._end_of_step(rank, group, place, self._processes[rank].factor)
        group.step += 1
        end: c.End | None = "finished" if group.step >= job.last_step else "paused" if group.pauses else None
        if end is None:
            self._begin_step(group, ticket)
        else:
            self._end_group(group, end)

    def _end_of_step(self, rank: int, group: _Group, place: int, factor: float) -> None:
        """Tell a member's end of a step, whose computing has heated it.  factor: the injected slowdown."""
        factor, job = factor / self._heats[rank].speed, group.train.job
        self._tell(rank, self._work.done(job, place, group.step, factor))
        self._heats[rank].advance(self.now_s(), self._work.heating_s(job, place, group.step, factor))

    def _end_group(self, group: _Group, end: c.End) -> None:
        group.waits = False
        for rank in group.train.members:
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
        if group.is_busy:
            self._end_operations(group)
        group.ticket += 1
        group.is_busy = group.waits = False
        for other in train.members:
            if other != rank and self._is_at(other, train):
                self._after(other, others_wait_s, partial(self._give_up, other, train))

    def _end_operations(self, group: _Group) -> None:
        """Let every member end the operation that it is doing."""
        now_s, factors = self.now_s(), self._factors(group)
        done = min(1.0, group.done + (now_s - group.since_s) / group.whole_s)
        for place, rank in enumerate(group.train.members):
            rest_s = self._work.until_free_s(group.train.job, place, group.step, done, factors)
            self._processes[rank].free_s = now_s + rest_s

    def _give_up(self, rank: int, train: c.Train, forming: _Group | None = None) -> None:
        """Make a member end its job because another does not answer.  forming: act only if that group has
        not formed.
        """
        process = self._processes[rank]
        if process.train is not train or (forming is not None and forming.joined == set(train.members)):
            return
        if process.free_s > self.now_s():
            self._at(rank, process.free_s, partial(self._give_up, rank, train))
            return
        group, stop = self._groups[train.generation], None
        self._break_off(rank, self._world.notice_s)  # the others lose their connection to this device
        has_begun = group.joined == set(train.members) and group.step < train.job.last_step
        if (
            has_begun and self._draws is not None and self._draws.random() < 0.2
        ):  # it already had all inputs of the step
            self._end_of_step(rank, group, train.members.index(rank), 1.0)
            stop = group.step + 1
        self._end_job(rank, train, "lost", group.step if stop is None else stop)
