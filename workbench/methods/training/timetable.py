"""A run's steps, numbered through all phases and epochs, with the time that each is expected to take."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from operator import mul
from statistics import fmean

from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import RECV, SEND
from workbench.core.timeline import Span, Timeline
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.phases import PhasedJob, Predictor

DRAWN = 8
"""Number of sampled steps that represent the remaining ones when another partition is considered."""


class Timetable:
    """A run's steps, numbered from 0 through all phases and epochs, with each step's expected time under the plan."""

    def __init__(
        self, rank_job: PhasedJob, profile: Profile | None = None, *, some: Sequence[PlannedStep] | None = None
    ) -> None:
        """profile: the devices' current costs; None: those in the job.  some: steps of the first phase, in place of
        the run's.
        """
        self._job = rank_job if profile is None else replace(rank_job, profile=profile)
        self._cluster = rank_job.cluster
        self._some, self._phases = some, self._job.phases()
        if some is not None:
            first = replace(self._phases[0], epochs=range(1), steps=lambda epoch: some, last_epoch=None, longest=None)
            self._phases = (first,)
        self._predictors = [Predictor(phase) for phase in self._phases]
        self._steps = lru_cache(maxsize=4)(lambda phase, epoch: self._phases[phase].steps(epoch))
        counts = [count for phase in self._phases for count in phase.counts]
        self._begins = (0, *accumulate(counts))
        self._seconds_of = lru_cache(maxsize=4)(
            lambda phase, epoch: self._predictors[phase].seconds_of(self._steps(phase, epoch))
        )
        self._busy_s = lru_cache(maxsize=None)(self._find_busy_s)
        self._slowed = lru_cache(maxsize=None)(self._find_slowed)

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
        phase, planned = self._step_at(step)
        return self._seconds_of(phase, self.epoch_of(step)[0])(planned.shape)

    def samples(self, step: int) -> int:
        """Return the samples of a step."""
        return self._step_at(step)[1].shape.samples

    def slowed(self, factors: tuple[float, ...]) -> Timetable:
        """Return the same steps on slower devices.  factors: how many times slower, by place."""
        return self._slowed(factors)

    def _find_slowed(self, factors: tuple[float, ...]) -> Timetable:
        slower = {place: factor for place, factor in enumerate(factors) if factor != 1}
        if not slower:
            return self
        return Timetable(self._job, self._job.profile.part(range(len(factors)), slower), some=self._some)

    def timeline(self, step: int, *, title: str = "") -> Timeline:
        """Return a simulated step."""
        phase, planned = self._step_at(step)
        return self._predictors[phase].timeline(planned, title=title)

    def timelines(self, begin: int) -> dict[str, Timeline]:
        """Return a simulated step of each phase that is left from a step on, by the phase's name.  It is the middle one
        of the phase's next epoch.
        """
        timelines: dict[str, Timeline] = {}
        for epoch in range(self.epoch_of(begin)[0], len(self._begins) - 1):
            first, end = max(begin, self._begins[epoch]), self._begins[epoch + 1]
            if first < end:
                phase, planned = self._step_at((first + end) // 2)
                if (name := self._phases[phase].name) not in timelines:
                    timelines[name] = self._predictors[phase].timeline(planned)
        return timelines

    def busy_s(self, step: int, place: int) -> float:
        """Return the seconds for which a device computes in a step, summed over its processors."""
        return sum(self._stream_s(step, place))

    def heating_s(self, step: int, place: int) -> float:
        """Return the seconds of a step during which a device computes: those of its busiest processor."""
        return max(self._stream_s(step, place), default=0.0)

    def _stream_s(self, step: int, place: int) -> tuple[float, ...]:
        phase, planned = self._step_at(step)
        return self._busy_s(phase, planned.shape, place)

    def rest_s(self, step: int) -> float:
        """Return the approximate seconds of all steps from a number on: their count times the mean of an
        even sample.
        """
        remaining = range(step, self.num_steps)
        return (
            len(remaining) * fmean(map(self.seconds, remaining[:: -(-len(remaining) // DRAWN)])) if remaining else 0.0
        )

    def longest_s(self) -> float:
        """Return the approximate seconds of the longest step: in each phase, the one with most tokens in the first
        epoch.
        """
        found_s = 0.0
        for number, phase in enumerate(self._phases):
            if phase.epochs:
                steps = [phase.longest] if phase.longest is not None else self._steps(number, phase.epochs.start)
                longest = max(steps, key=lambda step: sum(map(mul, step.shape.sizes, step.shape.lengths)))
                found_s = max(found_s, self._predictors[number].seconds(longest))
        return found_s

    def _step_at(self, step: int) -> tuple[int, PlannedStep]:
        epoch, index = self.epoch_of(step)
        phase = next(number for number, phase in enumerate(self._phases) if epoch in phase.epochs)
        return phase, self._steps(phase, epoch)[index]

    def until_free_s(self, step: int, place: int, done: float) -> float:
        """Return the seconds until a device ends the operation that it is doing when a part of a step is done; 0 if it
        waits.
        """
        phase, planned = self._step_at(step)
        timeline = self._predictors[phase].timeline(planned, memory=False)
        now_s = done * timeline.makespan_s
        ends_s = (
            span.end_s
            for span in timeline.spans
            if span.rank == place and not span.op.is_communication and span.start_s <= now_s < span.end_s
        )
        return max(ends_s, default=now_s) - now_s

    def messages(self, step: int, place: int) -> list[Span]:
        """Return a device's ends of a step's messages, as if each had the link for itself from second 0 on."""
        program = self._program(step)
        ends = [
            (op, program.costs.spec((op.reads or op.writes)[0]).nbytes)
            for op in program.schedule.ops[place]
            if op.kind in (SEND, RECV)
        ]
        return [Span(place, op, 0.0, self._cluster.link(*op.ranks).transfer_s(nbytes), nbytes) for op, nbytes in ends]

    def _program(self, step: int) -> Program:
        phase, planned = self._step_at(step)
        return self._phases[phase].program(planned.shape)

    def _find_busy_s(self, phase: int, shape: StepShape, place: int) -> tuple[float, ...]:
        program, streams = self._phases[phase].program(shape), dict[str, float]()
        for index, op in enumerate(program.schedule.ops[place]):
            if not op.is_communication:
                streams[op.stream] = streams.get(op.stream, 0.0) + program.seconds(place, index)
        return tuple(streams.values())
