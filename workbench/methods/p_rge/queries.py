"""Divide a step's queries among unequal devices (P-RGE's outer loop, Algorithm 1 line 4, spread over a cluster; our
extension of the paper).

Every device that has the model computes some of the queries, with all parts.  The devices exchange losses and apply
the same update.
The step ends when the slowest device has sent its last losses.  If a model fits on no single device, a chain of stages
computes it.

There is no backward pass, so a chain is only filled and emptied.  With G groups of queries, a step takes one group's
way through all stages and links, plus G - 1 times the slowest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, permutations
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import on_air_s
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.methods.p_rge.estimator_table import ESTIMATORS
from workbench.methods.p_rge.options import METHOD
from workbench.methods.p_rge.query_costs import (
    LOSS_BYTES,
    Passing,
    QueryCosts,
    full_model_costs,
    momentum_copies,
    passings,
    refusal,
    stage_costs,
)
from workbench.planners.problem import Problem
from workbench.planners.shares import SAVES, device_sets, smallest_maximum


def chosen_passings(problem: Problem[Profile], plan: Plan) -> dict[int, Passing]:
    """Return how every rank of a plan computes its queries: by the fastest way that fits in its memory; in a chain all
    use the same way.

    Raises PlanError, naming device and bytes, if no way fits for a rank's share.
    """
    if len(plan.stages) > 1:
        passing = chain_passing(problem, plan)
        return dict.fromkeys((rank for stage in plan.stages for rank in stage.ranks), passing)
    costs = full_model_costs(problem)
    chosen: dict[int, Passing] = {}
    for share in plan.stages[0].shares:
        if share.queries:
            best = costs[share.rank].best(share.queries)[1]
            if best is None:
                raise refusal(costs[share.rank], share.queries)
            chosen[share.rank] = best
    return chosen


def _share_s(costs: QueryCosts, ranks: Sequence[int], queries: int) -> float:
    seconds, passing = costs.best(queries)
    return seconds if passing is None else seconds + costs.told_s(ranks, passing.query_parts * passing.queries)


def plan_queries(problem: Problem[Profile]) -> Plan:
    """Return the plan with the shortest step: the queries, or the layers, of each device.

    Exact: no division of the queries among any set of devices is faster (with more than ALL_SETS_UP_TO devices: among
    the sets of the k fastest).  This assumes that a device's seconds do not fall with more queries.  If the model does
    not fit on a device, chains of stages are compared, too, unless the passes carry derivatives.  Raises PlanError,
    naming device and bytes, if nothing fits.
    """
    plan = _divided(problem)
    holds_all = all(costs.fits(1) for costs in full_model_costs(problem))
    if problem.cluster.world_size > 1 and not holds_all and not ESTIMATORS[problem.estimator].tangent:
        chain = plan_chain(problem)
        if chain is not None and (plan is None or chain.total_s < plan.total_s):
            plan = chain
    if plan is None:
        roomiest = max(full_model_costs(problem), key=lambda costs: problem.cluster.devices[costs.rank].memory_bytes)
        raise refusal(roomiest, -(-problem.queries // problem.cluster.world_size))
    return plan


def _divided(problem: Problem[Profile]) -> Plan | None:
    costs, queries = full_model_costs(problem), problem.queries
    able = [rank for rank in range(problem.cluster.world_size) if costs[rank].best(1)[1] is not None]
    best_s, update_s, best = math.inf, 0.0, tuple[Share, ...]()
    for ranks in device_sets({rank: costs[rank].best(1)[0] for rank in able}):
        if len(ranks) > queries:
            continue
        tables = [_rising(costs[rank], ranks, queries) for rank in ranks]
        counts = smallest_maximum(tables, queries)
        if counts is None or 0 in counts:
            continue
        noise_s = max(costs[rank].noise_s(queries) for rank in ranks)
        seconds = noise_s + max(table[count] for table, count in zip(tables, counts, strict=True))
        if seconds < best_s * SAVES:
            best_s, update_s = seconds, noise_s
            best = tuple(Share(rank=rank, queries=count) for rank, count in zip(ranks, counts, strict=True))
    if not best:
        return None
    return Plan(
        method=METHOD,
        stages=(Stage(start=0, stop=problem.profile.num_layers, shares=best),),
        micro_batch_size=problem.batch_size,
        num_micro_batches=1,
        predicted_s={"losses": best_s - update_s, "update": update_s},
    )


def _rising(costs: QueryCosts, ranks: Sequence[int], queries: int) -> list[float]:
    """Return the seconds of 0, 1, ... queries, made monotone, because a decrease in measured times is noise."""
    return list(accumulate((_share_s(costs, ranks, count) if count else 0.0 for count in range(queries + 1)), max))


ALL_ORDERS_UP_TO = 4
"""Up to this many devices are tried in every order; with more, the cluster's order and the order by memory."""


