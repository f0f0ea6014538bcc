"""Coordinate a run on devices that may die, leave, return or change their speed: assign the steps, and re-plan after
each change.

Between two changes, in one generation, the devices work without the coordinator.  A generation ends when its work is
done, when its members pause together, or when one of them is lost.  The method's Policy decides what the next
generation does and what it repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from workbench.core.device_faults import WITH_FACTOR, Fault
from workbench.core.errors import DeviceLostError, PlanError
from workbench.core.report import Recovery
from workbench.planners.pace import Pace
from workbench.runtime.commands import (
    Abort,
    Ended,
    Generation,
    Pause,
    Policy,
    Prepare,
    Prepared,
    Probe,
    Probed,
    StepDone,
    Stop,
    Train,
)
from workbench.runtime.fleet import DeviceNotice, Fleet
from workbench.runtime.recoveries import PLANNING, Recoveries

PROBE_EVERY = 4
"""Number of steps between two probes of an idle device that was found slow."""

LEAST_SHARE = 0.05
"""Smaller changes of the share of a device's memory that is left to the run are ignored."""

_TICK_S = 0.02


@dataclass(kw_only=True)
class Coordinator:
    """Coordinates one run; cannot be reused.

    say: receives messages for the user.  show: receives lost, leaving and returning devices.

    adapts: whether to react to changes in speed.  turn: called in every loop iteration; returns whether the run
    continues.  After that the policy may ask for another plan.  injected: receives each fault when it begins (True) or
    ends.  clock: returns the time in seconds that decides when a fault is due; None: the time since all devices were
    ready.
    """

    fleet: Fleet
    policy: Policy
    say: Callable[[str], None]
    show: Callable[[int, str], None] = lambda rank, state: None
    adapts: bool = False
    turn: Callable[[], bool] | None = None
    injected: Callable[[Fault, bool], None] = lambda fault, begins: None
    clock: Callable[[], float] | None = None
    pace: Pace = field(default_factory=Pace)

    _changes: Recoveries = field(init=False)
    _generation: Generation | None = None
    _number: int = 0
    _ended: dict[int, Ended] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)
    _preparing: set[int] = field(default_factory=set)
    _planned: Generation | None = None  # its members prepare for it while the present generation works
    _unprepared: set[int] = field(default_factory=set)  # the members that are not prepared yet
    _pausing: bool = False
    _planned_with: dict[Any, float] = field(default_factory=dict)
    _sent: dict[tuple[int, str, str], float] = field(
        default_factory=dict
    )  # one end's time of messages whose other end is not known yet
    _deadline_s: float | None = None
    _probed_at: int = 0
    _begin_s: float = 0.0
    _last_step_s: float = 0.0
    _last_step: int = -1
    _fruitless: int = 0
    _why: str = ""  # the last reason why a device could not join the others

    def __post_init__(self) -> None:
        self._changes = Recoveries(now_s=self.fleet.now_s)

    def run(self) -> None:
        """Run all remaining steps.

        Raises DeviceLostError if the remaining devices cannot continue, and re-raises a device's own error.
        """
        if self.policy.step >= self.policy.num_steps:
            return
        try:
            self._run()
            if late := self.fleet.faults.not_begun():
                more = f" (and {len(late) - 1} more)" * (len(late) > 1)
                where = self.fleet.name(late[0].rank)
                self.say(f"The fault '{late[0].kind}' of {where} {late[0].when}{more} never began")
        finally:
            if self._generation is not None:
                self.fleet.command(self._generation.members, Abort(self._generation.number))
            self.fleet.stop()

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Return the costs of all device changes after which a step was completed."""
        return self._changes.costs

    @property
    def passed_s(self) -> float:
        """Return the seconds since all devices were ready."""
        return self.fleet.now_s() - self._begin_s

    def _run(self) -> None:
        policy, fleet = self.policy, self.fleet
        fleet.start()
        while fleet.awaited:
            self._take_news(0.05)
        self._begin_s = fleet.now_s()
        while policy.step < policy.num_steps or self._generation is not None:
            if self._generation is None:
                self._begin()
            # The clock of virtual devices advances only here, so a fault is injected at its time.
            self._take_news(max(1e-6, min(_TICK_S, fleet.faults.next_s - self._seconds())))
            for fault, begins in fleet.inject(self._seconds(), policy.step):
                self._injected(fault, begins)
            for rank, reason in fleet.departures(self._seconds()):
                self.say(f"{fleet.name(rank)} gives notice: {reason}")
                self._changed("leave", rank)
            fleet.listen()
            self._look_after()
            if self.turn is not None:
                if not self.turn():
                    return
                self._follow_policy()

    def _seconds(self) -> float:
        return self.passed_s if self.clock is None else self.clock()

    # News.

    def _take_news(self, timeout_s: float) -> None:
        for news in self.fleet.news(timeout_s):
            self._take(news)

    def _take(self, news: DeviceNotice) -> None:
        rank, generation = news.rank, self._generation
        match news.what:
            case "said":
                self._hear(rank, news.content)
            case "back":
                self.say(f"{self.fleet.name(rank)} has come back after {self.policy.step} steps")
                self.show(rank, "back")
                self._welcome(rank)
            case "leaving":
                self.say(f"{self.fleet.name(rank)} leaves, in step {self.policy.step + 1}")
                self.show(rank, "leaving")
                self._preparing.discard(rank)
                self._noticed("leave", rank)
                if generation is not None and rank in generation.members:
                    self._plan_ahead()
                else:
                    self.fleet.command((rank,), Stop())
            case "lost":
                self._lose(rank)

    def _hear(self, rank: int, content: Any) -> None:
        generation = self._generation
        match content:
            case StepDone() if content.step >= self.policy.num_steps:
                self.fleet.end(rank, f"it reports step {content.step + 1} of {self.policy.num_steps}")
            case StepDone():
                if generation is not None and rank in generation.members:
                    self._stepped(generation, rank, content)
            case Ended():
                if generation is not None and generation.number == content.generation:
                    self._ended[rank] = content
                    self._why = content.why or self._why
                    if content.end == "lost":  # the others may wait for it at a meeting, where they do not notice
                        self._break_off(generation)
                    self._close_generation()
            case Probed() if self.adapts:
                self.pace.observe(rank, content.slowness, 1.0)
            case Prepared():
                if rank in self._preparing:
                    self._preparing.discard(rank)
                    self._noticed("return", rank)
                    self._pause()
                elif rank in self._unprepared:
                    self._unprepared.discard(rank)
                    if not self._unprepared:
                        self._pause()
            case _:
                if generation is not None and rank in generation.members and isinstance(content, dict):
                    self._begins_with(content)
                self.policy.heard(generation, rank, content)

    def _begins_with(self, progress: Mapping[str, Any]) -> None:
        """Record what a device does before its first step (see Progress)."""
        if "phase" in progress and "step" not in progress:
            self._changes.entered(progress["phase"], by_device=True)

    def _stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        place, now_s = generation.members.index(rank), self.fleet.now_s()
        self._changes.resumed(generation, done.step, now_s)
        self._last_step, self._last_step_s = done.step, now_s
        self.fleet.worked(rank, done.busy_s)
        self.policy.stepped(generation, rank, done)
        if self.policy.has_converged:
            self._pause()
        if done.busy_s:
            expected_s = generation.predictor.busy_s(done.step, place) / self._planned_with.get(rank, 1.0)
            self.pace.observe(rank, done.busy_s, expected_s)
        fastest: dict[str, tuple[float, float]] = {}
        for pair, value, time_s, described_s in done.transfers:
            other_s = self._sent.pop((done.step, pair, value), None)
            if other_s is None:
                self._sent[done.step, pair, value] = time_s
            else:  # others may have waited for each other
                timing = abs(time_s - other_s), described_s
                fastest[pair] = min(fastest.get(pair, timing), timing, key=lambda timing: timing[0] / timing[1])
        for pair, (took_s, described_s) in fastest.items():
            self.pace.observe(pair, took_s, described_s)

    def _lose(self, rank: int) -> None:
        generation = self._generation
        self._preparing.discard(rank)
        self.show(rank, "lost")
        if rank in self._unprepared:
            self._plan_ahead()
        if generation is not None and rank not in generation.members:
            return
        for kind in ("kill", "freeze", "leave"):
            self._noticed(kind, rank)
        self.say(
            f"{self.fleet.name(rank)} is lost, in step "
            f"{min(self.policy.step + 1, self.policy.num_steps)}{self.fleet.why(rank)}"
        )
        if generation is None or rank in self._ended:  # between two generations: the next one does not use the device
            return
        self._lost.add(rank)
        self._break_off(generation)
        self._close_generation()
        if self._generation is not None and self._ready:
            with suppress(PlanError):
                self.policy.plan_ahead(self._number + 1, self._ready, self.pace.factors)

    def _welcome(self, rank: int) -> None:
        """Let a returned device prepare while the others work; then they pause, and it joins."""
        if self._generation is None:
            self._noticed("return", rank)
            return
        try:
            planned = self._next_generation(self._ready)
        except PlanError:
            return
        if rank in planned.members:
            self._preparing.add(rank)
            self._prepare(planned, rank)

    def _prepare(self, planned: Generation, rank: int) -> None:
        place = planned.members.index(rank)
        self.fleet.command((rank,), Prepare(self.policy.part(planned, place), place))

    # Generations.

    @property
    def _ready(self) -> tuple[int, ...]:
        return tuple(sorted(self.fleet.ready - self._preparing))

    def _begin(self) -> None:
        """Begin a generation on the ready devices.  Wait instead if a required device may still come."""
        request = f"Step {self.policy.step + 1} was to be done"
        ready = self._ready
        if not ready:
            if self._awaits_some():
                return
            raise DeviceLostError(
                f"{request}.",
                f"No device is left: {self.fleet.losses}.",
                "Run with --resume to continue from the last snapshot.",
            )
        try:
            generation = self._next_generation(ready)
        except PlanError as error:
            if self._awaits_some():
                return
            lost = self.fleet.absent
            raise DeviceLostError(
                f"{request} without {lost}." if lost else "Another setting was to be taken.",
                f"{error.asked} {error.found}",
                "Bring the device back and run with --resume, or resume on other devices.",
            ) from error
        self._require_progress()
        self._number += 1
        generation = self.policy.begun(generation)
        self._generation, self._ended, self._lost = generation, {}, set()
        self._pausing, self._deadline_s = False, None
        self._planned, self._unprepared = None, set()
        self._planned_with, self._sent = dict(self.pace.factors), {}
        self.pace.accept({})
        self._changes.begun(self.policy.step, self._last_step_s)
        if self._number > 1:
            names = [self.fleet.name(rank) for rank in generation.members]
            self.say(f"From step {self.policy.step + 1} on: {generation.plan.at(self.policy.step).described(names)}")
        self._last_step = -1
        for place, rank in enumerate(generation.members):
            self.fleet.command(
                (rank,), Train(generation.number, generation.members, self.policy.part(generation, place))
            )

    def _require_progress(self) -> None:
        """Raise DeviceLostError if several generations in a row ended without a completed step and without a lost
        device.
        """
        self._fruitless = (
            self._fruitless + 1 if self._number and self._last_step < 0 and not self._lost and not self._pausing else 0
        )
        if self._fruitless > 2:
            raise DeviceLostError(
                f"Step {self.policy.step + 1} was to be done.",
                f"The devices tried three times and did not come together. {self._why}".rstrip(),
                "See whether the machine is very busy; run with --resume.",
            )

    def _awaits_some(self) -> bool:
        return bool(self.fleet.awaited or self._preparing) or self.fleet.awaits_return()

    def _close_generation(self) -> None:
        """Close the generation once every surviving member has reported its end: the policy then decides which steps
        are completed.
        """
        generation = self._generation
        if generation is None or any(rank not in self._ended and rank not in self._lost for rank in generation.members):
            return
        self._generation = None
        self._changes.entered(PLANNING)
        self.policy.ended(generation, dict(self._ended), frozenset(self._lost))
        self.fleet.command(tuple(self.fleet.leaving), Stop())

    def _pause(self) -> None:
        if self._generation is not None and not self._pausing:
            self._pausing = True
            self.fleet.command(self._generation.members, Pause(self._generation.number, self.policy.step + 1))

    def _follow_policy(self) -> None:
        """Start the generation that the policy now wants, once its members are prepared."""
        ready, factors = self._ready, self.pace.factors
        if self._generation is None or self._pausing:
            return
        if not self.policy.differs(self._generation, ready, factors):
            self._planned, self._unprepared = None, set()
        elif self._planned is None or self.policy.differs(self._planned, ready, factors):
            with suppress(PlanError):
                self._make_ready(self._next_generation(ready))

    def _plan_ahead(self) -> None:
        """Prepare the generation without the leaving devices while the present one works, if the policy allows it; then
        pause.
        """
        self._planned, self._unprepared = None, set()
        try:
            self._make_ready(self._next_generation(self._ready))
        except PlanError:
            self._pause()

    def _make_ready(self, planned: Generation) -> None:
        self._planned, self._unprepared = planned, set(planned.prepares)
        for rank in planned.prepares:
            self._prepare(planned, rank)
        if not planned.prepares:
            self._pause()

    def _break_off(self, generation: Generation) -> None:
        """Let the members of a generation end, and wait for them for a while."""
        self.fleet.command(generation.members, Abort(generation.number))
        if self._deadline_s is None:
            self._deadline_s = self.fleet.now_s() + generation.timeout_s

    # Actions that the coordinator starts itself.

    def _injected(self, fault: Fault, begins: bool) -> None:
        self.injected(fault, begins)
        kind = fault.kind if begins else "restore" if fault.kind in WITH_FACTOR else "return"
        part = self.fleet.rank_or_pair(fault)
        self.say(
            f"Fault: {kind} {self._name(part)}"
            + (f", {fault.factor:g} times" if begins and fault.kind in WITH_FACTOR else "")
        )
        self._changed(kind, part)

    def _name(self, part: int | str) -> str:
        return part if isinstance(part, str) else self.fleet.name(part)

    def _next_generation(self, ready: tuple[int, ...]) -> Generation:
        """Return the generation that the policy plans for the devices as they are now.  Raises PlanError."""
        if not ready:
            raise PlanError("Devices were to go on.", "None is ready.", "Bring one back.")
        now = self._generation
        busy = () if now is None else [now.members[place] for place in now.plan.busy_ranks]
        self.policy.charged(self.fleet.charges(self._seconds(), busy))
        return self.policy.generation(self._number + 1, ready, self.pace.factors)

    def _changed(self, kind: str, part: int | str) -> None:
        self._changes.changed(f"{kind} {self._name(part)}", self.policy.step)

    def _look_after(self) -> None:
        """React to devices that changed their speed or memory, and end silent devices that others wait for."""
        generation, now_s = self._generation, self.fleet.now_s()
        if generation is None:
            return
        if self._deadline_s is not None and now_s > self._deadline_s:
            self._deadline_s = None
            for rank in generation.members:
                if rank not in self._ended and rank not in self._lost:
                    self.fleet.end(rank, "the others waited for it without success")
        if not self.adapts or self._pausing:
            return
        self._probe(generation)
        changed, factors = self.pace.changed(), self.pace.factors
        shares = {
            name: share
            for name, share in self.fleet.memory_shares().items()
            if abs(share - factors.get(name, 1.0)) > LEAST_SHARE
        }
        if not changed and not shares:
            return
        self.pace.accept(changed | shares)
        if changed:
            paces = ", ".join(f"{self._name(rank)} {factor:.1f} times" for rank, factor in changed.items())
            self.say(f"Pace changed, over the profile's seconds: {paces}")
        for name, share in shares.items():
            self.say(f"{name} has {share:.0%} of its memory for the run")
        try:
            differs = self.policy.differs(generation, self._ready, factors)
        except PlanError as error:
            self.say(f"The devices continue as they are. {error.asked} {error.found}".rstrip("."))
            return
        if differs:
            for kind, part in (*product(("slow", "restore"), changed), *product(("memory", "restore"), shares)):
                self._noticed(kind, part)
            self._pause()

    def _probe(self, generation: Generation) -> None:
        if self.policy.step >= self._probed_at + PROBE_EVERY:
            self._probed_at = self.policy.step
            idle = self.fleet.ready - set(generation.members)
            self.fleet.command([rank for rank in idle if self.pace.factors.get(rank, 1.0) > 1], Probe())

    def _noticed(self, kind: str, part: int | str) -> None:
        self._changes.noticed(f"{kind} {self._name(part)}", self.policy.step)
