"""The portal's decisions: which devices to exclude or readmit, and which plan should serve (Galaxy+, section III-E).

A straggler is repeatedly slower than the others in the same work, by its reports during computation (III-E1).
The module is pure: it maps events and times to decisions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.serving.log import ServingLog
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings
from workbench.planners.pace import Pace

BlockSeconds = Mapping[int, Mapping[int, float]]
"""Seconds of computation by rank and block number (blocks are counted through the whole model)."""


def means(reports: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return each block's mean seconds over a device's reports of a period; a report may cover only some blocks."""
    seconds_of: dict[int, list[float]] = defaultdict(list)
    for report in reports:
        for block, seconds in report.items():
            seconds_of[block].append(seconds)
    return {block: sum(seconds) / len(seconds) for block, seconds in seconds_of.items()}


def compare(measured: BlockSeconds, expected: BlockSeconds) -> dict[int, float]:
    """Return each device's slowness: the median over its blocks.

    Each block's seconds are divided by the plan's expectation for the device, which makes unequal devices with unequal
    shares comparable, then by the median of that quotient over the other devices in the same block.  So a slowdown of
    all devices, or a shared error of the cost model, makes no straggler.  A single device gets 1.
    """
    quotients: dict[int, dict[int, float]] = defaultdict(dict)
    for rank, blocks in measured.items():
        for block, seconds in blocks.items():
            share = expected.get(rank, {}).get(block, 0.0)
            if share > 0:
                quotients[block][rank] = seconds / share
    relative: dict[int, list[float]] = {rank: [] for rank in measured}
    for by_rank in quotients.values():
        for rank, quotient in by_rank.items():
            others = [value for other, value in by_rank.items() if other != rank]
            if others and median(others) > 0:
                relative[rank].append(quotient / median(others))
    # The lower one of two middle values is above a factor only if most blocks are.
    return {rank: median_low(values) if values else 1.0 for rank, values in relative.items()}


Planner = Callable[[tuple[int, ...]], InferencePlan]
"""(ranks that may take part) -> plan.  Raises PlanError if none fits."""


class RequestTimes(NamedTuple):
    """A runtime.commands.Predictor: every request takes a plan's predicted seconds."""

    request_s: float
    num_steps: int

    def seconds(self, step: int) -> float:
        """Return the seconds of a request."""
        return self.request_s

    def longest_s(self) -> float:
        """Return the seconds of any request."""
        return self.request_s

    def busy_s(self, step: int, place: int) -> float:
        """Return 0, because devices are compared block by block instead."""
        return 0.0


class BlockTimes(NamedTuple):
    """The cost of one request.

    seconds: time from its arrival at the first device to its answer.  blocks: seconds of computation by rank and block.
    """

    seconds: float
    blocks: BlockSeconds


Times = Callable[[InferencePlan, Mapping[int, float]], BlockTimes]
"""(plan, slow-downs by rank) -> the cost of a request."""


@dataclass(slots=True)
class Candidate:
    """A device that plans may use.

    is_alive: whether its process answers.  is_in: whether plans use it.  wait_s: time between its probes.
    """

    is_alive: bool = True
    is_in: bool = True
    wait_s: float = 0.0
    next_probe_s: float = math.inf
    good_probes: int = 0
    taken_back_s: float = -math.inf
    is_reported: bool = False
    is_kept: bool = False