class _Way(NamedTuple):
    """A chain that covers some first layers.

    sum_s: seconds of one group's way through it.  slowest_s: seconds of the slowest of its stages and links.

    update_s: seconds of the longest update of a stage.  air_s: seconds of all its messages if they share the air.
    """

    sum_s: float
    slowest_s: float
    update_s: float
    stops: tuple[int, ...]
    air_s: float = 0.0


class _Tables(NamedTuple):
    """Running sums of seconds over the layers, and fits[start][stop]."""

    group_s: list[float]
    update_s: list[float]
    fits: list[list[bool]]


def _tables(problem: Problem[Profile], rank: int, passing: Passing) -> _Tables:
    layers, budget = problem.profile.layers[rank], problem.cluster.devices[rank].memory_bytes
    times, parts = passing.passes(passing.queries)
    rows, count = parts * problem.batch_size, len(layers)
    seconds = [
        times * layer.seconds("F", rows, problem.sequence_length) + layer.seconds("STEP", passing.queries, 1)
        for layer in layers
    ]
    update = [layer.seconds("STEP", problem.queries, 1) for layer in layers]
    copies = 2 + momentum_copies(problem) + parts
    fixed = [layer.frozen_bytes + copies * layer.trainable_bytes for layer in layers]
    scratch = [layer.workspace_bytes(rows, problem.longest) for layer in layers]
    crossing = [2 * layer.output_bytes(rows, problem.longest) for layer in layers]
    fits = [[False] * (count + 1) for _ in range(count)]
    for start in range(count):
        total = most = widest = 0
        for stop in range(start + 1, count + 1):
            total, most, widest = total + fixed[stop - 1], max(most, scratch[stop - 1]), max(widest, crossing[stop - 1])
            if total + most + widest > budget:
                break
            fits[start][stop] = True
    return _Tables([0.0, *accumulate(seconds)], [0.0, *accumulate(update)], fits)


def plan_chain(problem: Problem[Profile]) -> Plan | None:
    """Return the fastest chain of at least two stages with one device each; None if the model fits on no chain.

    Exact in its cost (`chain_s`) for up to ALL_ORDERS_UP_TO devices: no other order, cut or execution is faster.
    """
    best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
    for passing in passings(problem, problem.queries, cut=True):
        groups = passing.groups(problem.queries)
        tables = [_tables(problem, rank, passing) for rank in range(problem.cluster.world_size)]
        for order in _orders(problem.cluster):
            for way in _ways(problem, order, tables, passing):
                seconds = way.sum_s + (groups - 1) * way.slowest_s + way.update_s
                if best is None or seconds < best[0]:
                    best = (seconds, order[: len(way.stops)], way.stops)
    if best is None:
        return None
    seconds, ranks, stops = best
    stages, start = [], 0
    for rank, stop in zip(ranks, stops, strict=True):
        stages.append(Stage(start=start, stop=stop, shares=(Share(rank=rank, queries=problem.queries),)))
        start = stop
    predicted = {"losses and update": seconds}
    return Plan(
        method=METHOD,
        stages=tuple(stages),
        micro_batch_size=problem.batch_size,
        num_micro_batches=1,
        predicted_s=predicted,
    )


def chain_passing(problem: Problem[Profile], plan: Plan) -> Passing:
    """Return the fastest way to run all queries through a chain.  Raises PlanError if no way fits for a stage."""
    passing = min(passings(problem, problem.queries, cut=True), key=lambda passing: chain_s(problem, plan, passing))
    if math.isinf(chain_s(problem, plan, passing)):
        smallest = min(passings(problem, problem.queries, cut=True), key=lambda passing: passing.parts)
        stages = stage_costs(problem, plan).values()
        raise next(refusal(costs, smallest.queries) for costs in stages if not costs.fits(smallest.parts))
    return passing


