"""The policy for device changes in a training run: the others continue under a new plan, with the state in the run's folder."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from operator import mul
from statistics import fmean
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.plan import Homes, Plan, held_by, whole_steps
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.report import Recovery
from workbench.core.schedule import RECV, SEND
from workbench.core.timeline import Span
from workbench.methods.base import SILENT_AFTER_STEPS, Event, Notify
from workbench.methods.common.records import Progress, show_device
from workbench.methods.common.session import RankResult
from workbench.methods.training.backups import repartition_s, substitution
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.interrupted import Interrupted, take_up
from workbench.methods.training.phases import Predictor, RankJob
from workbench.planners.adaptive import Pace
from workbench.runtime.commands import Generation, Parts, Policy, StepDone
from workbench.runtime.context import RankContext
from workbench.runtime.coordinator import Coordinator
from workbench.runtime.devices import Devices, EngineDevices, Lender, fleet_of

DRAWN = 8
"""Number of sampled steps that represent the remaining ones when another partition is considered."""


REAL_REGROUP_S = 1.0
"""Seconds in which real devices form another group (measured: 1.3 to 1.6 s with the end of a step, on a busy machine)."""
LEAST_FALL = 0.01
"""The fraction by which a loss must fall to count as lower."""
REAL_PACE_S = 2.0
"""Seconds of computing over which a real device's pace is judged: its steps also vary by what else the device does."""


def plateaus(values: Sequence[float], patience: int, threshold: float = LEAST_FALL) -> list[int]:
    """Return after how many values each plateau ends: `patience` in a row are not `threshold` below the lowest since the last plateau."""
    found, lowest, waited = list[int](), math.inf, 0
    for count, value in enumerate(values, start=1):
        lowest, waited = (value, 0) if value < lowest * (1 - threshold) else (lowest, waited + 1)
        if waited == patience:
            found, lowest, waited = [*found, count], math.inf, 0
    return found


class Replanned(NamedTuple):
    """job: makes the job of some devices, by rank, with their measured slowdown, under a new plan or a given one, which
    numbers them by their places.  Raises PlanError.

    stand_in: returns the idle device that takes over the part of one that leaves on notice, or None: (plan of the whole cluster,
    rank, idle devices, fraction of the run that is left, from 1 to 0).
    """

    job: Callable[..., RankJob]
    stand_in: Callable[[Plan, int, Sequence[int], float], int | None]


class Timetable:
    """A run's steps, numbered from 0 through all phases and epochs, with each step's expected time under the plan."""

    def __init__(self, rank_job: RankJob, profile: Profile | None = None) -> None:
        """profile: the devices' current costs; None: those in the job."""
        self._cluster = rank_job.cluster
        self._phases = (rank_job if profile is None else replace(rank_job, profile=profile)).phases()
        self._predictors = [Predictor(phase) for phase in self._phases]
        self._steps = lru_cache(maxsize=4)(lambda phase, epoch: self._phases[phase].steps(epoch))
        counts = [len(self._steps(number, phase.epochs.start)) for number, phase in enumerate(self._phases) for _ in phase.epochs]
        self._begins = (0, *accumulate(counts))
        self._busy_s = lru_cache(maxsize=None)(self._find_busy_s)

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self._begins[-1]

    def number(self, epoch: int, step: int) -> int:
        """Return the number of an epoch's step; the step after an epoch's last is the next epoch's first."""
        return self._begins[epoch] + step

    def epoch_of(self, number: int) -> tuple[int, int]:
        """Return the epoch and step of a number."""
        epoch = bisect_right(self._begins, number) - 1
        return epoch, number - self._begins[epoch]

    def is_cached(self, epoch: int) -> bool:
        """Return whether an epoch runs from an activation cache."""
        return any(phase.cached and epoch in phase.epochs for phase in self._phases)

    def seconds(self, step: int) -> float:
        """Return the seconds of a step."""
        phase, planned = self._at(step)
        return self._predictors[phase].seconds(planned)

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds of a step during which a device computes."""
        return self._busy_s(step, place)

    def rest_s(self, step: int) -> float:
        """Return the approximate seconds of all steps from a number on: their count times the mean of an even sample."""
        left = range(step, self.num_steps)
        return len(left) * fmean(map(self.seconds, left[:: -(-len(left) // DRAWN)])) if left else 0.0

    def longest_s(self) -> float:
        """Return the approximate seconds of the longest step: in each phase, the one with most tokens in the first epoch."""
        found_s = 0.0
        for number, phase in enumerate(self._phases):
            if phase.epochs:
                steps = self._steps(number, phase.epochs.start)
                longest = max(steps, key=lambda step: sum(map(mul, step.shape.sizes, step.shape.lengths)))
                found_s = max(found_s, self._predictors[number].seconds(longest))
        return found_s

    def _at(self, step: int) -> tuple[int, PlannedStep]:
        epoch, at = self.epoch_of(step)
        phase = next(number for number, phase in enumerate(self._phases) if epoch in phase.epochs)
        return phase, self._steps(phase, epoch)[at]

    def messages(self, step: int, place: int) -> list[Span]:
        """Return a device's ends of a step's messages, as if each had the link for itself from second 0 on."""
        program = self._program(step)
        ends = [
            (op, program.costs.spec((op.reads or op.writes)[0]).nbytes) for op in program.schedule.ops[place] if op.kind in (SEND, RECV)
        ]
        return [Span(place, op, 0.0, self._cluster.link(*op.ranks).transfer_s(nbytes), nbytes) for op, nbytes in ends]

    def _program(self, step: int) -> Program:
        phase, planned = self._at(step)
        return self._phases[phase].program(planned.shape)

    def _find_busy_s(self, step: int, place: int) -> float:
        program = self._program(step)
        return sum(program.seconds(place, index) for index, op in enumerate(program.schedule.ops[place]) if not op.is_communication)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A generation that has begun: its devices, its job, and the results of those before it."""

    members: tuple[int, ...]
    job: RankJob
    former: Interrupted


