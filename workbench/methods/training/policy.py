"""The policy of a training run: after a change the devices go on from a snapshot, and it ends once its loss falls no
more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from workbench.core.cluster import Factors
from workbench.core.plan import Homes, held_by, whole_states
from workbench.core.schedule import Ranks
from workbench.methods.base import Notify, Planned
from workbench.methods.common.rank_results import RankResult
from workbench.methods.training.interrupted import Interrupted, take_up
from workbench.methods.training.phases import Plans, RankJob
from workbench.methods.training.step_policy import StartedGeneration, StepPolicy
from workbench.runtime.commands import Generation, Parts, StepDone, is_broken, is_finished
from workbench.runtime.snapshot import Position

LEAST_FALL = 0.01
"""The fraction by which a loss must fall to count as lower."""


def plateaus(values: Sequence[float], patience: int, threshold: float = LEAST_FALL) -> list[int]:
    """Return after how many values each plateau ends: `patience` in a row are not `threshold` below the lowest since
    the last plateau.
    """
    ends, lowest, waited = list[int](), math.inf, 0
    for count, value in enumerate(values, start=1):
        lowest, waited = (value, 0) if value < lowest * (1 - threshold) else (lowest, waited + 1)
        if waited == patience:
            ends, lowest, waited = [*ends, count], math.inf, 0
    return ends


class TrainingPolicy(StepPolicy):
    """A StepPolicy of a run that continues from snapshots in its folder.

    former: the run's progress before.

    Every device sends its part of each step's loss.  If the job says so, the run ends after an epoch with which the
    mean losses of the epochs reach a plateau.  RingAda's coordinator tests convergence after every round, by a rule
    that the paper does not give (Algorithm 1, line 12); an epoch's loss does not vary by which samples it has.
    """

    def __init__(
        self, method: Plans, planned: Planned[Any], first: RankJob, former: Interrupted, notify: Notify
    ) -> None:
        super().__init__(method, planned, first, notify)
        self._former = former
        self._step = self._timetable.number(former.epochs, former.step)
        self.results = [RankResult(rank=rank) for rank in self.everyone]
        self._trained: set[str] = set()
        self._some_lost = False
        self._in_memory: dict[int, dict[Position, tuple[str, ...]]] = {}
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
        return self.first.job.epochs if self._converged is None else self._converged

    @property
    def has_converged(self) -> bool:
        """Return whether the training has converged before its last epoch (see Policy)."""
        return self._converged is not None

    def _test(self, epochs: int) -> None:
        """Test convergence after so many epochs; their losses are complete."""
        job, number = self.first.job, self._timetable.number
        if (
            self.has_converged or not job.converged_after or epochs >= job.epochs
        ):  # devices that have not paused yet go on
            return
        steps = [range(number(epoch, 0), number(epoch + 1, 0)) for epoch in range(epochs)]
        means = [fmean(sum(self._losses[step].values()) for step in epoch_steps) for epoch_steps in steps]
        if plateaus(means, job.converged_after):
            self._converged = epochs
            rule = (
                f"in the last {job.converged_after} the mean loss has not fallen {LEAST_FALL:.0%} below its lowest, "
                f"{min(means):.4g}"
            )
            self.say(f"The training has converged after {epochs} of {job.epochs} epochs: {rule}")

    def _up_to(self, rank_job: RankJob, epochs: int) -> Interrupted:
        """Return the run's first epochs, and remove what the devices have done since."""
        return take_up(replace(rank_job, job=replace(rank_job.job, epochs=epochs)))

    @property
    def last(self) -> StartedGeneration:
        """Return the last generation (see StepPolicy)."""
        return super().last if self.generations else replace(super().last, former=self._former)

    def plan_ahead(self, number: int, ready: Ranks, factors: Factors) -> None:
        """Plan for the devices that are left (see Policy): after a loss no device takes another's place."""
        self.now = None
        key = self._key(number, ready, factors)
        self._ahead = key, self._generation(number, *self._next_job(ready, factors), factors)

    def begun(self, generation: Generation) -> Generation:
        """Let the generation continue after the last step whose state is in the folder (see Policy)."""
        former = (
            self._former
            if generation.number == 1
            else take_up(generation.job, self._homes_in_memory(generation.members))
        )
        job, done = replace(generation.job, **former.begins), self._step
        timetable: Any = generation.predictor
        self._step = timetable.number(former.epochs, former.step)
        if self.generations and self.last.members == generation.members and self._step == done and not self._some_lost:
            job = job.going_on(self.last.job)
        self._begin(generation._replace(job=job), former)
        self._losses = {step: parts for step, parts in self._losses.items() if step < self._step}
        position = Position(former.epochs, former.step)
        self._in_memory = {
            rank: {snapshot: names for snapshot, names in snapshots.items() if snapshot <= position}
            for rank, snapshots in self._in_memory.items()
        }
        self.watch(generation)
        for sentence in former.damage if generation.number > 1 else ():
            self.say(sentence.rstrip("."))
        if job.missing:
            self.say(job.missing)
        return generation._replace(job=job)

    def _homes_in_memory(self, members: Sequence[int]) -> dict[Position, Homes]:
        """Return the complete snapshots in the members' memory, with the members that have each tensor.

        If two devices were lost at the same time there may be none; then the last one on the disk is used.
        """
        snapshots_of = [self._in_memory.get(rank, {}) for rank in members]
        positions = {position for snapshots in snapshots_of for position in snapshots}
        homes_of = {
            position: held_by({place: snapshots.get(position, ()) for place, snapshots in enumerate(snapshots_of)})
            for position in positions
        }
        return whole_states(homes_of, self._trained)

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Count a step, and test convergence when all devices have done an epoch."""
        super().stepped(generation, rank, done)
        losses, plan = self._losses.setdefault(done.step, {}), generation.plan
        losses[rank] = done.content
        epoch, _ = self._timetable.epoch_of(done.step)
        busy = plan.cached.ranks if plan.cached and self._timetable.is_cached(epoch) else plan.busy_ranks
        if done.step + 1 == self._timetable.number(epoch + 1, 0) and len(losses) == len(busy):
            self._test(epoch + 1)

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Store the results of a generation; after a loss the folder determines where the next one begins."""
        super().ended(generation, parts, lost)
        self._some_lost = is_broken(parts, lost)
        self.results = [ended.part for _, ended in sorted(parts.items()) if ended.part is not None]
        self._trained = {name for result in self.results for name in result.trained} or self._trained
        self._in_memory = {rank: snapshots for rank, snapshots in self._in_memory.items() if rank not in lost}
        self._in_memory |= {rank: ended.part.snapshots for rank, ended in parts.items() if ended.part is not None}
        for name in {name for result in self.results for name in result.spent_s}:
            most_s = max(result.spent_s.get(name, 0.0) for result in self.results)
            self.spent_s[name] = self.spent_s.get(name, 0.0) + most_s
        is_over = is_finished(parts, lost)
        if self._converged is not None:
            is_over = self._up_to(self.last.job, self._converged).epochs == self._converged
            if not is_over:  # a device was lost before it had saved its part
                self._converged = None
            for result in self.results if is_over else ():
                result.steps = [step for step in result.steps if step.epoch < self.epochs]
        self._step = self.num_steps if is_over else min(self._step, self.num_steps - 1)
