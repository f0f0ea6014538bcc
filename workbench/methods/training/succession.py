"""Which devices continue a training run after a change, under which plan, and whether a new plan pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.methods.base import SILENT_AFTER_STEPS
from workbench.methods.training.backups import repartition_s, substitution
from workbench.methods.training.phases import RankJob
from workbench.methods.training.timetable import Timetable
from workbench.runtime.commands import Generation

REAL_REGROUP_S = 1.0
"""Seconds in which real devices form another group (measured: 1.3 to 1.6 s with the end of a step, on a busy machine)."""


class Replanned(NamedTuple):
    """job: makes the job of some devices, by rank, with their measured slowdown, under a new plan or a given one, which
    numbers them by their places.  Raises PlanError.

    stand_in: returns the idle device that takes over the part of one that leaves on notice, or None: (factors, plan of the whole
    cluster, rank, idle devices, fraction of the run that is left, from 1 to 0).

    check: raises PlanError if a plan does not fit in the memory of some devices (arguments as of job).
    """

    job: Callable[..., RankJob]
    stand_in: Callable[[Mapping[int, float], Plan, int, Sequence[int], float], int | None]
    check: Callable[[Sequence[int], Mapping[int, float], Plan], None]


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
        if it saves more over the steps left, from `step` on, than it costs to load layers and move the trainable state; or at any price if
        a device no longer has the memory for its part of the present one.
        """
        members, job = next_job(self.first, self._replanned, ready, factors)
        is_same = members == generation.members and shares_of(job.plan) == shares_of(generation.plan)
        if self.now is None or is_same:
            return False
        try:
            self._replanned.check(generation.members, factors, generation.plan)
        except PlanError as error:
            why = f"{error.asked} {error.found}".rstrip(".")
            self._say(f"Another partition is taken at any price, because the present one no longer fits: {why}")
            return True
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
            found = self._replanned.stand_in(factors, after, rank, idle, left)
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
    """Return a job of some devices as a generation.  factors: see Policy."""
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
