"""Improve a plan step by step, with any price as judge: what Algorithm 1's balanced partitions leave (PAC+, section V-A, Eq. 7).

Algorithm 1 balances forward plus backward of the stages and looks at one plan for each number of stages.  Messages, all-reduces and
the order of the phases count only in Eq. 5-7, and waiting nowhere.  So a neighbouring plan may be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners import memory
from workbench.planners.dispatch import StageTimes
from workbench.planners.pricing import Pricer

Shape = tuple[tuple[int, tuple[int, ...]], ...]  # of each stage: its layers, and its group

GAIN = 1e-6
"""The least share by which a step must be faster."""


def refine(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    price: Callable[[Plan], float],
    *,
    sequence_length: int,
    memory_length: int | None = None,
    max_prices: int = 400,
) -> Plan:
    """Return a plan at least as good by `price` (seconds of a step), which fits in memory as `plan` did; `plan` itself if none is better.

    A move takes one layer over a boundary, one sample from one rank of a group to another, one device to another stage, to or from
    idleness, exchanges two devices, merges two stages, or cuts one.  Moves are tried in the order of their closed-form price
    (pricing.Price.bottleneck_s); the first that helps is made.  max_prices: how often `price` may be asked.
    The shares of the cached epochs stay as they are.
    """
    longest = sequence_length if memory_length is None else memory_length
    times = StageTimes(
        profile,
        cluster,
        micro_batch_size=plan.micro_batch_size,
        sequence_length=sequence_length,
        memory_length=longest,
        max_in_flight=min(cluster.world_size, profile.num_layers, plan.num_micro_batches),
    )
    pricer = Pricer(profile, cluster, sequence_length=sequence_length)

    def remade(stages: tuple[Stage, ...]) -> Plan:
        return replace(plan, stages=stages, predicted_s=pricer(stages, plan.num_micro_batches).parts(), notes=())

    seen = {plan.stages}
    first_s = best_s = price(plan)
    best, asked = plan, 1
    improved = True
    while improved:
        improved = False
        moves = dict.fromkeys(stages for stages in _neighbours(best, times, cluster.world_size, profile.num_layers) if stages not in seen)
        for stages in sorted(moves, key=lambda stages: pricer(stages, plan.num_micro_batches).bottleneck_s):
            if asked >= max_prices:
                break
            seen.add(stages)
            made = remade(stages)
            needs = memory.plan_needs(profile, made, sequence_length=longest)
            if any(need.total_bytes > cluster.devices[rank].memory_bytes for rank, need in needs.items()):
                continue
            asked += 1
            seconds = price(made)
            if seconds < best_s * (1 - GAIN):
                best, best_s, improved = made, seconds, True
                break
    if best is plan:
        return plan
    return replace(best, notes=(f"Refined from {plan.partition()} on {plan.grouping()}: {first_s:.4g} s became {best_s:.4g} s.",))


def _neighbours(plan: Plan, times: StageTimes, world_size: int, num_layers: int) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages one move away, samples divided by Eq. 4 wherever layers or devices have changed; those that fit nowhere left out."""
    size, count = plan.micro_batch_size, len(plan.stages)
    for index, stage in enumerate(plan.stages):
        for shares in _sample_moves(stage.shares):
            yield (*plan.stages[:index], replace(stage, shares=shares), *plan.stages[index + 1 :])
    shape: Shape = tuple((stage.num_layers, stage.ranks) for stage in plan.stages)
    idle = [rank for rank in range(world_size) if plan.stage_of(rank) is None]
    lives = [memory.in_flight(index, count, plan.num_micro_batches) for index in range(count)]
    old = {(stage.start, stage.stop, frozenset(stage.ranks), live): stage.shares for stage, live in zip(plan.stages, lives, strict=True)}
    for moved in (*_layer_moves(shape), *_device_moves(shape, idle), *_stage_moves(shape)):
        if len(moved) > num_layers:
            continue
        stages, start = [], 0
        for index, (layers, group) in enumerate(moved):
            live = memory.in_flight(index, len(moved), plan.num_micro_batches)
            key = (start, start + layers, frozenset(group), live)
            if key in old:
                shares = old[key]
            else:
                samples = times.shares(start, start + layers, group, live)
                if sum(samples) != size:
                    break
                shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share)
            stages.append(Stage(start=start, stop=start + layers, shares=shares))
            start += layers
        else:
            yield tuple(stages)


def _sample_moves(shares: tuple[Share, ...]) -> Iterator[tuple[Share, ...]]:
    for giver in shares:
        for taker in shares:
            if giver is not taker and giver.samples > 0:
                change = {giver.rank: -1, taker.rank: 1}
                moved = (replace(share, samples=share.samples + change.get(share.rank, 0)) for share in shares)
                yield tuple(share for share in moved if share.samples > 0)


def _layer_moves(shape: Shape) -> Iterator[Shape]:
    for index in range(len(shape) - 1):
        for step in (1, -1):
            (left, first), (right, second) = shape[index : index + 2]
            if left + step > 0 and right - step > 0:
                yield (*shape[:index], (left + step, first), (right - step, second), *shape[index + 2 :])


def _device_moves(shape: Shape, idle: Sequence[int]) -> Iterator[Shape]:
    for rank in idle:
        for target in range(len(shape)):
            yield _with_groups(shape, {target: (*shape[target][1], rank)})
    for source, (_, group) in enumerate(shape):
        for rank in group:
            rest = tuple(other for other in group if other != rank)
            if rest:
                yield _with_groups(shape, {source: rest})
            for spare in idle:
                yield _with_groups(shape, {source: (*rest, spare)})
            for target, (_, others) in enumerate(shape):
                if target == source:
                    continue
                if rest:
                    yield _with_groups(shape, {source: rest, target: (*others, rank)})
                for other in others if target > source else ():
                    swapped = tuple(rank if one == other else one for one in others)
                    yield _with_groups(shape, {source: (*rest, other), target: swapped})


def _stage_moves(shape: Shape) -> Iterator[Shape]:
    for index, (layers, group) in enumerate(shape):
        if index + 1 < len(shape):
            following, others = shape[index + 1]
            yield (*shape[:index], (layers + following, (*group, *others)), *shape[index + 2 :])
        for cut in range(1, len(group)):
            for left in sorted({max(1, min(layers - 1, round(layers * cut / len(group)))), max(1, layers // 2)}):
                if left < layers:
                    yield (*shape[:index], (left, group[:cut]), (layers - left, group[cut:]), *shape[index + 1 :])


def _with_groups(shape: Shape, groups: dict[int, tuple[int, ...]]) -> Shape:
    return tuple((layers, groups.get(index, group)) for index, (layers, group) in enumerate(shape))
