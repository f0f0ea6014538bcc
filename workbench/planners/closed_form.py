"""The step time of a pipeline of device groups in closed form (PAC+, section V-A, Eq. 5-7).

It orders the plans of a search; a plan's time is the simulated one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from workbench.core.costs import busiest_s, collective_air_s, collective_s, on_air_s
from workbench.core.plan import Stage
from workbench.core.profile import Profile, trainable_bytes
from workbench.core.schedule import ALLREDUCE
from workbench.planners.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """The predicted seconds of a mini-batch.

    beginning_s, execution_s, ending_s: L_b, L_e, L_n of Eq. 5-6.  Eq. 5 computes the execution phase from the last
    stage.  That is right if this stage is the slowest, and too low otherwise.  bottleneck_s: our correction.  For each
    stage k, assume that it never waits after its first micro-batch, and compute when the mini-batch ends; bottleneck_s
    is the largest of these times.  It equals total_s if the last stage is the slowest.  slowest_stage: the k of that
    largest time.
    """

    beginning_s: float
    execution_s: float
    ending_s: float
    bottleneck_s: float
    slowest_stage: int

    @property
    def total_s(self) -> float:
        """Return L_b + L_e + L_n, the objective of Eq. 7."""
        return self.beginning_s + self.execution_s + self.ending_s

    def parts(self) -> dict[str, float]:
        """Return the three phases by name, as in Plan.predicted_s."""
        return {"beginning": self.beginning_s, "execution": self.execution_s, "ending": self.ending_s}


def phase_lengths(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    return_s: Sequence[float],
    reduce_s: Sequence[float],
    num_micro_batches: int,
) -> PhaseTimes:
    """Return Eq. 5-6 from e_f, e_b and AR of each stage (s values each) and c_f, c_b of each boundary (s - 1 values
    each).
    """
    last = len(forward_s) - 1
    before, after = (
        0.0,
        reduce_s[0],
    )  # of stage k: until its first micro-batch arrives, and after its last backward pass
    finish = []
    for k in range(last + 1):
        if k:
            before += forward_s[k - 1] + send_s[k - 1]
            after = max(reduce_s[k], after + backward_s[k - 1] + return_s[k - 1])
        finish.append(before + num_micro_batches * (forward_s[k] + backward_s[k]) + after)
    slowest = max(range(last + 1), key=lambda k: (finish[k], k))
    return PhaseTimes(
        beginning_s=before,
        execution_s=num_micro_batches * (forward_s[last] + backward_s[last]),
        ending_s=after,
        bottleneck_s=finish[slowest],
        slowest_stage=slowest,
    )


Transfer = tuple[int, int, float]
"""A message: source, destination, bytes."""
Stages = tuple[int, ...]
"""A pipeline's stages, by their numbers in a closed form."""