class ToldPolicy(Policy):
    """A runtime.coordinator.Policy that notifies a user.  notes: all messages."""

    def __init__(self, notify: Notify) -> None:
        self.notify, self.notes = notify, list[str]()
        self._progress: Progress | None = None

    def say(self, text: str) -> None:
        """Notify the user."""
        self.notes.append(f"{text}.")
        self.notify(Event("note", message=text))

    def watch(self, generation: Generation) -> None:
        """Show the progress of a new generation."""
        members, notify = generation.members, self.notify
        self._progress = Progress(
            generation.plan, lambda event: notify(event._replace(rank=members[event.rank]) if event.rank >= 0 else event)
        )

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Forward a device's progress."""
        if generation is not None and rank in generation.members and self._progress is not None and isinstance(event, dict):
            self._progress(generation.members.index(rank), event)

    def run(self, devices: Devices, cluster: Cluster, job: Job, *, adapts: bool = True) -> tuple[Recovery, ...]:
        """Do the remaining steps on devices that may be lost, leave or come back; return the cost of such changes."""
        fleet, show = fleet_of(devices, cluster, job), partial(show_device, self.notify)
        self.notify(Event("faults", faults=fleet.faults))
        pace = Pace(least_s=REAL_PACE_S if cluster.is_real else 0.0)
        coordinator = Coordinator(fleet=fleet, policy=self, say=self.say, show=show, adapts=adapts, pace=pace)
        coordinator.run()
        for name, joules in fleet.metered_j.items():
            self.say(f"{name} used {joules:.3g} J, measured by its own meter, with all else that it did")
        return coordinator.recoveries


@contextmanager
def served(engines: Lender, serve_rank: Callable[[RankContext, str], None]) -> Iterator[Devices]:
    """Yield devices that take commands.  serve_rank: their job, called with the address of the commands."""
    with engines.service() as service:
        yield EngineDevices(service, serve_rank, lambda rank: service.address, engines.now_s)


