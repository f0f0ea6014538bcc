"""Improve a plan step by step under any cost function, beyond Algorithm 1's balanced partitions (PAC+, section V-A, Eq.
7).

Algorithm 1 balances forward plus backward of the stages and considers one plan for each number of stages.  Messages,
all-reduces and the order of the phases count only in Eq. 5-7, and waiting counts nowhere.  So a neighbouring plan may
be faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners import memory
from workbench.planners.balance import StageTimes
from workbench.planners.closed_form import ClosedForm
from workbench.planners.hybrid import candidates
from workbench.planners.orders import OTHER_ORDER
from workbench.planners.problem import Problem

Shape = tuple[tuple[int, tuple[int, ...]], ...]  # for each stage: its layers, and its group

Stages = tuple[Stage, ...]

GAIN = 1e-6
"""The minimum relative gain of a step."""
NEAR = 1.1
"""A plan whose closed-form time is higher by this factor is skipped: its cost is unlikely to be lower."""
MAX_CLOSED = 400
"""After this many closed-form evaluations no further start is improved: 0.03 s."""


def refine(
    starts: Sequence[Plan], problem: Problem[Profile], price: Callable[[Plan], float], *, max_prices: int = 400
) -> Plan:
    """Return a plan at least as good by `price` (seconds of a step) as starts[0], which fits in memory like the starts.

    starts: plans with one micro-batch size.  The closed form (PhaseTimes.bottleneck_s) improves them, the best first,
    until no move helps.  The best plan by `price` among all these is then improved by `price`.
    A move takes layers over a boundary, one sample from one rank of a group to another, one device to another stage or
    to or from idleness, swaps two devices or two stages, merges two stages, or cuts one.  max_prices: the most calls of
    `price`.
    The shares of the cached epochs do not change.
    """
    first, profile, cluster = starts[0], problem.profile, problem.cluster
    times = StageTimes(replace(problem, batch_size=first.mini_batch_size, micro_batches=first.num_micro_batches))
    closed_form = ClosedForm(problem)
    closed: dict[Stages, float] = {}
    priced: dict[Stages, float] = {}

    def closed_s(stages: Stages) -> float:
        if stages not in closed:
            closed[stages] = closed_form(stages, first.num_micro_batches).bottleneck_s
        return closed[stages]

    def priced_s(stages: Stages) -> float:
        if stages not in priced:
            priced[stages] = price(replace(first, stages=stages)) if len(priced) < max_prices else math.inf
        return priced[stages]

    def descend(best: Stages, value: Callable[[Stages], float], near: float) -> Stages:
        """Return the stages at which no neighbour is better; each step takes the first better one in closed-form
        order.
        """
        improved = True
        while improved:
            improved = False
            moves = dict.fromkeys(_neighbours(best, first, times, cluster.world_size, profile.num_layers))
            for stages in sorted(moves, key=closed_s):
                if closed_s(stages) > near * closed_s(best):
                    break
                if fits(stages) and value(stages) < value(best) * (1 - GAIN):
                    best, improved = stages, True
                    break
        return best

    def fits(stages: Stages) -> bool:
        needs = memory.plan_needs(profile, replace(first, stages=stages), sequence_length=problem.longest)
        return memory.fits(cluster, needs)

    reached = dict.fromkeys(plan.stages for plan in starts)
    for stages in sorted(reached, key=closed_s):
        if len(closed) < MAX_CLOSED:
            reached[descend(stages, closed_s, 1.0)] = None
    least_s = min(map(closed_s, reached))
    near = [stages for stages in sorted(reached, key=closed_s) if closed_s(stages) <= NEAR * least_s]
    best = descend(min((first.stages, *near), key=priced_s), priced_s, NEAR)
    if best == first.stages:
        return first
    parts = closed_form(best, first.num_micro_batches).parts()
    why = (
        f"A search around the first plan ({first.where()}) shortened the step from {1e3 * priced[first.stages]:.4g} to "
        f"{1e3 * priced[best]:.4g} ms (simulated)."
    )
    return replace(
        first, stages=best, predicted_s=parts, notes=(*(note for note in first.notes if note == OTHER_ORDER), why)
    )


def refine_on_any_count(
    starts: Sequence[Plan],
    problem: Problem[Profile],
    price: Callable[[Plan], float],
    *,
    method: str,
    max_prices: int = 400,
) -> Plan:
    """Return the plan that `refine` finds from the starts, or a faster one on the fastest 1, 2, 4, ... devices.

    Algorithm 1 uses all devices.  The closed form, which does not see waiting, may find no reason to leave one out, and
    from all devices no small change leads to a plan of few.  method: the plans' method.
    """
    refined = refine(starts, problem, price, max_prices=max_prices)
    limit_s, world_size = price(refined), problem.cluster.world_size
    alone_s = [problem.profile.train_s(rank, problem.batch_size, problem.sequence_length) for rank in range(world_size)]
    fastest = sorted(range(world_size), key=alone_s.__getitem__)
    fewer: list[Plan] = []
    count = 1
    while count < world_size:
        # However they share a mini-batch, computing alone takes them so long.
        together_s = 1 / sum(1 / max(alone_s[rank], 1e-12) for rank in fastest[:count])
        if together_s < limit_s:
            with contextlib.suppress(PlanError):  # where the model does not fit
                order = sorted(fastest[:count])
                fewer.append(candidates(problem, order=order, objective="bottleneck", method=method)[0])
        count *= 2
    near = [plan for plan in fewer if price(plan) <= NEAR * limit_s]
    return min(refined, refine(near, problem, price, max_prices=max_prices), key=price) if near else refined


def _neighbours(current: Stages, plan: Plan, times: StageTimes, world_size: int, num_layers: int) -> Iterator[Stages]:
    """Yield the stages one move away that fit.  Where layers or devices have changed, Eq. 4 divides the samples."""
    size, count = plan.micro_batch_size, len(current)
    for index, stage in enumerate(current):
        for shares in _sample_moves(stage.shares):
            yield (*current[:index], replace(stage, shares=shares), *current[index + 1 :])
    shape: Shape = tuple((stage.num_layers, stage.ranks) for stage in current)
    idle = sorted(set(range(world_size)).difference(*(stage.ranks for stage in current)))
    lives = [memory.in_flight(index, count, plan.num_micro_batches) for index in range(count)]
    old = {
        (stage.start, stage.stop, frozenset(stage.ranks), live): stage
        for stage, live in zip(current, lives, strict=True)
    }
    for moved in (*_layer_moves(shape), *_device_moves(shape, idle), *_stage_moves(shape)):
        if len(moved) > num_layers:
            continue
        stages: list[Stage] = []
        start = 0
        for index, (layers, group) in enumerate(moved):
            live = memory.in_flight(index, len(moved), plan.num_micro_batches)
            key = (start, start + layers, frozenset(group), live)
            if key not in old:
                samples = times.shares(start, start + layers, group, live)
                if sum(samples) != size:
                    break
                shares = tuple(
                    Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share
                )
                old[key] = Stage(start=start, stop=start + layers, shares=shares)
            stages.append(old[key])
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
        for step in (1, -1, 2, -2):
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
                    swapped = tuple(rank if place == other else place for place in others)
                    yield _with_groups(shape, {source: (*rest, other), target: swapped})


def _stage_moves(shape: Shape) -> Iterator[Shape]:
    for first, other in combinations(range(len(shape)), 2):
        yield tuple(shape[{first: other, other: first}.get(index, index)] for index in range(len(shape)))
    for index, (layers, group) in enumerate(shape):
        if index + 1 < len(shape):
            following, others = shape[index + 1]
            yield (*shape[:index], (layers + following, (*group, *others)), *shape[index + 2 :])
        for cut in range(1, len(group)):
            if layers > 1:
                yield (
                    *shape[:index],
                    (layers // 2, group[:cut]),
                    (layers - layers // 2, group[cut:]),
                    *shape[index + 1 :],
                )


def _with_groups(shape: Shape, groups: dict[int, tuple[int, ...]]) -> Shape:
    return tuple((layers, groups.get(index, group)) for index, (layers, group) in enumerate(shape))