class ClosedForm:
    """Eq. 5-7 for the pipelines of one problem; results for a stage are cached for other pipelines with it.

    Each stage has a number, so that a search compares and finds pipelines quickly.
    """

    def __init__(self, problem: Problem[Profile]) -> None:
        self._profile, self._cluster, self._length = problem.profile, problem.cluster, problem.sequence_length
        self._numbers: dict[Stage, int] = {}
        self._stages: list[Stage] = []
        self._alone: list[tuple[float, float, float]] = []
        self._between: dict[tuple[int, int], tuple[float, float]] = {}
        self._summed: dict[tuple[int, int], tuple[list[float], list[float]]] = {}

    def __call__(self, stages: Sequence[Stage], num_micro_batches: int) -> PhaseTimes:
        """Return the predicted time of stages whose shares' samples sum to the micro-batch.

        On shared air bottleneck_s is at least the seconds on air of all messages: no two of them pass at once.
        """
        return self.phase_times(tuple(map(self.number, stages)), num_micro_batches)

    def number(self, stage: Stage) -> int:
        """Return the stage's number."""
        number = self._numbers.get(stage)
        if number is None:
            number = self._numbers[stage] = len(self._stages)
            self._stages.append(stage)
            self._alone.append(self._alone_s(stage))
        return number

    def stages(self, numbers: Stages) -> tuple[Stage, ...]:
        """Return the stages of these numbers."""
        return tuple(self._stages[number] for number in numbers)

    def passes_s(self, number: int) -> float:
        """Return e_f + e_b of a stage."""
        forward, backward, _ = self._alone[number]
        return forward + backward

    def phase_times(self, numbers: Stages, num_micro_batches: int) -> PhaseTimes:
        """Return the predicted time of the stages of these numbers (see __call__)."""
        times = self._phases(
            numbers, [self._boundary(*pair) for pair in itertools.pairwise(numbers)], num_micro_batches
        )
        if self._cluster.air is None:
            return times
        on_air_s = self._on_air_s(self.stages(numbers), num_micro_batches)
        return replace(times, bottleneck_s=max(times.bottleneck_s, on_air_s))

    def at_least_s(self, numbers: Stages, num_micro_batches: int) -> float:
        """Return a lower bound of bottleneck_s: boundaries between stages that have not been computed count nothing."""
        between = [self._between.get(pair, (0.0, 0.0)) for pair in itertools.pairwise(numbers)]
        return self._phases(numbers, between, num_micro_batches).bottleneck_s

    def _phases(self, numbers: Stages, between: Sequence[tuple[float, float]], num_micro_batches: int) -> PhaseTimes:
        alone = [self._alone[number] for number in numbers]
        return phase_lengths(
            [forward for forward, _, _ in alone],
            [backward for _, backward, _ in alone],
            [send for send, _ in between],
            [back for _, back in between],
            [reduce for _, _, reduce in alone],
            num_micro_batches,
        )

    def _on_air_s(self, stages: Sequence[Stage], num_micro_batches: int) -> float:
        """Return the seconds for which all messages of a mini-batch occupy shared air."""
        air = self._cluster.air
        assert air is not None
        seconds = 0.0
        for stage in stages:
            if len(stage.shares) > 1:
                nbytes = stage_trainable_bytes(self._profile, stage)
                seconds += collective_air_s(air, ALLREDUCE, stage.ranks, nbytes)
        for stage, following in itertools.pairwise(stages):
            there, back = self._crossing(stage, following)
            seconds += num_micro_batches * on_air_s(self._cluster, [*there, *back])
        return seconds

    def _alone_s(self, stage: Stage) -> tuple[float, float, float]:
        """Return e_f and e_b of the slowest rank, with each rank's share of samples, and AR."""
        sums = [self._sums(share.rank, share.samples) for share in stage.shares]
        forward, backward = (max(both[kind][stage.stop] - both[kind][stage.start] for both in sums) for kind in (0, 1))
        reduce_s = collective_s(self._cluster, ALLREDUCE, stage.ranks, stage_trainable_bytes(self._profile, stage))
        return forward, backward, reduce_s

    def _sums(self, rank: int, samples: int) -> tuple[list[float], list[float]]:
        """Return the forward and the backward seconds of the first 0, 1, 2, ... layers."""
        key = (rank, samples)
        if key not in self._summed:
            forward = itertools.accumulate(self._profile.forward_s(rank, samples, self._length), initial=0.0)
            backward = itertools.accumulate(self._profile.backward_s(rank, samples, self._length), initial=0.0)
            self._summed[key] = (list(forward), list(backward))
        return self._summed[key]

    def _boundary(self, number: int, next_number: int) -> tuple[float, float]:
        """Return c_f and c_b."""
        key = (number, next_number)
        if key not in self._between:
            there, back = self._crossing(*self.stages(key))
            self._between[key] = busiest_s(self._cluster, there), busiest_s(self._cluster, back)
        return self._between[key]

    def _crossing(self, stage: Stage, following: Stage) -> tuple[list[Transfer], list[Transfer]]:
        """Return a micro-batch's messages from one group to the next, and back.

        Each sample goes from the rank that computed it to the rank that needs it.
        """
        size = sum(share.samples for share in stage.shares)
        layer = self._profile.layers[stage.ranks[0]][stage.stop - 1]
        sent, returned = layer.output_bytes(1, self._length), layer.gradient_bytes(1, self._length)
        takers = list(zip(following.shares, following.split(size), strict=True))
        there, back = list[Transfer](), list[Transfer]()
        for share, (first, end) in zip(stage.shares, stage.split(size), strict=True):
            for taker, (low, high) in takers:
                samples = min(end, high) - max(first, low)
                if samples > 0:
                    there.append((share.rank, taker.rank, samples * sent))
                    back.append((taker.rank, share.rank, samples * returned))
        return there if sent else [], back if returned else []


def stage_trainable_bytes(profile: Profile, stage: Stage) -> int:
    """Return the bytes of gradients that a stage's group sums."""
    return trainable_bytes(profile.layers[stage.ranks[0]][stage.start : stage.stop])
