"""Our planner of hybrid model parallelism: Galaxy+ Eq. 9 searched over rings, schemes and cuts, never worse than Algorithm 1.

Beyond Algorithm 1 it leaves devices out, orders the ring, cuts heads, columns and tokens each by its own times, trades heads for columns
where memory is short, lets a device hold heads and columns without tokens, and takes the number of scheme-2 layers that is fastest,
not the largest that fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.algorithm_1 import algorithm_1
from workbench.planners.galaxy_plus.improve import improve
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, check_inference, least_missing
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.rings import rings
from workbench.planners.galaxy_plus.search import Found, refine, search_ring, variety
from workbench.planners.galaxy_plus.tables import Tables
from workbench.planners.galaxy_plus.times import checked_ranks, stack_lengths

Price = Callable[[InferencePlan], float]
Tiles = int | Callable[[InferencePlan], int]


def plan(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    price: Price | None = None,
    overlap: bool | None = True,
    both_ways: bool | None = False,
    tile_tokens: Tiles = 0,
    ranks: Sequence[int] | None = None,
    ring: Sequence[int] | None = None,
    portal: int | None = None,
    schemes: int | None = None,
    memory: MemoryRule = HELD,
    memory_length: int | None = None,
    most_candidates: int = 12,
    most_steps: int = 40,
    effort: int = 2,
    method: str = "galaxy_plus",
) -> InferencePlan:
    """Return the fastest plan found for one sequence of `length` tokens (`decoder_length` in a second stack).

    By Eq. 9, or by price(plan), seconds of a sequence by simulation say: asked of `candidates`, of the best ones' variants, and of
    `most_steps` changes of the best.  Algorithm 1's plan is always among them, so the result is never slower by the same measure.
    overlap, both_ways: as in InferencePlan; None: whatever the price prefers (without a price: True, False).
    tile_tokens: of the plan, or a rule that gives it for a plan.  Other arguments: see `candidates`.
    Raises PlanError, saying how much memory is missing and where, if no plan fits.
    """
    found = candidates(
        profile,
        cluster,
        length=length,
        decoder_length=decoder_length,
        ranks=ranks,
        ring=ring,
        portal=portal,
        schemes=schemes,
        memory=memory,
        memory_length=memory_length,
        most_candidates=most_candidates,
        effort=effort,
        method=method,
    )
    first_way = (overlap is not False, both_ways is True)
    made = [_variant(one, *first_way, tile_tokens) for one in found]
    if price is None:
        return made[0]
    if schemes is not None and made[0].num_positions > 1:
        price = of_split(price)
    priced = {one: price(one) for one in made}
    ways = list(itertools.product((True, False) if overlap is None else (overlap,), (False, True) if both_ways is None else (both_ways,)))
    # What goes round both ways may prefer another plan: each of the best is asked in every way.
    for one in sorted(made, key=lambda one: priced[one])[:3]:
        for way in ways:
            variant = _variant(one, *way, tile_tokens) if way[0] or not way[1] else one
            if variant not in priced:
                priced[variant] = price(variant)
    ordered = sorted(priced, key=lambda one: priced[one])
    best = ordered[0]
    # A plan that differs in schemes or ways may become better than the best one: both are improved.
    second = next((one for one in ordered if (one.configuration, one.both_ways) != (best.configuration, best.both_ways)), None)
    starts = [one for one in (best, second) if one is not None and one.num_positions > 1 and most_steps > 0]
    improved = [
        improve(
            one,
            priced[one],
            price,
            profile,
            cluster,
            most=most_steps // len(starts),
            length=max(length, memory_length or 0),
            decoder_length=decoder_length,
            memory=memory,
            schemes_free=schemes is None,
            ring_free=ring is None,
            portal_free=portal is None,
            allowed=checked_ranks(profile, cluster, ranks),
            tiles=None if isinstance(tile_tokens, int) else tile_tokens,
        )
        for one in starts
    ]
    chosen, seconds = min([(best, priced[best]), *improved], key=lambda pair: pair[1])
    return replace(chosen, predicted_s=seconds)


def candidates(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    ring: Sequence[int] | None = None,
    portal: int | None = None,
    schemes: int | None = None,
    memory: MemoryRule = HELD,
    memory_length: int | None = None,
    most_candidates: int = 12,
    effort: int = 2,
    method: str = "galaxy_plus",
) -> list[InferencePlan]:
    """Return plans to choose from, fastest by Eq. 9 first; different rings, schemes and cuts, and Algorithm 1's plan if it has one.

    ranks: the devices that may take part (default: all); ring: exactly these, in this order.  portal: the device that stands first and
    holds embedding and head.  schemes: 1 or 2 for all layers; then no plan leaves all to one device of several.
    memory_length: tokens that must fit (default: `length`).
    effort: 0 looks at few rings (a re-plan in milliseconds), 2 at more.
    """
    lengths = stack_lengths(profile, length, decoder_length)
    chosen = checked_ranks(profile, cluster, ring if ring is not None else ranks)
    if portal is not None and portal not in chosen:
        raise ConfigError(f"A plan with portal {portal} was asked for.", f"The devices are {list(chosen)}.", "Let the portal take part.")
    if schemes not in (None, 1, 2):
        raise ConfigError(f"Scheme {schemes} was asked for.", "There are 1 and 2.", "Choose one of them, or None.")
    longest = max(length, memory_length or 0)
    tables = Tables(profile, cluster, lengths, memory, stack_lengths(profile, longest, decoder_length))
    looked: list[Found] = []
    tried = [tuple(chosen)] if ring is not None else rings(tables, chosen, portal=portal, effort=effort)
    grid = 12 if effort < 2 else 20
    for order in tried:
        looked += search_ring(tables, order, most=grid, schemes=schemes, keep=1)
    looked.sort()
    for order in list(dict.fromkeys(found.ranks for found in looked[: 1 + effort])) or tried[:4]:
        known_s = min(looked).seconds if looked else math.inf
        looked += search_ring(tables, order, most=24, schemes=schemes, every=True, keep=2, known_s=known_s)
    looked.sort()
    refined = [refine(tables, found, schemes=schemes, holders=False) for found in looked[: 1 + effort]]
    printed = _algorithm_1(profile, cluster, tables, chosen, portal, ring is not None, schemes, longest, decoder_length)
    if printed is not None:
        refined += [printed, refine(tables, printed, schemes=schemes, holders=False)]
    refined.sort()
    if refined:
        refined.insert(0, refine(tables, refined[0], schemes=schemes))
    # Whatever Eq. 9 thinks of them, a price is asked about Algorithm 1's plan and about one device alone.
    alone = [] if ring is not None else [_alone(tables, rank, schemes) for rank in (chosen if portal is None else (portal,))]
    asked_anyway = [found for found in (printed, min((one for one in alone if one is not None), default=None)) if found is not None]
    pool = refined + asked_anyway + (variety(tables, refined[0], schemes) if refined else []) + looked
    made: dict[InferencePlan, float] = {}
    always = []
    for found in pool:
        one = tables.plan(method, found.ranks, found.units, found.columns, found.tokens, found.second)
        if schemes is not None and len(chosen) > 1 and not is_split(one):
            continue
        if found in asked_anyway:
            always.append(one)
        if one in made or len(made) >= most_candidates + 4:
            continue
        try:
            check_inference(one, profile, cluster, length=longest, decoder_length=decoder_length, memory=memory)
        except PlanError:
            continue
        made[one] = price_plan(one, profile, cluster, length=length, decoder_length=decoder_length).layers_s
    if not made:
        raise least_missing(profile, cluster, chosen, length=longest, decoder_length=decoder_length, memory=memory, schemes=schemes)
    forced = [one for one in dict.fromkeys(always) if one in made]
    ordered = sorted(made, key=lambda one: made[one])
    first = [one for one in ordered if one not in forced][: max(1, most_candidates - len(forced))]
    kept = sorted([*first, *forced], key=lambda one: made[one])
    return [
        replace(one, predicted_s=price_plan(one, profile, cluster, length=length, decoder_length=decoder_length).total_s) for one in kept
    ]


def is_split(plan: InferencePlan) -> bool:
    """Return whether at least two devices compute: heads, in scheme 1 columns, in scheme 2 all columns of some tokens."""
    shares = plan.shares or (0.0,) * plan.num_positions
    first, second = 1 in plan.schemes, 2 in plan.schemes
    parts = zip(plan.units, plan.columns, shares, strict=True)
    return sum(bool(units or (first and columns) or (second and share)) for units, columns, share in parts) > 1


def of_split(price: Price) -> Price:
    """Return the price with which a plan that does not split is never chosen."""
    return lambda plan: price(plan) if is_split(plan) else math.inf


def _alone(tables: Tables, rank: int, schemes: int | None) -> Found | None:
    """Return the plan of one device, None if the model does not fit."""
    found = search_ring(tables, (rank,), most=2, schemes=schemes, keep=1)
    return found[0] if found else None


def _variant(one: InferencePlan, overlap: bool, both_ways: bool, tile_tokens: Tiles) -> InferencePlan:
    single = one.num_positions < 2
    made = replace(one, overlap=overlap and not single, both_ways=both_ways and one.num_positions > 2)
    return replace(made, tile_tokens=tile_tokens if isinstance(tile_tokens, int) else tile_tokens(made))


def _algorithm_1(
    profile: InferenceProfile,
    cluster: Cluster,
    tables: Tables,
    chosen: tuple[int, ...],
    portal: int | None,
    is_ring: bool,
    schemes: int | None,
    longest: int,
    decoder_length: int | None,
) -> Found | None:
    """Return Algorithm 1's plan as numbers, None if it fails or must not be as printed."""
    order = chosen if portal is None or is_ring else (portal, *(rank for rank in chosen if rank != portal))
    try:
        printed = algorithm_1(
            profile,
            cluster,
            length=tables.lengths[0],
            decoder_length=decoder_length,
            ranks=order,
            memory=tables.memory,
            memory_length=longest,
            substitute=schemes != 1,
        )
    except PlanError:
        return None
    if schemes == 2 and printed.schemes.count(1):
        return None
    second, first = [], 0
    for layers in tables.layers:
        second.append(printed.schemes[first : first + layers].count(2))
        first += layers
    tokens = printed.tokens(tables.lengths[0])
    value = tables.seconds(printed.ranks, printed.units, printed.columns, tokens, second)
    return Found(value, printed.ranks, printed.units, printed.columns, tokens, tuple(second)) if math.isfinite(value) else None
