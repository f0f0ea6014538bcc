"""Cut a pipeline into stages whose slowest is fastest, for every number of stages (PAC+, section V-A, Eq. 3).

Our reading of Eq. 3.  W(0 -> y, D_n, s) covers the first y layers (numbered 1 to y), T(q+1 -> y) the layers q+1 to y; for
s = 1 it is T(1 -> y, D_n), which Eq. 3's 1 <= m < n leaves out and Algorithm 1's m = n brings back; for s > 1 no stage is
empty of layers or devices (q >= s - 1 and n - m >= s - 1).  The maximum does not care from which end the pipeline is cut, so
we build it from the back: the front stage of a suffix of s stages holds exactly min(s, M) micro-batches under 1F1B,
so that the memory test is exact instead of a guess, and W(0 -> L, D, s) is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.core.plan import Share, Stage
from workbench.planners.dispatch import StageTimes

TIE = 1e-12
"""Bottlenecks that differ by no more than this share are equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """W_s: stages, and bottleneck_s, the time W(0 -> L, D, s) of the slowest."""

    stages: tuple[Stage, ...]
    bottleneck_s: float


def balance(
    times: StageTimes, num_layers: int, ranks: Sequence[int], micro_batches: int, *, max_group: int | None = None
) -> Iterator[Balanced]:
    """Yield W_s of Eq. 3 for every number of stages s that fits, the devices in the order of `ranks`."""
    count = len(ranks)
    widest = count if max_group is None else min(max_group, count)
    times.prefetch(ranks, widest)
    # slowest[a, x]: the best bottleneck of layers [x, L) on devices a.. in s stages; `whole` its stage times summed, to break ties.
    slowest = np.full((count + 1, num_layers + 1), np.inf)
    whole = np.full((count + 1, num_layers + 1), np.inf)
    # W_0: no layers on no devices.
    slowest[count, num_layers] = whole[count, num_layers] = 0.0
    choices: list[np.ndarray] = []  # of each s: (count, L), the front stage's last device and stop, as one number
    fronts: list[np.ndarray] = []
    in_flight = 0
    for s in range(1, min(num_layers, count) + 1):
        if min(s, micro_batches) != in_flight:
            in_flight = min(s, micro_batches)
            # fronts[a]: (L, groups, L), the seconds of layers [x, y) on devices a to a + g at [x, g, y - 1].
            fronts = [
                np.stack([times.stage(ranks[a : c + 1], in_flight) for c in range(a, min(count, a + widest))], axis=1) for a in range(count)
            ]
        next_slowest, next_whole = np.full_like(slowest, np.inf), np.full_like(whole, np.inf)
        choice = np.full((count, num_layers), -1)
        for a in range(count - s + 1):
            own = fronts[a]
            rest = slice(a + 1, a + 1 + own.shape[1])
            value = np.maximum(own, slowest[rest, 1:]).reshape(num_layers, -1)
            best = value.min(axis=1)
            sums = np.where(value <= (best * (1 + TIE))[:, None], (own + whole[rest, 1:]).reshape(num_layers, -1), np.inf)
            choice[a] = sums.argmin(axis=1)
            next_slowest[a, :num_layers], next_whole[a, :num_layers] = best, sums[np.arange(num_layers), choice[a]]
        slowest, whole = next_slowest, next_whole
        choices.append(choice)
        if math.isfinite(slowest[0, 0]):
            yield Balanced(stages=_stages(times, num_layers, ranks, choices, micro_batches), bottleneck_s=float(slowest[0, 0]))


def _stages(
    times: StageTimes, num_layers: int, ranks: Sequence[int], choices: Sequence[np.ndarray], micro_batches: int
) -> tuple[Stage, ...]:
    stages, start, first = [], 0, 0
    for s in range(len(choices), 0, -1):
        width, before_stop = divmod(int(choices[s - 1][first, start]), num_layers)
        stop, end = before_stop + 1, first + width + 1
        group = ranks[first:end]
        samples = times.shares(start, stop, group, min(s, micro_batches))
        shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share)
        stages.append(Stage(start=start, stop=stop, shares=shares))
        start, first = stop, end
    return tuple(stages)
