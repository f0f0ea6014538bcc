"""The policy of a run of many steps on devices that change: who does the next ones, under which plan, and whether
another plan pays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from workbench.core.cluster import Cluster, Device, Factors
from workbench.core.errors import CacheError, PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import StepRecord
from workbench.core.schedule import Ranks
from workbench.core.timeline import Timeline
from workbench.core.units import three_figures
from workbench.methods.base import Notify, Planned, Prediction
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.records import measured_steps
from workbench.methods.training.heating import Stretch, gets_hot, heated_s
from workbench.methods.training.interrupted import Interrupted
from workbench.methods.training.phases import PhasedJob, Plans
from workbench.methods.training.recording_policy import RecordingPolicy
from workbench.methods.training.state_costs import repartition_s, substitution
from workbench.methods.training.timetable import Timetable
from workbench.runtime.commands import Generation, Parts, StepDone

REAL_REGROUP_S = 1.0
"""Seconds in which real devices form another group (measured: 1.3 to 1.6 s with the end of a step, on a busy
machine)."""
EMPTY = 1e-6
"""The least charge that a description of a device may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedGeneration:
    """A generation that has begun: its devices, its job (a PhasedJob), and its steps from number `start` on.

    former: the folder's progress of the steps before; empty for a simulated run.
    """

    members: Ranks
    job: Any
    timetable: Timetable
    start: int
    former: Interrupted = field(default_factory=Interrupted)

    @property
    def plan(self) -> Plan:
        """Return its plan, with the devices' ranks in the cluster."""
        return self.job.plan.renumbered(dict(enumerate(self.members)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The state of a run.

    step, num_steps: numbers of finished steps and of all steps.  generations: number of generations that have begun.

    devices, layers, samples: those of the current generation.  after_loss: whether a device was lost, so that the next
    generation gets a new plan.
    slower: how many times slower devices and links are than described, and the remaining shares of memory, as last
    reported.
    """

    step: int
    num_steps: int
    generations: int
    devices: tuple[str, ...]
    layers: str
    samples: str
    after_loss: bool
    slower: dict[int | str, float]


class StepPolicy(RecordingPolicy):
    """A RecordingPolicy of phases and epochs: which devices do the next steps, under which plan, and whether a new plan
    pays.

    first: the job as planned for all devices.  method: makes the jobs of fewer or slower ones.
    generations: all that have begun.  now: the present one; None before the first, and after a loss: all remaining
    devices get a new plan (passive fault tolerance).  An idle device, if there is a suitable one, replaces one that
    leaves on notice (proactive: Confidant, section 3.4).  factors: see Policy.generation.
    results: those of the last generation's devices, by place.  spent_s: seconds of the slowest device, by the kind of
    work besides steps.
    """

    def __init__(self, method: Plans, planned: Planned[Any], first: PhasedJob, notify: Notify) -> None:
        super().__init__(notify)
        self.method, self.first = method, first
        self.prepared, self.profile, self.cluster = first.handed_on(planned.prepared), planned.profile, planned.cluster
        self.generations: list[StartedGeneration] = []
        self.now: StartedGeneration | None = None
        self.factors: dict[Any, float] = {}
        self.results: list[RankResult] = []
        self.spent_s: dict[str, float] = {}
        self._timetable, self._step = Timetable(first), 0
        self._charges: Mapping[str, float] = {}
        self._ahead: tuple[Any, Generation] | None = None

    @property
    def step(self) -> int:
        """Return the number of finished steps."""
        return self._step

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self._timetable.num_steps

    @property
    def everyone(self) -> tuple[int, ...]:
        """Return the ranks of all devices."""
        return tuple(range(self.cluster.world_size))

    @property
    def last(self) -> StartedGeneration:
        """Return the last generation; if all was done before the first, a generation of the first plan."""
        if self.generations:
            return self.generations[-1]
        return StartedGeneration(members=self.everyone, job=self.first, timetable=self._timetable, start=self._step)

    def generation_at(self, number: int) -> StartedGeneration | None:
        """Return the generation that did a step, by its number; None for a step of an earlier run."""
        return next((generation for generation in reversed(self.generations) if generation.start <= number), None)

    def expected(self, step: StepRecord) -> StepRecord:
        """Return a step's record with the seconds expected under the plan by which it was done, if it was done in this
        run.
        """
        number = self._timetable.number(step.epoch, step.step)
        if number in self._heated_s:
            return replace(step, predicted_s=self._heated_s[number])
        generation = self.generation_at(number)
        return (
            step
            if generation is None or step.predicted_s is not None
            else replace(step, predicted_s=generation.timetable.seconds(number))
        )

    def measured_steps(self, prediction: Prediction) -> tuple[StepRecord, ...]:
        """Return the steps that are done, those of an earlier run among them, predicted and measured.

        prediction: that of the last generation's devices.
        """
        former = self.last.former
        expected = [self.expected(step) for step in former.steps(prediction.steps)]
        for result in self.results:
            result.resumed_at = (former.epochs, former.step)
        return measured_steps([*former.results, *self.results], expected)

    def last_results(self) -> list[RankResult]:
        """Return the results of the last generation's devices, by place, with what they have done before."""
        return self.last.former.joined(self.results)

    @cached_property
    def _heated_s(self) -> dict[int, float]:
        """Return the seconds expected of each step of this run, by number, if devices get hot: under the plans by which
        the steps were done.
        """
        if not gets_hot(self.cluster):
            return {}
        starts = [generation.start for generation in self.generations]
        stretches = (
            Stretch(Timetable(generation.job), generation.members, range(generation.start, stop))
            for generation, stop in zip(self.generations, [*starts[1:], self.step], strict=True)
        )
        return heated_s(self.cluster, stretches)

    @property
    def state(self) -> PolicyState:
        """Return the state of the run as data."""
        last = self.last
        return PolicyState(
            step=self._step,
            num_steps=self.num_steps,
            generations=len(self.generations),
            devices=last.job.cluster.names,
            layers=last.job.plan.partition(),
            samples=last.job.plan.grouping(),
            after_loss=bool(self.generations) and self.now is None,
            slower=dict(self.factors),
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state})"

    def _begin(self, generation: Generation, former: Interrupted | None = None) -> None:
        """Record that a generation begins at the next step.  former: see StartedGeneration."""
        self._timetable = generation.predictor  # type: ignore[assignment]  # made below
        self.now = StartedGeneration(
            members=generation.members,
            job=generation.job,
            timetable=self._timetable,
            start=self._step,
            former=former or Interrupted(),
        )
        self.generations.append(self.now)

    def timelines(self, generation: Generation) -> dict[str, Timeline]:
        """Return a step of each phase that is left, as simulated under the plan, by the phase's name."""
        return self._timetable.timelines(self._step)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count a step."""
        self._step = max(self._step, done.step + 1)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Forget the plan after a loss: all remaining devices get a new one (see Policy)."""
        if lost:
            self.now = None

    def charged(self, charges: Mapping[str, float]) -> None:
        """Take the present charge of devices (see Policy)."""
        self._charges = dict(charges)

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the remaining steps as a job of the devices that are ready (see Policy)."""
        self.factors, key = dict(factors), self._key(number, ready, factors)
        if self._ahead is not None and self._ahead[0] == key:
            return self._ahead[1]
        substituted = self._with_substitutes(ready, factors)
        if substituted is None:
            return self._generation(number, *self._next_job(ready, factors), factors)
        members, job, prepares = substituted
        self._ahead = key, self._generation(number, members, job, factors)._replace(prepares=prepares)
        return self._ahead[1]

    def _key(self, number: int, ready: Ranks, factors: Factors) -> tuple[Any, ...]:
        """Return what determines the next generation, besides the steps that are done."""
        return number, ready, dict(factors), self.now is None

    def differs(self, generation: Generation, ready: Ranks, factors: Factors) -> bool:
        """Return whether the devices' speeds call for another plan (see Policy), and whether it pays.

        The paper repartitions periodically and does not say when a new partition is accepted (Confidant, section 3.2).
        We accept it if it saves more over the remaining steps than loading layers and moving the trainable state costs,
        and in any case if a device no longer has the memory for its part of the current one.
        """
        self.factors = dict(factors)
        members, job = self._next_job(ready, factors)
        if self.now is None or is_same_work(generation, members, job.plan):
            return False
        try:
            self._require_room(generation, factors)
        except PlanError as error:
            why = f"{error.asked} {error.found}".rstrip(".")
            self.say(f"Another partition is taken at any price, because the present one no longer fits: {why}")
            return True
        was, new = (
            generation.plan.renumbered(dict(enumerate(generation.members))),
            job.plan.renumbered(dict(enumerate(members))),
        )
        price_s = repartition_s(self.cluster.with_slow_links(factors), self.profile, was, new, job.snapshot)
        if self.cluster.is_real:
            price_s += REAL_REGROUP_S
        at_present, then = (
            timetable_at(members, job, factors) for members, job in ((self.now.members, self.now.job), (members, job))
        )
        saved_s = at_present.rest_s(self._step) - then.rest_s(self._step)
        pays = saved_s > price_s
        verdict = "is taken" if pays else "is not taken"
        self.say(
            f"Another partition {verdict}: it saves {three_figures(saved_s)} s of what is left and costs "
            f"{three_figures(price_s)} s (predicted)"
        )
        return pays

    def _job(self, ranks: Sequence[int], factors: Factors, plan: Plan | None = None) -> PhasedJob:
        """Return the job of some devices, which it numbers by their places, under a new plan or a given one.  Raises
        PlanError.
        """
        part, profile = self.cluster.part(ranks, factors), self.profile.part(ranks)
        plan = plan or self.method.plan(self.prepared, self.profile.part(ranks, factors), part.with_slow_links(factors))
        job = self.method.rank_job(self.prepared, profile, part, plan)
        return replace(job, folder=self.first.folder, fingerprint=self.first.fingerprint)

    def _next_job(self, ready: Ranks, factors: Factors) -> tuple[tuple[int, ...], PhasedJob]:
        """Return the ready devices that get work, and their job; the others are free to be probed.

        It is the first plan, perhaps the user's, while all devices are present at full speed.
        """
        if len(ready) == self.cluster.world_size and not factors:
            return ready, self.first
        while True:
            job = self._job(ready, factors)
            stages = (*job.plan.stages, *([job.plan.cached] if job.plan.cached else []))
            ranks = {rank for stage in stages for rank in stage.ranks}
            if len(ranks) == len(ready):
                return ready, job
            ready = tuple(rank for place, rank in enumerate(ready) if place in ranks)

    def _generation(self, number: int, members: Ranks, job: PhasedJob, factors: Factors) -> Generation:
        """Return a job of some devices as a generation."""
        return self.generation_of(number, members, job.plan, job, timetable_at(members, job, factors))

    def _require_room(self, generation: Generation, factors: Factors) -> None:
        """Raise PlanError if a generation no longer fits in its devices' memory."""
        profile, part = self.profile.part(generation.members), self.cluster.part(generation.members, factors)
        with suppress(CacheError):
            self.method.check(self.prepared, profile, part, generation.plan, folder=self.first.folder)

    def _with_substitutes(
        self, ready: Ranks, factors: Factors
    ) -> tuple[tuple[int, ...], PhasedJob, tuple[int, ...]] | None:
        """Return members, their job and the replacements among them; None if nobody leaves, or not all can
        be replaced.
        """
        if self.now is None:
            return None
        before = after = self.now.plan
        idle, exchanges = [rank for rank in ready if rank not in before.busy_ranks], []
        names, now = self.cluster.names, self._as_measured(factors)
        remaining_share = 1 - self._step / self.num_steps
        for rank in sorted(before.busy_ranks.difference(ready)):
            substitute = self.method.stand_in(self.prepared, *now, after, rank, idle, remaining_share)
            if substitute is None:
                return None
            idle.remove(substitute)
            exchanges.append(f"{names[substitute]} takes the place of {names[rank]}")
            after = after.renumbered({member: substitute if member == rank else member for member in after.busy_ranks})
        if not exchanges:
            return None
        members, prepares = tuple(sorted(after.busy_ranks)), tuple(sorted(after.busy_ranks - before.busy_ranks))
        job = self._job(members, factors, after.renumbered({rank: place for place, rank in enumerate(members)}))
        price = substitution(self.cluster, self.profile, before, after, job.snapshot)
        step_s = Timetable(job).longest_s()
        self.say(
            f"{', '.join(exchanges)} (predicted: it loads {three_figures(price.loading_s)} s while all train; "
            f"{three_figures(price.keeping_s)} s to store and {three_figures(price.moving_s)} s to restore what is "
            "trained; with the step under way, a notice of "
            f"{three_figures(price.loading_s + step_s + price.still_s)} s is enough)"
        )
        return members, job, prepares

    def _as_measured(self, factors: Factors) -> tuple[Profile, Cluster]:
        """Return the profile at the devices' measured pace, and the cluster with their present memory and charge."""
        slower = {rank: factors[rank] for rank in self.everyone if rank in factors}

        def charged(device: Device) -> Device:
            return replace(device, battery=max(EMPTY, self._charges.get(device.name, device.battery)))

        cluster = self.cluster.part(self.everyone, factors).with_each(charged)
        return self.profile.part(self.everyone, slower), cluster


def timetable_at(members: Sequence[int], job: PhasedJob, factors: Factors) -> Timetable:
    """Return the steps of a job with their seconds at the devices' present speed."""
    slower = {place: factors[rank] for place, rank in enumerate(members) if rank in factors}
    slow_links = replace(job, cluster=job.cluster.with_slow_links(factors))
    return Timetable(slow_links, job.profile.part(range(len(members)), slower))


def is_same_work(generation: Generation, members: Ranks, plan: Plan) -> bool:
    """Return whether the members of a generation keep their shares of the computation under another plan."""
    return members == generation.members and _shares_of(plan) == _shares_of(generation.plan)


def _shares_of(plan: Plan) -> tuple[Any, ...]:
    """Return each device's share of the computation."""
    assignments = (
        (first, tuple((stage.start, stage.stop, stage.shares) for stage in stages))
        for first, stages in plan.assignments
    )
    return tuple(assignments), plan.cached