class Succession:
    """Chooses the devices that continue, and their job.  first: the job as planned for all devices.  say: notifies the user.

    now: the members and job of the last generation; None after a loss: all remaining devices get a new plan (passive fault
    tolerance).  An idle device, if there is a suitable one, replaces one that leaves on notice (proactive: Confidant, section 3.4).
    """

    def __init__(self, first: RankJob, replanned: Replanned, say: Callable[[str], None]) -> None:
        self.first, self._replanned, self._say = first, replanned, say
        self.now: tuple[tuple[int, ...], RankJob] | None = None
        self._known: tuple[Any, Generation] | None = None

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float], left: float) -> Generation:
        """Return the next generation (see Policy).  left: fraction of the run."""
        key = (number, ready, dict(factors))
        if self.now is None:
            self._known = None
        if self._known is not None and self._known[0] == key:
            return self._known[1]
        stood_in = self._stood_in(ready, factors, left)
        if stood_in is None:
            return generation_of(number, *next_job(self.first, self._replanned, ready, factors), factors)
        members, job, prepares = stood_in
        self._known = key, generation_of(number, members, job, factors)._replace(prepares=prepares)
        return self._known[1]

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float], step: int) -> bool:
        """Return whether the devices' speeds call for another plan (see Policy), and whether it pays.

        The paper repartitions periodically and does not say when a new partition is accepted (Confidant, section 3.2).  Here it is accepted
        if it saves more over the steps left, from `step` on, than it costs to load layers and move the trainable state.
        """
        members, job = next_job(self.first, self._replanned, ready, factors)
        is_same = members == generation.members and shares_of(job.plan) == shares_of(generation.plan)
        if self.now is None or is_same:
            return False
        was, new = generation.plan.renumbered(dict(enumerate(generation.members))), job.plan.renumbered(dict(enumerate(members)))
        price_s = repartition_s(self.first.cluster.with_slow_links(factors), self.first.profile, was, new)
        if self.first.cluster.is_real:
            price_s += REAL_REGROUP_S
        at_present, then = (generation_of(0, *own, factors).predictor for own in (self.now, (members, job)))
        saved_s = at_present.rest_s(step) - then.rest_s(step)  # type: ignore[attr-defined]  # Timetables
        pays = saved_s > price_s
        verdict = "is taken" if pays else "is not taken"
        self._say(f"Another partition {verdict}: it saves {saved_s:.2g} s of what is left and costs {price_s:.2g} s (predicted)")
        return pays

    def _stood_in(
        self, ready: tuple[int, ...], factors: Mapping[int, float], left: float
    ) -> tuple[tuple[int, ...], RankJob, tuple[int, ...]] | None:
        """Return members, their job and the replacements among them; None if nobody leaves, or not all can be replaced."""
        if self.now is None:
            return None
        ranks, job = self.now
        before = after = job.plan.renumbered(dict(enumerate(ranks)))
        idle, chosen = [rank for rank in ready if rank not in before.busy_ranks], []
        names = [device.name for device in self.first.cluster.devices]
        for rank in sorted(before.busy_ranks.difference(ready)):
            found = self._replanned.stand_in(after, rank, idle, left)
            if found is None:
                return None
            idle.remove(found)
            chosen.append(f"{names[found]} takes the place of {names[rank]}")
            after = after.renumbered({one: found if one == rank else one for one in after.busy_ranks})
        if not chosen:
            return None
        members, prepares = tuple(sorted(after.busy_ranks)), tuple(sorted(after.busy_ranks - before.busy_ranks))
        job = self._replanned.job(members, factors, after.renumbered({rank: place for place, rank in enumerate(members)}))
        price = substitution(self.first.cluster, self.first.profile, before, after)
        step_s = Timetable(job).longest_s()
        self._say(
            f"{', '.join(chosen)} (predicted: it loads {price.loading_s:.2g} s while all train; {price.still_s:.2g} s to move what is"
            f" trained; with the step under way, a notice of {price.loading_s + step_s + price.still_s:.2g} s is enough)"
        )
        return members, job, prepares


class StepPolicy(ToldPolicy):
    """A ToldPolicy of phases and epochs.  first, replanned: see Succession."""

    def __init__(self, first: RankJob, replanned: Replanned, notify: Notify) -> None:
        super().__init__(notify)
        self._first, self._next, self._timetable = first, Succession(first, replanned, self.say), Timetable(first)
        self._step = 0

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self._step

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self._timetable.num_steps

    def generation(self, number: int, ready: tuple[int, ...], factors: Mapping[int, float]) -> Generation:
        """Return the remaining steps as a job of the devices that are ready (see Policy)."""
        return self._next.generation(number, ready, factors, 1 - self._step / self.num_steps)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count a step."""
        self._step = max(self._step, done.step + 1)

    def differs(self, generation: Generation, ready: tuple[int, ...], factors: Mapping[int, float]) -> bool:
        """Return whether the devices' speeds call for another plan."""
        return self._next.differs(generation, ready, factors, self._step)


