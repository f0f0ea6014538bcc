"""The work of virtual devices, and the overheads of their world in seconds."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.core.cluster import Factors
from workbench.runtime import commands as c

PREPARE_S = 0.2
"""Seconds in which a device usually loads the data of a job."""


class Agenda:
    """A queue of actions in virtual time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

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
    """A method's work on virtual devices.  Jobs have first_step, last_step (exclusive) and timeout_s.

    factors: how many times slower than described the members are at present, their heat included.
    """

    def seconds(self, job: Any, step: int, factors: Factors) -> float:
        """Return the seconds of a whole step at these speeds.  If a speed changes during a step, the rest of the step
        takes its share at the new speed.
        """

    def until_free_s(self, job: Any, place: int, step: int, done: float, factors: Factors) -> float:
        """Return the seconds until a member ends the operation that it is doing when a part of a step is done.  It
        gives up a step only then.
        """
        return 0.0

    def done(self, job: Any, place: int, step: int, factor: float) -> c.StepDone:
        """Return the event that a member publishes after a step."""

    def heating_s(self, job: Any, place: int, step: int, factor: float) -> float:
        """Return for how many seconds of a step a member computes, and gets hot."""
        return 0.0

    def part(self, job: Any, place: int, end: c.End, stop: int) -> Any:
        """Return a member's part of a job that it ended before step `stop`, or during that step if another device was
        lost.
        """

    def prepare(self, job: Any, place: int) -> tuple[float, Iterable[Any]]:
        """Return the seconds in which a member prepares for a job during other work, and the events that it publishes
        then.
        """
        return PREPARE_S, ()

    def begin(self, job: Any, now_s: float) -> tuple[float, Iterable[tuple[int, Any]]]:
        """Return the seconds from the moment when all members have joined until the first step, and the members' events
        then.
        """
        return 0.0, ()

    def due_s(self, job: Any, step: int) -> float:
        """Return the earliest time at which a step begins.  Until then its members may pause."""
        return 0.0

    def reports(self, job: Any, place: int, step: int, before: float, after: float, factors: Factors) -> Iterable[Any]:
        """Return the events of a member during a step, of the part from `before` to `after` (0 and 0 at its begin, 1 at
        its end).
        """
        return ()

    def slowness(self, rank: int, factor: float) -> float:
        """Return the slowdown that a probe measures on a device.  factor: its present one."""
        return factor

    def ended(self, rank: int) -> None:
        """Forget the state of a device, because its process has ended."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorld:
    """The overheads of virtual devices outside computing, in seconds.

    start_s: from the start of a process until it accepts commands.  restart_s: to start a new process.  notice_s: until
    the end of a process is noticed.  join_s: to form a group.  probe_s: to carry out a probe.  message_s:
    maximum for a message.
    report_s: between two reports of a device during a step.
    seed: random seed of the durations, and of which members have completed the step in which a device is lost.  None:
    every duration is its maximum, and no member has completed that step.
    """

    start_s: float = 0.5
    restart_s: float = 2.0
    notice_s: float = 0.05
    join_s: float = 0.05
    probe_s: float = 0.05
    message_s: float = 0.001
    report_s: float = math.inf
    seed: int | None = None


EMULATED = VirtualWorld(restart_s=0.1, start_s=0.4)
"""The overheads of emulated devices, whose processes are forked from one that has imported the libraries (Linux).

The others are those of devices over SSH.
"""