def chain_s(problem: Problem[Profile], plan: Plan, passing: Passing) -> float:
    """Return the seconds of a step under a chain; infinity if a stage does not fit.

    On shared air the messages of a group pass one after another, so they bound the time between two groups together.
    """
    total = slowest = update = air = 0.0
    ranks = [stage.ranks[0] for stage in plan.stages]
    for index, costs in enumerate(stage_costs(problem, plan).values()):
        if not costs.fits(passing.parts):
            return math.inf
        seconds = costs.group_s(passing)
        is_last = index + 1 == len(ranks)
        send_s = 0.0 if is_last else _crossing_s(problem, ranks[index], ranks[index + 1], costs.stop, passing)
        air += 0.0 if is_last else _on_air_s(problem, ranks[index], ranks[index + 1], costs.stop, passing)
        total, slowest = total + seconds + send_s, max(slowest, seconds, send_s, air)
        update = max(update, costs.noise_s(problem.queries))
    notice_s = sum(
        problem.cluster.link(ranks[-1], rank).transfer_s(passing.query_parts * LOSS_BYTES * passing.queries)
        for rank in ranks[:-1]
    )
    return total + (passing.groups(problem.queries) - 1) * slowest + notice_s + update


def _crossing_bytes(problem: Problem[Profile], source: int, stop: int, passing: Passing) -> int:
    rows = passing.query_parts * passing.queries * problem.batch_size
    return problem.profile.layers[source][stop - 1].output_bytes(rows, problem.sequence_length)


def _crossing_s(problem: Problem[Profile], source: int, target: int, stop: int, passing: Passing) -> float:
    return problem.cluster.link(source, target).transfer_s(_crossing_bytes(problem, source, stop, passing))


def _on_air_s(problem: Problem[Profile], source: int, target: int, stop: int, passing: Passing) -> float:
    return on_air_s(problem.cluster, [(source, target, _crossing_bytes(problem, source, stop, passing))])


def _orders(cluster: Cluster) -> Iterable[tuple[int, ...]]:
    ranks = range(cluster.world_size)
    if cluster.world_size <= ALL_ORDERS_UP_TO:
        return permutations(ranks)
    by_memory = sorted(ranks, key=lambda rank: -cluster.devices[rank].memory_bytes)
    return [tuple(ranks), tuple(by_memory)]


def _ways(
    problem: Problem[Profile],
    order: Sequence[int],
    tables: Sequence[_Tables],
    passing: Passing,
) -> Iterable[_Way]:
    """Yield the chains of the first 2, 3, ... devices of an order, except those that another chain of the same devices
    beats in all times.

    sum_s includes sending the losses.
    """
    count = problem.profile.num_layers
    front: dict[int, list[_Way]] = {0: [_Way(0.0, 0.0, 0.0, ())]}
    for index, rank in enumerate(order):
        sums, updates, fits = tables[rank]
        reached: dict[int, list[_Way]] = {}
        for start, ways in front.items():
            send_s = _crossing_s(problem, order[index - 1], rank, start, passing) if index else 0.0
            air_s = _on_air_s(problem, order[index - 1], rank, start, passing) if index else 0.0
            for stop in range(start + 1, count + 1):
                if not fits[start][stop]:
                    break
                seconds, update = sums[stop] - sums[start], updates[stop] - updates[start]
                reached.setdefault(stop, []).extend(
                    _Way(
                        way.sum_s + send_s + seconds,
                        max(way.slowest_s, way.air_s + air_s, send_s, seconds),
                        max(way.update_s, update),
                        (*way.stops, stop),
                        way.air_s + air_s,
                    )
                    for way in ways
                )
        front = {stop: _undominated(ways) for stop, ways in reached.items()}
        ended = front.pop(count, [])
        if index >= 1:
            notice_s = sum(
                problem.cluster.link(rank, other).transfer_s(passing.query_parts * LOSS_BYTES * passing.queries)
                for other in order[:index]
            )
            yield from (way._replace(sum_s=way.sum_s + notice_s) for way in ended)


def _undominated(ways: list[_Way]) -> list[_Way]:
    undominated: list[_Way] = []
    for way in sorted(ways):
        if not any(
            other.slowest_s <= way.slowest_s and other.update_s <= way.update_s and other.air_s <= way.air_s
            for other in undominated
        ):
            undominated.append(way)
    return undominated