@dataclass(slots=True)
class Rescheduler:
    """Decides which plan serves.  Raises PlanError if no plan fits all devices.

    pace: pace of the devices, relative to each other.  current: index of the serving plan, -1 if none can serve (since
    one of its devices was lost).  wanted: index of the plan that should serve, -1 while none fits.
    """

    settings: ReschedulingSettings
    world_size: InitVar[int]
    planner: Planner
    times: Times
    log: ServingLog
    candidates: list[Candidate] = field(init=False)
    pace: Pace = field(init=False)
    wanted: int = field(init=False)
    current: int = field(init=False, default=-1)

    def __post_init__(self, world_size: int) -> None:
        self.candidates = [Candidate(wait_s=self.settings.probe_every_s) for _ in range(world_size)]
        self.pace = Pace(
            window=self.settings.window, repeats=self.settings.repeats, threshold=self.settings.slow_factor
        )
        self.wanted = self.log.plan(self.planner(tuple(range(world_size))))

    @property
    def plan(self) -> InferencePlan | None:
        """Return the serving plan."""
        return self.log.plans[self.current] if self.current >= 0 else None

    @property
    def alive(self) -> tuple[int, ...]:
        """Return the ranks whose processes answer."""
        return tuple(rank for rank, device in enumerate(self.candidates) if device.is_alive)

    def switched(self, now_s: float, plan: int) -> None:
        """Record that requests are served under a plan from now on; the coordinator has discarded what was observed
        under the last one.
        """
        self.log.add(now_s, "switched", before=self.current, after=plan)
        self.current = plan

    def paused(self, now_s: float) -> None:
        """Record that nothing is served until the wanted plan is loaded."""
        self.log.add(now_s, "paused", before=self.current, after=self.wanted)
        self.current = -1

    def report(self, now_s: float, plan: int, measured: BlockSeconds) -> None:
        """Process the devices' reports of the last period, and decide.  Reports under a plan other than the current one
        are ignored.
        """
        if plan != self.current or plan < 0:
            return
        # While another plan is loading, the old plan's stragglers are known already, but perhaps not all of them.
        expected = self.times(self.log.plans[plan], {}).blocks
        for rank, slowness in compare(measured, expected).items():
            self.pace.observe(rank, slowness, 1.0)
        for rank, slowness in sorted(self.pace.changed().items(), key=lambda changed: -changed[1]):
            if self.candidates[rank].is_in and self.candidates[rank].is_alive:
                self._straggles(now_s, rank, slowness)
        repeats = self.settings.repeats
        for rank, device in enumerate(self.candidates):
            lately = self.pace.lately(rank)[-repeats:]
            if device.is_reported and len(lately) == repeats and max(lately) <= self.settings.recovered_factor:
                device.is_reported = device.is_kept = False

    def due_probes(self, now_s: float) -> tuple[int, ...]:
        """Return the excluded devices that should be probed now; each is returned once per wait."""
        due = []
        for rank, device in enumerate(self.candidates):
            if device.is_alive and not device.is_in and device.next_probe_s <= now_s:
                device.next_probe_s = math.inf  # until the result arrives
                due.append(rank)
        return tuple(due)

    def probed(self, now_s: float, rank: int, slowness: float) -> None:
        """Process the result of a probe: measured seconds over the expected seconds at the device's full speed."""
        device = self.candidates[rank]
        if not device.is_alive or device.is_in:
            return
        self.log.add(now_s, "probed", rank, value=slowness)
        device.next_probe_s = now_s + device.wait_s
        device.good_probes = device.good_probes + 1 if slowness <= self.settings.recovered_factor else 0
        if device.good_probes >= self.settings.good_probes:
            self.log.add(now_s, "recovered", rank, value=slowness)
            self._take_back(now_s, rank)

    def lost(self, now_s: float, rank: int) -> None:
        """Record that a device's process has ended or stopped answering."""
        device = self.candidates[rank]
        if not device.is_alive:
            return
        device.is_alive = device.is_in = False
        self._back_off(now_s, device)
        self.log.add(now_s, "lost", rank, before=self.current)
        if self.plan is not None and rank in self.plan.ranks:
            self.current = -1  # if it comes back, its weights are gone
        self._plan_again(now_s)

    def revived(self, now_s: float, rank: int) -> None:
        """Record that a lost device's process runs again: it is probed before it is readmitted, unless no plan fits
        without it.
        """
        device = self.candidates[rank]
        if device.is_alive:
            return
        device.is_alive = True
        device.good_probes = 0
        device.next_probe_s = now_s
        if self.wanted < 0:
            self._take_back(now_s, rank)

    def _straggles(self, now_s: float, rank: int, slowness: float) -> None:
        device = self.candidates[rank]
        if not device.is_reported:
            self.log.add(now_s, "straggler", rank, before=self.current, value=slowness)
            device.is_reported = True
        if self.settings.reaction == "none" or self.current != self.wanted:
            return
        try:
            plan = self.planner(tuple(other for other in self._usable() if other != rank))
        except PlanError:  # the others cannot replace it
            self._keep(now_s, rank, slowness)
            self.pace.accept({})  # checked again after as many reports
            return
        device.is_in = False
        self._back_off(now_s, device)
        self.log.add(now_s, "excluded", rank, before=self.current, value=slowness)
        self._want(now_s, plan)

    def _keep(self, now_s: float, rank: int, slowness: float) -> None:
        if not self.candidates[rank].is_kept:
            self.candidates[rank].is_kept = True
            self.log.add(now_s, "kept", rank, before=self.current, value=slowness)

    def _take_back(self, now_s: float, rank: int) -> None:
        device = self.candidates[rank]
        device.is_in, device.good_probes, device.is_reported = True, 0, False
        device.next_probe_s, device.taken_back_s, device.is_kept = math.inf, now_s, False
        self._plan_again(now_s)
        self.log.add(now_s, "readmitted", rank, before=self.current, after=self.wanted)

    def _back_off(self, now_s: float, device: Candidate) -> None:
        settings = self.settings
        again = now_s - device.taken_back_s < settings.calm_s
        device.wait_s = (
            min(device.wait_s * settings.back_off, settings.longest_probe_s) if again else settings.probe_every_s
        )
        device.next_probe_s = now_s + device.wait_s
        device.good_probes = 0

    def _plan_again(self, now_s: float) -> None:
        """Plan for the admitted devices; if they are too few, for all that are alive, including stragglers."""
        for ranks in (self._usable(), self.alive):
            if ranks:
                try:
                    self._want(now_s, self.planner(ranks))
                except PlanError:
                    continue
                for rank in ranks:
                    if not self.candidates[rank].is_in:
                        self.candidates[rank].is_in = True
                        self._keep(now_s, rank, 0.0)
                return
        self.wanted = -1
        self.log.add(now_s, "waiting", before=self.current)

    def _want(self, now_s: float, plan: InferencePlan) -> None:
        before, self.wanted = self.wanted, self.log.plan(plan)
        if self.wanted != before:
            self.log.add(now_s, "planned", before=self.current, after=self.wanted, value=plan.predicted_s)

    def _usable(self) -> tuple[int, ...]:
        return tuple(rank for rank, device in enumerate(self.candidates) if device.is_alive and device.is_in)