class TrainingPolicy(StepPolicy):
    """A StepPolicy of a run in its folder.

    former: the run's progress before.  generations: all that have begun.  results: of the last
    generation, by place.  spent_s: seconds of the slowest device, by the kind of work besides steps.

    Every device sends its part of each step's loss.  If the job says so, the run ends after an epoch with which the mean losses of the
    epochs reach a plateau.  RingAda's coordinator tests convergence after every round, by a rule that the paper does not give
    (Algorithm 1, line 12); an epoch's loss does not vary by which samples it has.
    """

    def __init__(self, first: RankJob, former: Interrupted, replanned: Replanned, notify: Notify) -> None:
        super().__init__(first, replanned, notify)
        self._former, self._everyone = former, tuple(range(first.cluster.world_size))
        self._step = self._timetable.number(former.epochs, former.step)
        self.generations: list[Begun] = []
        self.results = [RankResult(rank=rank) for rank in self._everyone]
        self.spent_s: dict[str, float] = {}
        self._trained: set[str] = set()
        self._some_lost = False
        self._backups: dict[int, dict[int, tuple[str, ...]]] = {}
        self._converged: int | None = None
        self._losses: dict[int, dict[int, float]] = {}
        for trace, rank in ((trace, result.rank) for result in former.results for trace in result.steps):
            self._losses.setdefault(self._timetable.number(trace.epoch, trace.step), {})[rank] = trace.loss
        if former.epochs:
            self._test(former.epochs)
        if self.has_converged:
            self._former = replace(self._up_to(first, former.epochs), is_same=former.is_same)
            self._step = self.num_steps

    @property
    def epochs(self) -> int:
        """Return the epochs of the run, fewer than planned if it has converged."""
        return self._first.job.epochs if self._converged is None else self._converged

    @property
    def has_converged(self) -> bool:
        """Return whether the training has converged before its last epoch (see Policy)."""
        return self._converged is not None

    def _test(self, epochs: int) -> None:
        """Test convergence after so many epochs; their losses are complete."""
        job, number = self._first.job, self._timetable.number
        if self.has_converged or not job.converged_after or epochs >= job.epochs:  # devices that have not paused yet go on
            return
        steps = [range(number(epoch, 0), number(epoch + 1, 0)) for epoch in range(epochs)]
        means = [fmean(sum(self._losses[step].values()) for step in own) for own in steps]
        if plateaus(means, job.converged_after):
            self._converged = epochs
            rule = f"in the last {job.converged_after} the mean loss has not fallen {LEAST_FALL:.0%} below its lowest, {min(means):.4g}"
            self.say(f"The training has converged after {epochs} of {job.epochs} epochs: {rule}")

    def _up_to(self, rank_job: RankJob, epochs: int) -> Interrupted:
        """Return the run's first epochs, and remove what the devices have done since."""
        return take_up(replace(rank_job, job=replace(rank_job.job, epochs=epochs)))

    @property
    def last(self) -> Begun:
        """Return the last generation; if all was done before the first, a generation of the first plan."""
        return self.generations[-1] if self.generations else Begun(members=self._everyone, job=self._first, former=self._former)

    def begun(self, generation: Generation) -> Generation:
        """Let it continue after the last step whose state is in the folder (see Policy)."""
        former = self._former if generation.number == 1 else take_up(generation.job, self._held(generation.members))
        job, done = replace(generation.job, **former.begins), self._step
        self._timetable = generation.predictor  # type: ignore[assignment]  # made above
        self._step = self._timetable.number(former.epochs, former.step)
        if self.generations and self.last.members == generation.members and self._step == done and not self._some_lost:
            job = job.going_on(self.last.job)
        self.generations.append(Begun(members=generation.members, job=job, former=former))
        self._next.now = generation.members, job
        self._losses = {step: parts for step, parts in self._losses.items() if step < self._step}
        self._backups = {rank: {step: names for step, names in kept.items() if step <= self._step} for rank, kept in self._backups.items()}
        self.watch(generation)
        if job.missing:
            self.say(job.missing)
        return generation._replace(job=job)

    def _held(self, members: Sequence[int]) -> dict[int, Homes] | None:
        """Return, by step, the members that keep each tensor, for steps whose state is complete; None if they keep nothing.

        It is empty if two devices were lost at once: then the last checkpoint on the disk is used.
        """
        if not self._first.job.backup_every:
            return None
        kept = [self._backups.get(rank, {}) for rank in members]
        steps = {step for own in kept for step in own}
        held = {step: held_by({place: own.get(step, ()) for place, own in enumerate(kept)}) for step in steps}
        return whole_steps(held, self._trained)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count a step, and test convergence when all devices have done an epoch."""
        self._step = max(self._step, done.step + 1)
        losses, plan = self._losses.setdefault(done.step, {}), generation.plan
        losses[rank] = done.content
        epoch, _ = self._timetable.epoch_of(done.step)
        busy = plan.cached.ranks if plan.cached and self._timetable.is_cached(epoch) else plan.busy_ranks
        if done.step + 1 == self._timetable.number(epoch + 1, 0) and len(losses) == len(busy):
            self._test(epoch + 1)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Store the results of a generation; after a loss the folder determines where the next one begins."""
        if lost:
            self._next.now = None
        self._some_lost = bool(lost) or any(ended.end == "lost" for ended in parts.values())
        self.results = [ended.part for _, ended in sorted(parts.items()) if ended.part is not None]
        self._trained = {name for result in self.results for name in result.trained} or self._trained
        self._backups = {rank: kept for rank, kept in self._backups.items() if rank not in lost}
        self._backups |= {rank: ended.part.backups for rank, ended in parts.items() if ended.part is not None}
        for name in {name for result in self.results for name in result.spent_s}:
            most_s = max(result.spent_s.get(name, 0.0) for result in self.results)
            self.spent_s[name] = self.spent_s.get(name, 0.0) + most_s
        is_over = not lost and all(ended.end == "finished" for ended in parts.values())
        if self._converged is not None:
            is_over = self._up_to(self.last.job, self._converged).epochs == self._converged
            if not is_over:  # a device was lost before it had saved its part
                self._converged = None
            for result in self.results if is_over else ():
                result.steps = [step for step in result.steps if step.epoch < self.epochs]
        self._step = self.num_steps if is_over else min(self._step, self.num_steps - 1)


