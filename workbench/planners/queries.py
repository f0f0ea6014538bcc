"""Divide q queries among unequal devices (P-RGE's outer loop, Algorithm 1 line 4, spread over a cluster; our extension of the paper).

Every device that holds the model takes some of the queries, both signs of each; losses are exchanged, and every device makes the same
update.  The step lasts until the slowest device has told its last losses.  A chain of stages holds a model that no device can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners.query_chain import chain_passing, plan_chain
from workbench.planners.query_costs import METHOD, Passing, RankCosts, StepSize, too_small, whole

ALL_SETS_UP_TO = 10
"""So many devices, or fewer, are tried in every combination; of more, the k fastest for every k."""


def chosen_passings(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize) -> dict[int, Passing]:
    """Return how every rank of a plan computes its queries: the fastest way that fits in its memory; along a chain all in the same.

    Raises PlanError, naming device and bytes, if a rank's share fits in no way.
    """
    if len(plan.stages) > 1:
        passing = chain_passing(profile, cluster, plan, size)
        return dict.fromkeys((rank for stage in plan.stages for rank in stage.ranks), passing)
    costs = whole(profile, cluster, size)
    chosen: dict[int, Passing] = {}
    for share in plan.stages[0].shares:
        if share.queries:
            best = costs[share.rank].best(share.queries)[1]
            if best is None:
                raise too_small(costs[share.rank], share.queries)
            chosen[share.rank] = best
    return chosen


def step_s(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize) -> float:
    """Return the seconds of a step under a plan of one stage: the slowest device's, its losses told, and the update.

    Infinity if a device's share does not fit.
    """
    (stage,) = plan.stages
    costs = whole(profile, cluster, size)
    ranks = [share.rank for share in stage.shares if share.queries]
    slowest = max(_share_s(costs[share.rank], ranks, share.queries) for share in stage.shares if share.queries)
    return slowest + max(costs[rank].noise_s(size.queries) for rank in ranks)


def _share_s(costs: RankCosts, ranks: Sequence[int], queries: int) -> float:
    seconds, passing = costs.best(queries)
    return seconds if passing is None else seconds + costs.told_s(ranks, 2 * passing.queries)


def plan_queries(profile: Profile, cluster: Cluster, size: StepSize) -> Plan:
    """Return the plan with the shortest step: who takes how many queries, or which layers.

    Exact: of all divisions of the queries among all sets of devices none has a smaller `step_s` (more than ALL_SETS_UP_TO devices: of
    the sets of the k fastest).  A device's seconds are taken not to fall with the number of its queries.  Where a device cannot hold the
    model, chains of stages are compared, too.  Raises PlanError, naming device and bytes, if nothing fits.
    """
    found = _divided(profile, cluster, size)
    holds_all = all(costs.fits(1) for costs in whole(profile, cluster, size))
    if cluster.world_size > 1 and not holds_all:
        chain = plan_chain(profile, cluster, size)
        if chain is not None and (found is None or chain.total_s < found.total_s):
            found = chain
    if found is None:
        roomiest = max(whole(profile, cluster, size), key=lambda costs: cluster.devices[costs.rank].memory_bytes)
        raise too_small(roomiest, 1)
    return found


def _divided(profile: Profile, cluster: Cluster, size: StepSize) -> Plan | None:
    costs, queries = whole(profile, cluster, size), size.queries
    able = [rank for rank in range(cluster.world_size) if costs[rank].best(1)[1] is not None]
    alone = {rank: costs[rank].best(1)[0] for rank in able}
    if len(able) <= ALL_SETS_UP_TO:
        sets = [ranks for count in range(1, len(able) + 1) for ranks in combinations(able, count)]
    else:
        fastest = sorted(able, key=lambda rank: (alone[rank], rank))
        sets = [tuple(sorted(fastest[:count])) for count in range(1, len(able) + 1)]
    best_s, best = math.inf, None
    for ranks in sets:
        if len(ranks) > queries:
            continue
        tables = {rank: _rising(costs[rank], ranks, queries) for rank in ranks}
        counts = smallest_maximum([tables[rank] for rank in ranks], queries)
        if counts is None:
            continue
        slowest = max(tables[rank][count] for rank, count in zip(ranks, counts, strict=True) if count)
        seconds = slowest + max(costs[rank].noise_s(queries) for rank in ranks)
        if seconds < best_s * (1 - 1e-9):  # fewer devices come first, and stay where more gain nothing
            shares = tuple(Share(rank=rank, queries=count) for rank, count in zip(ranks, counts, strict=True) if count)
            best_s, best = seconds, shares
    if best is None:
        return None
    plan = Plan(
        method=METHOD,
        stages=(Stage(start=0, stop=profile.num_layers, shares=best),),
        micro_batch_size=size.batch_size,
        num_micro_batches=1,
    )
    update_s = max(costs[share.rank].noise_s(queries) for share in best)
    return replace(plan, predicted_s={"losses": step_s(profile, cluster, plan, size) - update_s, "update": update_s})


def _rising(costs: RankCosts, ranks: Sequence[int], queries: int) -> list[float]:
    """Return the seconds of 0, 1, ... queries, never falling: a dip in measured times is noise."""
    return list(accumulate((_share_s(costs, ranks, count) if count else 0.0 for count in range(queries + 1)), max))


def smallest_maximum(tables: Sequence[Sequence[float]], total: int) -> list[int] | None:
    """Return how many of `total` like things each taker gets so that max tables[i][count_i] is smallest; None if they do not all fit.

    tables[i][n]: the seconds of taker i with n things, not falling in n; infinity where it cannot.
    """
    levels = sorted({seconds for table in tables for seconds in table if math.isfinite(seconds)})
    low, high = 0, len(levels) - 1
    if not levels or sum(_most(table, levels[high]) for table in tables) < total:
        return None
    while low < high:
        middle = (low + high) // 2
        if sum(_most(table, levels[middle]) for table in tables) >= total:
            high = middle
        else:
            low = middle + 1
    counts = [_most(table, levels[low]) for table in tables]
    for _ in range(sum(counts) - total):  # one less where it relieves most
        slowest = max((index for index in range(len(tables)) if counts[index]), key=lambda index: tables[index][counts[index]])
        counts[slowest] -= 1
    return counts


def _most(table: Sequence[float], limit_s: float) -> int:
    return max(count for count, seconds in enumerate(table) if seconds <= limit_s or count == 0)
