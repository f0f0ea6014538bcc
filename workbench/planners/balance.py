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
    widest = count if max_group is None else max_group
    groups = {(a, c): times.group(ranks[a : c + 1]) for a in range(count) for c in range(a, min(count, a + widest))}
    # slowest[x, a]: the best bottleneck of layers [x, L) on devices a.. in s stages; `whole` its stage times summed, to break ties.
    slowest = np.full((num_layers + 1, count + 1), np.inf)
    whole = np.full((num_layers + 1, count + 1), np.inf)
    choices: list[dict[tuple[int, int], tuple[int, int]]] = []
    for s in range(1, min(num_layers, count) + 1):
        variant = times.variant(min(s, micro_batches))
        next_slowest, next_whole = np.full_like(slowest, np.inf), np.full_like(whole, np.inf)
        choice: dict[tuple[int, int], tuple[int, int]] = {}
        for x in range(num_layers - s + 1):
            for a in range(count - s + 1):
                stops = np.arange(x + 1, num_layers + 1) if s > 1 else np.array([num_layers])
                lasts = range(a, min(count, a + widest)) if s > 1 else [count - 1]
                lasts = [c for c in lasts if (a, c) in groups]
                if not lasts:
                    continue
                own = np.stack([groups[a, c][variant][times.index[x, stops]] for c in lasts])
                if s > 1:
                    columns = np.array(lasts) + 1
                    rest, rest_whole = slowest[stops][:, columns].T, whole[stops][:, columns].T
                else:
                    rest, rest_whole = np.zeros_like(own), np.zeros_like(own)
                value = np.maximum(own, rest)
                best = value.min()
                if not math.isfinite(best):
                    continue
                sums = np.where(value <= best * (1 + 1e-12), own + rest_whole, np.inf)
                at = np.unravel_index(np.argmin(sums), sums.shape)
                next_slowest[x, a], next_whole[x, a] = best, sums[at]
                choice[x, a] = (int(stops[at[1]]), lasts[at[0]])
        slowest, whole = next_slowest, next_whole
        choices.append(choice)
        if math.isfinite(slowest[0, 0]):
            yield Balanced(stages=_stages(times, ranks, choices, micro_batches), bottleneck_s=float(slowest[0, 0]))


def _stages(
    times: StageTimes, ranks: Sequence[int], choices: list[dict[tuple[int, int], tuple[int, int]]], micro_batches: int
) -> tuple[Stage, ...]:
    stages, start, first = [], 0, 0
    for s in range(len(choices), 0, -1):
        stop, last = choices[s - 1][start, first]
        group = ranks[first : last + 1]
        samples = times.shares(start, stop, group, min(s, micro_batches))
        shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share)
        stages.append(Stage(start=start, stop=stop, shares=shares))
        start, first = stop, last + 1
    return tuple(stages)