def next_job(first: RankJob, replanned: Replanned, ready: tuple[int, ...], factors: Mapping[int, float]) -> tuple[tuple[int, ...], RankJob]:
    """Return the devices that continue, and their job: the first plan, perhaps the user's, while all are present at full speed."""
    if len(ready) == first.cluster.world_size and not factors:
        return ready, first
    return chosen(replanned, ready, factors)


def chosen(replanned: Replanned, ready: tuple[int, ...], factors: Mapping[int, float]) -> tuple[tuple[int, ...], RankJob]:
    """Return the ready devices that get work, and their job; the others are free to be probed."""
    job = replanned.job(ready, factors)
    plan = job.plan
    used = {rank for stage in (*plan.stages, *([plan.cached] if plan.cached else [])) for rank in stage.ranks}
    if len(used) == len(ready):
        return ready, job
    return chosen(replanned, tuple(rank for place, rank in enumerate(ready) if place in used), factors)


def generation_of(number: int, members: tuple[int, ...], job: RankJob, factors: Mapping[int, float]) -> Generation:
    """Return a job of some devices as a generation.  factors: measured slowdown by rank, and of links by 'sender>receiver'."""
    slower = {place: factors[rank] for place, rank in enumerate(members) if rank in factors}
    actual = replace(job, cluster=job.cluster.with_slow_links(factors))
    timetable = Timetable(actual, job.profile.part(range(len(members)), slower))
    timeout_s = max(job.timeout_s, SILENT_AFTER_STEPS * timetable.longest_s())
    return Generation(
        number, members, job.plan, replace(job, timeout_s=timeout_s), timetable, timeout_s, own=lambda own, place: own.on_rank(place)
    )


def shares_of(plan: Plan) -> tuple[Any, ...]:
    """Return each device's share of the computation."""
    assignments = ((first, tuple((stage.start, stage.stop, stage.shares) for stage in stages)) for first, stages in plan.assignments)
    return tuple(assignments), plan.cached
