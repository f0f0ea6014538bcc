"""Cut a model that one device cannot hold into a chain of stages through which the parts of all queries go (our extension of P-RGE).

There is no backward pass, so a chain is only filled and emptied: with G groups of queries, a step lasts as long as one group's way through
all stages and links, and G - 1 times the slowest of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, permutations
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners.query_costs import LOSS_BYTES, METHOD, Passing, RankCosts, StepSize, passes, too_small

ALL_ORDERS_UP_TO = 4
"""So many devices, or fewer, are tried in every order; more in the cluster's order and by their memory."""


class _Way(NamedTuple):
    """A chain that covers some first layers.  sum_s: one group's way through it; slowest_s: of its stages and links.

    update_s: of the stage that takes longest for the step.
    """

    sum_s: float
    slowest_s: float
    update_s: float
    stops: tuple[int, ...]


class _Tables(NamedTuple):
    """Running sums of seconds over the layers, and fits[start][stop]."""

    group_s: list[float]
    update_s: list[float]
    fits: list[list[bool]]


def _tables(profile: Profile, cluster: Cluster, size: StepSize, rank: int, passing: Passing) -> _Tables:
    layers, budget = profile.layers[rank], cluster.devices[rank].memory_bytes
    times, parts = passes(passing.execution, passing.queries)
    rows, count = parts * size.batch_size, len(layers)
    seconds = [times * layer.seconds("F", rows, size.sequence_length) + layer.seconds("STEP", passing.queries, 1) for layer in layers]
    update = [layer.seconds("STEP", size.queries, 1) for layer in layers]
    fixed = [layer.frozen_bytes + (2 + parts) * layer.trainable_bytes for layer in layers]
    scratch = [layer.workspace_bytes(rows, size.memory_length) for layer in layers]
    crossing = [2 * layer.output_bytes(rows, size.memory_length) for layer in layers]
    fits = [[False] * (count + 1) for _ in range(count)]
    for start in range(count):
        total = most = widest = 0
        for stop in range(start + 1, count + 1):
            total, most, widest = total + fixed[stop - 1], max(most, scratch[stop - 1]), max(widest, crossing[stop - 1])
            if total + most + widest > budget:
                break
            fits[start][stop] = True
    return _Tables([0.0, *accumulate(seconds)], [0.0, *accumulate(update)], fits)


def plan_chain(profile: Profile, cluster: Cluster, size: StepSize) -> Plan | None:
    """Return the fastest chain of at least two stages, one device each; None if the model fits on none.

    Exact in its price (`chain_s`) for up to ALL_ORDERS_UP_TO devices: of all orders, cuts and executions none is faster.
    """
    best: tuple[float, tuple[int, ...], tuple[int, ...]] | None = None
    for passing in size.passings(size.queries, cut=True):
        groups = passing.groups(size.queries)
        tables = [_tables(profile, cluster, size, rank, passing) for rank in range(cluster.world_size)]
        for order in _orders(cluster):
            for way in _ways(profile, cluster, size, order, tables, passing):
                seconds = way.sum_s + (groups - 1) * way.slowest_s + way.update_s
                if best is None or seconds < best[0]:
                    best = (seconds, order[: len(way.stops)], way.stops)
    if best is None:
        return None
    _, ranks, stops = best
    stages, start = [], 0
    for rank, stop in zip(ranks, stops, strict=True):
        stages.append(Stage(start=start, stop=stop, shares=(Share(rank=rank, queries=size.queries),)))
        start = stop
    plan = Plan(method=METHOD, stages=tuple(stages), micro_batch_size=size.batch_size, num_micro_batches=1)
    seconds = chain_s(profile, cluster, plan, size, chain_passing(profile, cluster, plan, size))
    return replace(plan, predicted_s={"losses and update": seconds})


def chain_passing(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize) -> Passing:
    """Return the fastest way to send all queries through a chain.  Raises PlanError if a stage fits in none."""
    passing = min(size.passings(size.queries, cut=True), key=lambda passing: chain_s(profile, cluster, plan, size, passing))
    if math.isinf(chain_s(profile, cluster, plan, size, passing)):
        smallest = min(size.passings(size.queries, cut=True), key=lambda passing: passing.parts)
        raise next(too_small(costs, smallest.queries) for costs in _stages(profile, cluster, plan, size) if not costs.fits(smallest.parts))
    return passing


