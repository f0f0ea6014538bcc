"""Plan hybrid model parallelism: Algorithm 1 as printed, and our planner (Eq. 9 searched over rings, schemes and cuts),
never worse.

Beyond Algorithm 1 our planner may leave devices out and orders the ring.  It cuts heads, columns and tokens each by its
own times, and trades heads for columns if memory is short.  A device may have heads and columns without tokens.  The
number of scheme-2 layers is the fastest, not the largest that fits.
The search starts from promising rings, and from cuts of the relaxed linear programme (Eq. 9).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.equation9 import Cut, Equation9, cut_of
from workbench.methods.galaxy_plus.planners.memory import check, least_missing, needs, part_bytes
from workbench.methods.galaxy_plus.planners.programme import PlanLP
from workbench.methods.galaxy_plus.planners.search import MOST_POSITIONS, Ranks, Search
from workbench.methods.galaxy_plus.planners.terms import capacity, lengths_of
from workbench.planners.problem import Problem

MOST_CANDIDATES = 12
GAINS = 1.25
"""Rings whose plain cuts take this many times as long as the best ring's are not given to the linear programme."""


def algorithm_1(
    problem: Problem[InferenceProfile], *, substitute: bool = True, method: str = "algorithm_1"
) -> InferencePlan:
    """Return the plan of heterogeneity and memory aware HMP planning as printed (Galaxy+, section III-C, Algorithm 1).

    substitute: False keeps scheme 1 in all layers (Galaxy).
    Raises PlanError, naming device and bytes, where the printed algorithm exits with Fail (line 35).

    The printed algorithm leaves some points open; we chose:

    1. Line 5 gives fractions of heads, columns and tokens: rounded by largest remainder, the first of equals gets more.
    2. "Out-of-memory" (lines 8, 31, 34) is Eq. 8 with P = all layers, both blocks together: while columns move, heads
       stay.
    3. "Overflowing workload" (line 13) is the fewest units or columns whose removal makes the device fit, at most all
       it has.
    4. Free devices (line 9) are those of L with room for one more unit.  Their additions (line 15) are rounded by
       largest remainder.  This
       may overload them, which the recursion corrects.  They are determined once for all devices of line 12.
    5. If no device of L is free, nothing is shifted and the partition is returned as it is; line 34 decides.
    6. Line 17 lacks a "Return": the recursion's result is returned.
    7. Line 16 removes a device from L for good.  Lines 32 and 33 each start with all devices; with one shared list,
       line 33 could never
       take heads from a device that line 32 emptied of columns.
    8. After a rebalance (lines 32-35) P and Q are not set, as `else` (line 36) skips the substitution: all layers keep
       scheme 1.
    9. Line 20 takes the layers from the first on, the encoder's before the decoder's.
    10. Line 22 checks every device, also one without tokens: see InferenceProfile.full_everywhere.
    """
    profile, cluster, chosen = problem.profile, problem.cluster, problem.members
    v = [capacity(profile, rank, lengths_of(problem)) for rank in chosen]
    layers = profile.num_layers
    unit_bytes, column_bytes, _ = map(int, part_bytes(problem, (0,) * len(profile.stacks)))
    plan = InferencePlan(
        method=method,
        paradigm="hybrid",
        ranks=chosen,
        units=proportional_parts(profile.stacks[0].num_units, v),
        columns=proportional_parts(profile.stacks[0].columns, v),
        shares=tuple(v),
        schemes=(1,) * layers,
        overlap=True,
        length=problem.sequence_length,
    )

    def spare_bytes(plan: InferencePlan) -> list[int]:
        need_bytes = needs(problem, plan)
        return [cluster.devices[rank].memory_bytes - need_bytes[rank].total_bytes for rank in chosen]

    def balanced(plan: InferencePlan, name: str, piece_bytes: int, movable: Sequence[int]) -> InferencePlan:
        """Move the overflow of one partition to devices with room (lines 7-17).

        piece_bytes: bytes of a unit or column in all layers.
        """
        spare = spare_bytes(plan)
        over = [d for d in movable if spare[d] < 0]
        free = [d for d in movable if spare[d] >= piece_bytes]
        if not over or not free:
            return plan
        parts = list(getattr(plan, name))
        for d in over:
            waiting = min(parts[d], -(spare[d] // piece_bytes))
            for f, count in zip(free, proportional_parts(waiting, [v[f] for f in free]), strict=True):
                parts[f] += count
            parts[d] -= waiting
        plan = replace(plan, **{name: tuple(parts)})  # type: ignore[arg-type]
        return balanced(plan, name, piece_bytes, [d for d in movable if d not in over])

    if min(spare_bytes(plan)) < 0:
        everyone = range(len(chosen))
        plan = balanced(balanced(plan, "columns", column_bytes, everyone), "units", unit_bytes, everyone)
        check(problem, plan)  # lines 34-35
        plan = replace(plan, notes=("heads and columns were shifted to devices with more memory",))
    elif substitute:
        for second in range(1, layers + 1):
            more = replace(plan, schemes=(2,) * second + (1,) * (layers - second))
            if min(spare_bytes(more)) < 0:
                break
            plan = more
    return replace(plan, predicted_s=Equation9(profile, cluster, lengths_of(problem)).total_s(cut_of(plan, profile)))


def plan(problem: Problem[InferenceProfile], **settings: Any) -> InferencePlan:
    """Return the fastest plan by Eq. 9, never slower than Algorithm 1's.  settings: see plans."""
    return plans(problem, **settings)[0]


def plans(
    problem: Problem[InferenceProfile],
    *,
    portal: int | None = None,
    schemes: int | None = None,
    effort: int = 2,
    method: str = "galaxy_plus",
) -> list[InferencePlan]:
    """Return plans for one sequence with different rings, schemes and cuts, at most MOST_CANDIDATES, fastest by Eq. 9
    first.

    They overlap.  Algorithm 1's plan and a plan on a single device are among them, so that another measure may prefer
    these.
    portal: the device that is first and has embedding and head.  effort: 0 tries few rings, 2 more.
    schemes: 1 or 2 for all layers; then no plan leaves all work to one device of several.
    Raises PlanError naming the device and the missing memory if no plan fits.
    """
    chosen = problem.members
    if portal is not None and portal not in chosen:
        raise ConfigError(
            f"A plan with portal {portal} was asked for.",
            f"The devices are {list(chosen)}.",
            "Let the portal take part.",
        )
    if schemes not in (None, 1, 2):
        raise ConfigError(f"Scheme {schemes} was asked for.", "There are 1 and 2.", "Choose one of them, or None.")
    pool = _candidates(Search(problem, method=method, portal=portal, schemes=schemes), effort)
    if not pool:
        raise least_missing(problem, schemes=schemes)
    return [replace(plan, overlap=plan.num_positions > 1) for plan in pool]


def _candidates(search: Search, effort: int) -> list[InferencePlan]:
    tried = rings(search, 4 + 2 * effort)
    close = [cut for cut in tried if search.seconds(cut) <= GAINS * search.seconds(tried[0])]
    looked = [*tried, *(cut for plain in close for cut in starts(search, plain.ranks, [plain.second]))]
    looked.sort(key=search.seconds)
    for number, ring in enumerate(
        list(dict.fromkeys(cut.ranks for cut in looked))[: 1 + effort] or [turned(search, search.ranks)]
    ):
        looked += starts(search, ring, numbers(search, 4 + 2 * effort if number == 0 else 2), every=number == 0)
    looked = sorted(dict.fromkeys(looked), key=search.seconds)
    firsts = sorted({cut.ranks: cut for cut in reversed(looked)}.values(), key=search.seconds)  # the best of each ring
    refined = [search.climbed(cut, 0.5**5) for cut in firsts[: 3 + effort]]
    if refined:
        refined.append(search.climbed(min(refined, key=search.seconds), 0.5**9))
    printed = _algorithm_1(search)
    if printed is not None:
        refined += [printed, search.climbed(printed, 0.5**9)]
    refined.sort(key=search.seconds)
    singles = [(rank,) for rank in search.ranks if search.portal in (None, rank)]
    alone = [cut for ring in singles for cut in starts(search, ring, numbers(search, 2))]
    forced = [cut for cut in (printed, min(alone, key=search.seconds, default=None)) if cut is not None]
    of_sizes = {len(cut.ranks): cut for cut in reversed(firsts)}
    pool = [*refined[:1], *forced, *sorted(of_sizes.values(), key=search.seconds)[:4]]
    cuts = list(dict.fromkeys([*pool, *refined, *looked]))[:MOST_CANDIDATES]
    return [search.plan(cut) for cut in sorted(cuts, key=search.seconds)]


def _algorithm_1(search: Search) -> Cut | None:
    """Return the cut of Algorithm 1's plan, None if it fails or may not be used as printed."""
    order = search.ranks
    if search.portal is not None:
        order = (search.portal, *(rank for rank in order if rank != search.portal))
    try:
        printed = algorithm_1(replace(search.problem, ranks=order), substitute=search.schemes != 1)
    except PlanError:
        return None
    if search.schemes == 2 and printed.schemes.count(1):
        return None
    return cut_of(printed, search.profile)._replace(shares=printed.tokens(printed.length))


def rings(search: Search, most: int) -> list[Cut]:
    """Return the best plain cuts of the most promising rings, for each size; with more than 8 devices the fastest are
    tried.
    """
    others = [rank for rank in search.ranks if rank != search.portal]
    if len(others) <= 8:
        sets = [set(subset) for count in range(len(others) + 1) for subset in itertools.combinations(others, count)]
    else:
        counts = sorted({round(1.25**power) for power in range(40)} | {len(others)})
        sets = [set(sorted(others, key=search.speed.__getitem__, reverse=True)[:count]) for count in counts]
    best_cuts = []
    all_of = [
        turned(search, tuple(rank for rank in search.ranks if rank == search.portal or rank in members))
        for members in sets
    ]
    for ring in {_kinds(search, ring): ring for ring in reversed(all_of) if ring}.values():
        if cuts := list(starts(search, ring, numbers(search, 2), plain=True, every=search.schemes == 2)):
            best_cuts.append(min(cuts, key=search.seconds))
    best_cuts.sort(key=lambda cut: (search.seconds(cut), cut.ranks))
    of_sizes = {len(cut.ranks): cut for cut in reversed(best_cuts)}
    return list(dict.fromkeys([*best_cuts[:most], *of_sizes.values()]))


def _kinds(search: Search, ring: Ranks) -> Ranks:
    """Return the kinds of a ring's devices, equal for all rings of equal time: without a portal a ring may
    be rotated.
    """
    kinds = tuple(search.kind[rank] for rank in ring)
    return kinds if search.portal is not None else min(kinds[offset:] + kinds[:offset] for offset in range(len(kinds)))


def turned(search: Search, ring: Ranks) -> Ranks:
    """Rotate the ring so that the portal is first, or else the device with most memory if embedding and head have
    bytes.
    """
    first = search.portal
    if not ring:
        return ring
    if first is None:
        if not search.profile.ends_bytes:
            return ring
        first = max(ring, key=lambda rank: (search.cluster.devices[rank].memory_bytes, -ring.index(rank)))
    offset = ring.index(first)
    return (*ring[offset:], *ring[:offset])


def numbers(search: Search, most: int) -> list[tuple[int, ...]]:
    """Return up to about `most` evenly spread choices of the number of scheme-2 layers in each stack."""
    if search.schemes is not None:
        return [tuple(0 if search.schemes == 1 else count for count in search.layers)]
    each = max(2, round(most ** (1 / len(search.layers)))) - 1
    axes = (sorted({round(count * step / each) for step in range(each + 1)}) for count in search.layers)
    return list(itertools.product(*axes))


def starts(
    search: Search, ring: Ranks, seconds: Sequence[tuple[int, ...]], *, every: bool = False, plain: bool = False
) -> Iterator[Cut]:
    """Yield the relaxed programme's plans, rounded, for some numbers of scheme-2 layers.

    plain: whether to cut by speed instead, as on a large ring.
    every: whether to try also devices without tokens if they have no room for a complete scheme-2 layer, which they
    then do not need.
    """
    room = search.room(ring)
    if min(room) < 0:
        return
    shape, n = search.profile.stacks[0], len(ring)
    programme = None
    if 1 < n <= MOST_POSITIONS and not plain:
        programme = PlanLP(search.problem, ring, room)
    by_room = sorted(range(n), key=lambda i: room[i])
    fewest = n - 1 if every and not search.profile.full_everywhere else 0
    for second in seconds:
        least = math.inf
        for without in range(fewest + 1 if any(second) else 1):
            holders = [i not in by_room[:without] for i in range(n)]
            unit_bytes, _, other_bytes = search.part_bytes(second)
            if without and room[by_room[without - 1]] >= other_bytes * shape.columns + unit_bytes * shape.num_units:
                break  # it has room for all of a scheme-2 layer
            if programme is None:
                weights = [search.speed[rank] for rank in ring]
                parts = [weights, weights, [weight * has for weight, has in zip(weights, holders, strict=True)]]
            else:
                solution = programme.solve(second, holders=holders)
                if solution.x is None:
                    continue
                if solution.fun > least:
                    break  # one more device without tokens only makes it worse
                least = solution.fun
                parts = [[max(0.0, float(amount)) for amount in part] for part in programme.parts(solution.x)]
            full = other_bytes * shape.columns
            most = [
                (nbytes - (has or search.profile.full_everywhere) * full) / max(unit_bytes, 1e-9)
                for nbytes, has in zip(room, holders, strict=True)
            ]
            units = tuple(_roomy(list(proportional_parts(shape.num_units, parts[0])), most))
            columns, tokens = (
                proportional_parts(shape.columns, parts[1]),
                proportional_parts(search.lengths[0], parts[2]),
            )
            cut = search.fitted(search.leveled(Cut(ring, units, columns, tokens, second)))
            if cut is not None:
                yield cut


def _roomy(units: list[int], room: Sequence[float]) -> list[int]:
    """Move units beyond a position's room (in units) to the positions with most room."""
    while any(count > most for count, most in zip(units, room, strict=True) if count):
        free = [most - count for count, most in zip(units, room, strict=True)]
        taker, giver = (
            max(range(len(units)), key=free.__getitem__),
            min((i for i, count in enumerate(units) if count), key=free.__getitem__),
        )
        if free[taker] < 1 or free[giver] >= 0:
            break
        units[giver] -= 1
        units[taker] += 1
    return units
