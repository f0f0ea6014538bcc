"""Random unequal clusters, and the product's planner against brute force on them: `python -m
tests.planners.random_clusters 0 1000`."""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from tests.clusters import device
from tests.plans import stage as staged
from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Stage
from workbench.core.profile import Bytes, Profile
from workbench.planners import Problem, candidates, refine
from workbench.planners.balance import StageTimes
from workbench.planners.closed_form import ClosedForm
from workbench.planners.memory import in_flight

from .builders import SEQUENCE_LENGTH, layer, profile_of, simulated_s

MARGIN = 1.15
"""The closed form is above the simulation by less than this: no plan that is dearer by it is simulated."""


def random_cluster(
    seed: int, *, world_size: int | None = None, num_layers: int | None = None, max_layers: int = 10
) -> tuple[Profile, Cluster, dict[str, int]]:
    """Return layers, devices of speeds up to 100 times apart, of tight memory in half of the seeds, and a job."""
    draw = random.Random(seed)
    world_size, num_layers = world_size or draw.randint(2, 5), num_layers or draw.randint(4, max_layers)
    speeds = [10 ** draw.uniform(-2, 0) for _ in range(world_size)]
    alike = draw.random() < 0.5  # transformer layers, with embeddings in front
    sizes = [
        {
            "frozen_bytes": draw.randrange(500, 2000),
            "trainable_bytes": draw.randrange(50, 150),
            "context_bytes": Bytes(draw.randrange(5, 40)),
            "output_bytes": Bytes(draw.randrange(4, 16)),
            "workspace_bytes": Bytes(draw.randrange(0, 20)),
        }
        for _ in range(2 if alike else num_layers)
    ]
    times = [(draw.uniform(0.5, 2), draw.uniform(0.2, 3), draw.uniform(0, 1)) for _ in sizes]
    if alike:
        sizes, times = [sizes[0], *[sizes[1]] * (num_layers - 1)], [times[0], *[times[1]] * (num_layers - 1)]
    rows = [
        [layer(f / v, b / v, fixed_s=c / v, **size) for (f, b, c), size in zip(times, sizes, strict=True)]
        for v in speeds
    ]
    total = sum(size["frozen_bytes"] + 4 * size["trainable_bytes"] for size in sizes)
    tight, links = seed % 2 == 0, [draw.choice((50.0, 200.0, 1e4)) for _ in range(world_size)]
    devices = tuple(
        device(
            f"d{rank}",
            memory_bytes=int(total * draw.uniform(0.25, 1.2)) if tight else 10**9,
            bytes_per_s=links[rank],
            latency_s=draw.choice((0.0, 0.1)),
        )
        for rank in range(world_size)
    )
    micro_batches = draw.choice((2, 4))
    job = {
        "batch_size": micro_batches * draw.randint(1, 4),
        "micro_batches": micro_batches,
        "sequence_length": SEQUENCE_LENGTH,
    }
    return profile_of(rows), Cluster(name="random", devices=devices), job


def brute_force(
    profile: Profile, cluster: Cluster, job: dict[str, int], *, orders: bool
) -> list[tuple[float, tuple[Stage, ...]]]:
    """Return (bottleneck_s, stages) of every plan that fits, cheapest first: each partition of the layers x groups of
    the devices.

    orders: the groups in any order, instead of contiguous in the given one.  Samples are divided by Eq. 4.
    """
    size, micro_batches = job["batch_size"] // job["micro_batches"], job["micro_batches"]
    count, num_layers = cluster.world_size, profile.num_layers
    most = min(count, num_layers)
    times = StageTimes(Problem(profile, cluster, **job))
    closed_form = ClosedForm(Problem(profile, cluster, **job))
    results: dict[tuple[int, int, tuple[int, ...], int], Stage | None] = {}

    def stage(start: int, stop: int, group: tuple[int, ...], live: int) -> Stage | None:
        key = (start, stop, group, live)
        if key not in results:
            samples = times.shares(start, stop, group, live)
            shares = {rank: n for rank, n in zip(group, samples, strict=True) if n}
            results[key] = staged(start, stop, shares) if sum(samples) == size else None
        return results[key]

    def extend(start: int, left: tuple[int, ...], remaining: int) -> Iterator[tuple[Stage, ...]]:
        if not remaining:
            if start == num_layers and not left:
                yield ()
            return
        live = in_flight(0, remaining, micro_batches)
        sizes = range(1, len(left) - remaining + 2) if remaining > 1 else (len(left),)
        for group in (group for n in sizes for group in (itertools.combinations(left, n) if orders else [left[:n]])):
            rest = tuple(rank for rank in left if rank not in group)
            for stop in (num_layers,) if remaining == 1 else range(start + 1, num_layers - remaining + 2):
                own = stage(start, stop, group, live)
                if own is None:
                    continue
                for tail in extend(stop, rest, remaining - 1):
                    yield (own, *tail)

    values = {stages for s in range(1, most + 1) for stages in extend(0, tuple(range(count)), s)}
    return sorted(
        ((closed_form(stages, micro_batches).bottleneck_s, stages) for stages in values), key=lambda pair: pair[0]
    )


