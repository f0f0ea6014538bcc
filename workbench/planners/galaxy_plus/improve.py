"""Improve a plan step by step by a price other than Eq. 9, such as a simulation with overlap, while its memory allows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.memory import MemoryRule, check_inference
from workbench.planners.galaxy_plus.times import capacity, stack_lengths

Moved = Callable[[InferencePlan, float], Iterator[InferencePlan]]
FIRST_STEP = 0.125
LAST_STEP = 0.01


def improve(
    plan: InferencePlan,
    seconds: float,
    price: Callable[[InferencePlan], float],
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    most: int,
    length: int,
    decoder_length: int | None,
    memory: MemoryRule,
    schemes_free: bool = True,
    ring_free: bool = True,
    portal_free: bool = True,
    allowed: Sequence[int] = (),
    tiles: Callable[[InferencePlan], int] | None = None,
) -> tuple[InferencePlan, float]:
    """Return the plan and its price after at most `most` other plans were priced; each that is faster is the next to start from.

    seconds: the plan's own price.  length, decoder_length: tokens that must fit.  Moves, coarse before fine: a device of
    `allowed` that was left out joins the ring, schemes of some layers, neighbours in the ring changed, tokens, columns and heads from
    position to position.
    tiles: tile_tokens of a plan, if a rule gives it.
    """
    kinds: list[Moved] = [_tokens, _columns, _units]
    if ring_free:
        kinds.insert(0, lambda one, step: _ring(one, step, portal_free))
    if schemes_free:
        kinds.insert(0, lambda one, step: _schemes(profile, one, step))
    if ring_free:
        capacities = {rank: capacity(profile, rank, stack_lengths(profile, length, decoder_length)) for rank in {*allowed, *plan.ranks}}
        kinds.insert(0, lambda one, step: _joined(one, step, capacities, portal_free))
    seen, step = {plan}, FIRST_STEP
    while step >= LAST_STEP and most > 0:
        better = False
        for moved in kinds:
            for found in moved(plan, step):
                one = found if tiles is None else replace(found, tile_tokens=tiles(found))
                if one in seen:
                    continue
                seen.add(one)
                try:
                    check_inference(one, profile, cluster, length=length, decoder_length=decoder_length, memory=memory)
                except PlanError:
                    continue
                if most <= 0:
                    return plan, seconds
                value, most = price(one), most - 1
                if value < seconds * (1 - 1e-4):
                    plan, seconds, better = one, value, True
                    break
        if not better:
            step /= 2
    return plan, seconds


def _shifts(parts: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the parts with `step` moved between two positions, from the largest part first and to the smallest first."""
    by_size = sorted(range(len(parts)), key=lambda position: -parts[position])
    for giver, taker in itertools.product(by_size, reversed(by_size)):
        if giver != taker and parts[giver] >= step:
            moved = list(parts)
            moved[giver] -= step
            moved[taker] += step
            yield tuple(moved)


def _tokens(plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    tokens = plan.tokens(plan.length)
    count = plan.num_positions
    whole = [plan.length * (position + 1) // count - plan.length * position // count for position in range(count)]
    for part in (1.0, 0.5) if step == FIRST_STEP else ():  # towards equal parts, as rings like them
        mixed = [round((1 - part) * now + part * equal) for now, equal in zip(tokens, whole, strict=True)]
        mixed[0] += plan.length - sum(mixed)
        if min(mixed) >= 0:
            yield replace(plan, shares=tuple(float(number) for number in mixed))
    for parts in _shifts(tokens, max(1, round(step * plan.length))):
        yield replace(plan, shares=tuple(float(number) for number in parts))


def _columns(plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    if 1 in plan.schemes:
        for parts in _shifts(plan.columns, max(1, round(step * sum(plan.columns)))):
            yield replace(plan, columns=parts)


def _units(plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    for parts in _shifts(plan.units, max(1, round(step * sum(plan.units)))):
        yield replace(plan, units=parts)


def _joined(plan: InferencePlan, step: float, capacities: Mapping[int, float], portal_free: bool) -> Iterator[InferencePlan]:
    """Yield the ring with one device more, which gets tokens and columns by its capacity, or half of that, and no heads.

    A slow device may be worth its part of the feed-forward networks while its part of the heads, a whole one, is too much for it.
    """
    if step < FIRST_STEP:
        return
    in_ring = sum(capacities[rank] for rank in plan.ranks)
    for rank in (rank for rank in capacities if rank not in plan.ranks):
        for part in (1.0, 0.5):
            share = part * capacities[rank] / (in_ring + capacities[rank])
            columns = round(share * sum(plan.columns))
            rest = proportional_parts(sum(plan.columns) - columns, plan.columns)
            for at in range(0 if portal_free else 1, plan.num_positions + 1):
                shares = [(1 - share) * own for own in plan.shares]
                yield replace(
                    plan,
                    ranks=(*plan.ranks[:at], rank, *plan.ranks[at:]),
                    units=(*plan.units[:at], 0, *plan.units[at:]),
                    columns=(*rest[:at], columns, *rest[at:]),
                    shares=(*shares[:at], share * sum(plan.shares), *shares[at:]),
                )


def _schemes(profile: InferenceProfile, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    """Yield other numbers of scheme-2 layers in each stack, the first layers of each."""
    numbers, first = [], 0
    for shape in profile.stacks:
        numbers.append(plan.schemes[first : first + shape.num_layers].count(2))
        first += shape.num_layers
    for at, shape in enumerate(profile.stacks):
        few = max(1, round(step * shape.num_layers))
        for q in dict.fromkeys((shape.num_layers, 0, numbers[at] + few, numbers[at] - few)):
            if 0 <= q <= shape.num_layers and q != numbers[at]:
                schemes: tuple[int, ...] = ()
                for other, one in enumerate(profile.stacks):
                    second = q if other == at else numbers[other]
                    schemes += (2,) * second + (1,) * (one.num_layers - second)
                yield replace(plan, schemes=schemes)


def _ring(plan: InferencePlan, step: float, portal_free: bool) -> Iterator[InferencePlan]:
    """Yield the plan with two neighbours in the ring changed, each position keeping its work."""
    if step < FIRST_STEP:
        return
    first = 0 if portal_free else 1
    for i in range(first, plan.num_positions - 1):
        order = list(range(plan.num_positions))
        order[i], order[i + 1] = order[i + 1], order[i]
        yield replace(
            plan,
            ranks=tuple(plan.ranks[at] for at in order),
            units=tuple(plan.units[at] for at in order),
            columns=tuple(plan.columns[at] for at in order),
            shares=tuple(plan.shares[at] for at in order),
        )