def chain_s(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize, passing: Passing) -> float:
    """Return the seconds of a step under a chain; infinity if a stage does not fit."""
    total = slowest = update = 0.0
    ranks = [stage.ranks[0] for stage in plan.stages]
    for index, costs in enumerate(_stages(profile, cluster, plan, size)):
        if not costs.fits(passing.parts):
            return math.inf
        seconds = costs.group_s(passing)
        is_last = index + 1 == len(ranks)
        sent = 0.0 if is_last else _crossing_s(profile, cluster, size, ranks[index], ranks[index + 1], costs.stop, passing)
        total, slowest = total + seconds + sent, max(slowest, seconds, sent)
        update = max(update, costs.noise_s(size.queries))
    told = sum(cluster.link(ranks[-1], rank).transfer_s(2 * LOSS_BYTES * passing.queries) for rank in ranks[:-1])
    return total + (passing.groups(size.queries) - 1) * slowest + told + update


def _stages(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize) -> list[RankCosts]:
    return [
        RankCosts(profile=profile, cluster=cluster, size=size, rank=stage.ranks[0], start=stage.start, stop=stage.stop)
        for stage in plan.stages
    ]


def _crossing_s(profile: Profile, cluster: Cluster, size: StepSize, source: int, target: int, stop: int, passing: Passing) -> float:
    rows = 2 * passing.queries * size.batch_size
    nbytes = profile.layers[source][stop - 1].output_bytes(rows, size.sequence_length)
    return cluster.link(source, target).transfer_s(nbytes)


def _orders(cluster: Cluster) -> Iterable[tuple[int, ...]]:
    ranks = range(cluster.world_size)
    if cluster.world_size <= ALL_ORDERS_UP_TO:
        return permutations(ranks)
    by_memory = sorted(ranks, key=lambda rank: -cluster.devices[rank].memory_bytes)
    return [tuple(ranks), tuple(by_memory)]


def _ways(
    profile: Profile,
    cluster: Cluster,
    size: StepSize,
    order: Sequence[int],
    tables: Sequence[_Tables],
    passing: Passing,
) -> Iterable[_Way]:
    """Yield the chains of the first 2, 3, ... devices of an order that no other of the same devices beats in all times.

    sum_s has the telling of the losses in it.
    """
    count = profile.num_layers
    front: dict[int, list[_Way]] = {0: [_Way(0.0, 0.0, 0.0, ())]}
    for index, rank in enumerate(order):
        sums, updates, fits = tables[rank]
        reached: dict[int, list[_Way]] = {}
        for start, ways in front.items():
            for stop in range(start + 1, count + 1):
                if not fits[start][stop]:
                    break
                seconds = sums[stop] - sums[start]
                sent = (
                    _crossing_s(profile, cluster, size, rank, order[index + 1], stop, passing)
                    if stop < count and index + 1 < len(order)
                    else 0.0
                )
                update = updates[stop] - updates[start]
                new = [
                    _Way(
                        way.sum_s + seconds + sent,
                        max(way.slowest_s, seconds, sent),
                        max(way.update_s, update),
                        (*way.stops, stop),
                    )
                    for way in ways
                ]
                reached[stop] = _undominated([*reached.get(stop, ()), *new])
        if index >= 1:
            told = sum(cluster.link(rank, other).transfer_s(2 * LOSS_BYTES * passing.queries) for other in order[:index])
            yield from (way._replace(sum_s=way.sum_s + told) for way in reached.get(count, ()))
        front = {stop: ways for stop, ways in reached.items() if stop < count}


def _undominated(ways: list[_Way]) -> list[_Way]:
    kept: list[_Way] = []
    for way in sorted(ways):
        if not any(other.slowest_s <= way.slowest_s and other.update_s <= way.update_s for other in kept):
            kept.append(way)
    return kept
