"""Exhaustive search over partitions, device groups and orders: what Algorithm 1 is compared with (PAC+, section V-A).

Written without any of Algorithm 1's code: samples are divided by trying every division, stages by trying every partition.
Feasible for lessons and tests only (a dozen layers, five devices, micro-batches of eight).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners.memory import in_flight, rank_need
from workbench.planners.pricing import Price, price

Value = Callable[[Price, float], float]
OBJECTIVES: dict[str, Value] = {
    "paper": lambda cost, slowest: cost.total_s,  # Eq. 7 over all plans, not only over the balanced ones
    "bottleneck": lambda cost, slowest: cost.bottleneck_s,
    "balance": lambda cost, slowest: slowest,  # W(0 -> L, D, s) of Eq. 3
}
MOST_PLANS = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best plan by an objective, its value in seconds, and the number of plans that were compared."""

    plan: Plan
    value_s: float
    compared: int


def exhaustive(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    micro_batches: int,
    sequence_length: int,
    num_stages: int | None = None,
    orders: bool = False,
    objective: str = "paper",
) -> Optimum | None:
    """Return the optimum over every partition x contiguous device groups (x device orders), None if no plan fits.

    Within a stage the samples are divided so that its slowest rank is fastest (Eq. 4).  objective: "paper" (Eq. 7),
    "bottleneck" (pricing.Price) or "balance" (Eq. 3).  num_stages: only plans of so many stages.
    """
    if objective not in OBJECTIVES:
        raise ConfigError(f"The objective '{objective}' was asked for.", f"Known: {', '.join(OBJECTIVES)}.", "Choose one of them.")
    size, count, num_layers = batch_size // micro_batches, cluster.world_size, profile.num_layers
    stage_counts = range(1, min(count, num_layers) + 1) if num_stages is None else (num_stages,)
    plans = sum(math.comb(num_layers - 1, s - 1) * math.comb(count - 1, s - 1) for s in stage_counts)
    plans *= math.factorial(count) if orders else 1
    if plans > MOST_PLANS:
        raise ConfigError(
            f"An exhaustive search over {plans} plans was asked for.", f"The limit is {MOST_PLANS}.", "Use fewer layers or devices."
        )
    memo: dict[tuple[int, int, tuple[int, ...], int], tuple[float, tuple[int, ...]]] = {}
    best: tuple[float, Plan] | None = None
    compared = 0
    for order in itertools.permutations(range(count)) if orders else (tuple(range(count)),):
        for s in stage_counts:
            for layers, groups in itertools.product(_parts(num_layers, s), list(_cuts(order, s))):
                compared += 1
                stages, slowest, start = [], 0.0, 0
                for index, (length, group) in enumerate(zip(layers, groups, strict=True)):
                    key = (start, start + length, group, in_flight(index, s, micro_batches))
                    if key not in memo:
                        memo[key] = _best_division(profile, cluster, *key, size=size, sequence_length=sequence_length)
                    seconds, samples = memo[key]
                    slowest = max(slowest, seconds)
                    if not math.isfinite(slowest):
                        break
                    shares = tuple(Share(rank=rank, samples=n) for rank, n in zip(group, samples, strict=True) if n)
                    stages.append(Stage(start=start, stop=start + length, shares=shares))
                    start += length
                if not math.isfinite(slowest):
                    continue
                cost = price(profile, cluster, stages, num_micro_batches=micro_batches, sequence_length=sequence_length)
                value = OBJECTIVES[objective](cost, slowest)
                if best is None or value < best[0]:
                    made = Plan(
                        method="oracle",
                        stages=tuple(stages),
                        micro_batch_size=size,
                        num_micro_batches=micro_batches,
                        predicted_s=cost.parts(),
                    )
                    best = (value, made)
    return None if best is None else Optimum(plan=best[1], value_s=best[0], compared=compared)


def _best_division(
    profile: Profile,
    cluster: Cluster,
    start: int,
    stop: int,
    group: tuple[int, ...],
    live: int,
    *,
    size: int,
    sequence_length: int,
) -> tuple[float, tuple[int, ...]]:
    def seconds(rank: int, samples: int) -> float:
        if samples == 0:
            return 0.0
        need = rank_need(profile, rank, start, stop, samples=samples, sequence_length=sequence_length, in_flight=live)
        if need.total_bytes > cluster.devices[rank].memory_bytes:
            return math.inf
        return sum(
            layer.forward_s(samples, sequence_length) + layer.backward_s(samples, sequence_length)
            for layer in profile.layers[rank][start:stop]
        )

    times = {rank: [seconds(rank, samples) for samples in range(size + 1)] for rank in group}
    best = (math.inf, (0,) * len(group))
    for samples in itertools.product(range(size + 1), repeat=len(group) - 1):
        last = size - sum(samples)
        if last >= 0:
            whole = (*samples, last)
            best = min(best, (max(times[rank][n] for rank, n in zip(group, whole, strict=True)), whole))
    return best


def _parts(total: int, count: int) -> list[tuple[int, ...]]:
    """Return every way to write `total` as `count` positive numbers in order."""
    parts = []
    for cuts in itertools.combinations(range(1, total), count - 1):
        edges = (0, *cuts, total)
        parts.append(tuple(end - first for first, end in itertools.pairwise(edges)))
    return parts


def _cuts(order: Sequence[int], count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    for parts in _parts(len(order), count):
        ends = list(itertools.accumulate(parts))
        yield tuple(tuple(order[end - part : end]) for part, end in zip(parts, ends, strict=True))