def planned(
    profile: Profile,
    cluster: Cluster,
    job: dict[str, int],
    judge: Callable[[Plan], float],
    order: Literal["all"] | None,
) -> Plan:
    """Return the plan that methods/pac_plus makes."""
    problem = Problem(profile, cluster, **job)
    plans = candidates(problem, order=order, objective="bottleneck")
    return refine(plans, problem, judge, max_prices=200)


class Result(NamedTuple):
    """ratio: our simulated step over the best plan's, None if there is no plan of ours.  refused: although some order
    fits."""

    ratio: float | None
    refused: bool = False
    told: str = ""


def compare(seed: int, order: Literal["all"] | None, *, max_layers: int = 10) -> Result:
    """Plan for a random cluster, and simulate every plan whose closed-form price does not rule it out."""
    profile, cluster, job = random_cluster(seed, max_layers=max_layers)

    def judge(plan: Plan) -> float:
        return simulated_s(profile, cluster, plan)

    try:
        plan = planned(profile, cluster, job, judge, order)
    except PlanError:
        return Result(None, refused=bool(brute_force(profile, cluster, job, orders=True)))
    ours = best_s = judge(plan)
    best = plan
    for price_s, stages in brute_force(profile, cluster, job, orders=order == "all"):
        if price_s > best_s * MARGIN:
            break
        other = replace(plan, stages=stages)
        if (seconds := judge(other)) < best_s:
            best_s, best = seconds, other
    text = f"seed {seed}, {job}: {_written(plan)} takes {ours:.4g} s, {_written(best)} {best_s:.4g} s"
    return Result(ours / best_s, told=text)


def _written(plan: Plan) -> str:
    return f"{plan.partition()} on {[stage.ranks for stage in plan.stages]}"


def _planner_s(order: Literal["all"] | None, clusters: int = 12) -> list[float]:
    """Return the process seconds of planning for 48 layers on 8 devices."""
    seconds = []
    for seed in range(clusters):
        profile, cluster, job = random_cluster(seed, world_size=8, num_layers=48)
        began = time.process_time()
        with contextlib.suppress(PlanError):
            planned(profile, cluster, job, lambda plan: simulated_s(profile, cluster, plan), order)  # noqa: B023
            seconds.append(time.process_time() - began)
    return seconds


def main(first: int, stop: int) -> None:
    """Print what becomes of seeds `first` to stop - 1."""
    orders: tuple[Literal["all"] | None, ...] = (None, "all")
    for order in orders:
        results = [compare(seed, order) for seed in range(first, stop)]
        ratios = [result.ratio for result in results if result.ratio is not None]
        print(
            f"order {order or 'given'}: {len(ratios)} plans, {sum(result.refused for result in results)} refused "
            "wrongly,"
            f" {sum(ratio > 1.05 for ratio in ratios)} above 5 %, {sum(ratio > 1.01 for ratio in ratios)} above 1 %,"
            f" worst {max(ratios):.3f}"
        )
        print(*(result.told for result in results if (result.ratio or 0) > 1.05), sep="\n")
        seconds = _planner_s(order)
        print(
            f"  48 layers on 8 devices: median {statistics.median(seconds):.3f} s, most {max(seconds):.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
