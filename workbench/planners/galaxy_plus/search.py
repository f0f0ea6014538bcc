"""Search of one ring's best plan by Galaxy+ Eq. 9: schemes, tokens, heads and columns together, then step by step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workbench.core.inference import proportional_parts
from workbench.planners.galaxy_plus.cuts import best_columns, columns_line, cuts, water_level
from workbench.planners.galaxy_plus.tables import Parts, Ranks, Tables
from workbench.planners.galaxy_plus.tokens import MOST_IN_PROGRAMME, moves, polish_tokens, programmed_cuts, token_cuts

MOST_PROGRAMMED = 4
"""Of the sets of devices with tokens on one ring so many, the best by simple cuts, are given to the linear programme."""
PROGRAMME_GAINS = 1.25
"""Sets whose simple cuts take more than so many times the best plan known are not given to it: it would have to gain too much."""


class Found(NamedTuple):
    """A plan as numbers, and its seconds by Eq. 9."""

    seconds: float
    ranks: Ranks
    units: Parts
    columns: Parts
    tokens: Parts
    second: tuple[int, ...]


def scheme_numbers(layers: Sequence[int], most: int, schemes: int | None) -> list[tuple[int, ...]]:
    """Return numbers of scheme-2 layers in each stack, at most about `most` of them, evenly; schemes: all layers 1 or 2."""
    if schemes is not None:
        return [tuple(0 if schemes == 1 else count for count in layers)]
    each = max(2, round(most ** (1 / len(layers))))
    axes = []
    for count in layers:
        steps = min(count, each - 1)
        axes.append(sorted({round(count * step / steps) for step in range(steps + 1)}) if steps else [0])
    return list(itertools.product(*axes))


def holder_sets(tables: Tables, room: Sequence[float], *, every: bool) -> list[tuple[bool, ...]]:
    """Return who may get tokens: all, and (`every`) all but those with least memory, or all but one.

    Who has no tokens need not hold a scheme-2 layer in full.
    """
    n = len(room)
    sets = [(True,) * n]
    if every and not tables.memory.full_everywhere:
        by_room = sorted(range(n), key=lambda d: room[d])
        sets += [tuple(d not in by_room[:count] for d in range(n)) for count in range(1, n)]
        sets += [tuple(d != without for d in range(n)) for without in by_room[1:]] if n > 2 else []
    return sets


def search_ring(
    tables: Tables,
    ranks: Ranks,
    *,
    most: int,
    schemes: int | None = None,
    every: bool = False,
    keep: int = 3,
    known_s: float = math.inf,
) -> list[Found]:
    """Return good plans on this ring, best first; empty if nothing fits.

    most: numbers of scheme-2 layers that are tried at first.  every: also leave devices without tokens.  keep: starts that are refined.
    known_s: seconds of the best plan known, on any ring.
    """
    room = tables.room(ranks)
    if min(room) < 0:
        return []
    numbers = scheme_numbers(tables.layers, most, schemes)
    sets = []
    for holders in holder_sets(tables, room, every=every):
        holds = tuple(tables.memory.full_everywhere or holder for holder in holders)
        found = cuts(tables, ranks, holds, room, numbers)
        if found:
            pool = token_cuts(tables, ranks, holders)
            cheapest = {second: _fastest(tables, ranks, pool, second) for second in found}
            sets.append((min(cut.seconds + cheapest[second][0] for second, cut in found.items()), holders, found, cheapest))
    starts = []
    for place, (seconds, holders, found, cheapest) in enumerate(sorted(sets, key=lambda one: one[0])):
        if place < MOST_PROGRAMMED and seconds < PROGRAMME_GAINS * known_s:
            # At both ends of the schemes where there is but one set.
            ends = (max(found),) if len(sets) > 1 or not every else (min(found), max(found))
            if pool := programmed_cuts(tables, ranks, holders, ends):
                cheapest = {second: min(best, _fastest(tables, ranks, pool, second)) for second, best in cheapest.items()}
            known_s = min(known_s, *(cut.seconds + cheapest[second][0] for second, cut in found.items()))
        starts += [(cut.seconds + cheapest[second][0], second, cut.units, cheapest[second][1]) for second, cut in found.items()]
    starts.sort(key=lambda start: start[0])
    made: dict[tuple[int, ...], Found] = {}
    for _, second, units, tokens in starts[: 4 * keep]:
        if len(made) < keep and second not in made:
            one = _complete(tables, ranks, units(), tokens, second, room)
            if one is not None:
                made[second] = one
    return sorted(made.values())


def _fastest(tables: Tables, ranks: Ranks, pool: Sequence[Parts], second: tuple[int, ...]) -> tuple[float, Parts]:
    return min((tables.tokens_s(ranks, tokens, second), tokens) for tokens in pool)


def _complete(tables: Tables, ranks: Ranks, units: Parts, tokens: Parts, second: tuple[int, ...], room: Sequence[float]) -> Found | None:
    holds = tables.holds(tokens)
    columns = best_columns(tables, ranks, units, holds, room, second)
    if columns is None:
        return None
    return Found(tables.seconds(ranks, units, columns, tokens, second), ranks, units, columns, tokens, second)


def refine(tables: Tables, found: Found, *, schemes: int | None = None, holders: bool = True, rounds: int = 12) -> Found:
    """Return the plan after moves of tokens, units and schemes, one at a time, while they save time.

    holders: other positions may get tokens, or lose all.
    """
    room = tables.room(found.ranks)
    step = max(1, max(found.tokens) // 8)
    for _ in range(rounds):
        better = _with_tokens(tables, found, polish_tokens(tables, found.ranks, found.tokens, found.second, first_step=step))
        step = 1
        if holders:
            better = _refine_holders(tables, better, room, schemes)
        better = _refine_units(tables, better, room)
        if schemes is None:
            better = _refine_schemes(tables, better, room)
        if better.seconds >= found.seconds * (1 - 1e-9):
            return min(found, better)
        found = better
    return found


def _with_tokens(tables: Tables, found: Found, tokens: Parts) -> Found:
    return found._replace(tokens=tokens, seconds=tables.seconds(found.ranks, found.units, found.columns, tokens, found.second))


def _refine_holders(tables: Tables, found: Found, room: Sequence[float], schemes: int | None) -> Found:
    """Return the plan with other positions holding tokens, where that saves time and their memory allows it.

    A position without tokens leaves memory for more layers of scheme 2, which are tried with it.
    """
    if len(found.ranks) > MOST_IN_PROGRAMME:
        return found
    moved = True
    while moved:
        moved = False
        for tokens in _other_holders(tables, found):
            more = schemes is None and tokens.count(0) > found.tokens.count(0)
            for second in _more_layers(tables, found.second, 3 if more else 0):
                if tables.tokens_s(found.ranks, tokens, second) + tables.units_s(found.ranks, found.units) >= found.seconds:
                    continue
                columns = best_columns(tables, found.ranks, found.units, tables.holds(tokens), room, second)
                if columns is None:
                    break
                value = tables.seconds(found.ranks, found.units, columns, tokens, second)
                if value < found.seconds * (1 - 1e-12):
                    found, moved = Found(value, found.ranks, found.units, columns, tokens, second), True
            if moved:
                break
    return found


def _more_layers(tables: Tables, second: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of scheme-2 layers, and up to `most` more of them in the first stack that has others left."""
    yield second
    for _ in range(most):
        at = next((stack for stack, layers in enumerate(tables.layers) if second[stack] < layers), None)
        if at is None:
            return
        second = (*second[:at], second[at] + 1, *second[at + 1 :])
        yield second


def _other_holders(tables: Tables, found: Found) -> Iterator[Parts]:
    """Yield tokens with one position relieved, one that had none given its part, or two that change places."""
    ranks, tokens, n = found.ranks, found.tokens, len(found.ranks)
    with_tokens = sum(1 for count in tokens if count)
    now_s = tables.tokens_s(ranks, tokens, found.second)
    for position in sorted(range(n), key=lambda at: tokens[at]):
        if tokens[position] and with_tokens > 1:
            rough = proportional_parts(sum(tokens), [0 if at == position else count for at, count in enumerate(tokens)])
        elif tokens[position]:
            continue
        else:
            part = max(1, sum(tokens) // (with_tokens + 1))
            rest = proportional_parts(sum(tokens) - part, tokens)
            rough = tuple(part if at == position else count for at, count in enumerate(rest))
        # Polishing gains some percent; a cut beyond that can only pay by the memory that it leaves.
        is_close = tables.tokens_bound_s(ranks, rough, found.second) < 1.2 * now_s
        yield polish_tokens(tables, ranks, rough, found.second) if is_close else rough
    for first, other in itertools.combinations(range(n), 2):
        if tokens[first] != tokens[other]:
            swapped = list(tokens)
            swapped[first], swapped[other] = swapped[other], swapped[first]
            yield tuple(swapped)


def _refine_units(tables: Tables, found: Found, room: Sequence[float]) -> Found:
    holds = tables.holds(found.tokens)
    fixed = tables.tokens_s(found.ranks, found.tokens, found.second)
    # As if memory held any columns: where it does, which units hold what is no matter to the feed-forward networks.
    lines = [columns_line(tables, rank, found.second) for rank in found.ranks]
    free = water_level(lines, [tables.num_columns] * len(lines), tables.num_columns)
    least = fixed + (1 - 1e-3) * tables.columns_s(found.ranks, free, found.second)
    moved = True
    while moved:
        moved = False
        for giver, taker in moves(found.units):
            if not found.units[giver]:
                continue
            parts = list(found.units)
            parts[giver] -= 1
            parts[taker] += 1
            units = tuple(parts)
            attention = tables.units_s(found.ranks, units)
            if attention + least >= found.seconds:
                continue
            columns = best_columns(tables, found.ranks, units, holds, room, found.second)
            if columns is None:
                continue
            value = attention + tables.columns_s(found.ranks, columns, found.second) + fixed
            if value < found.seconds * (1 - 1e-12):
                found, moved = found._replace(seconds=value, units=units, columns=columns), True
    return found


def _refine_schemes(tables: Tables, found: Found, room: Sequence[float]) -> Found:
    holds = tables.holds(found.tokens)
    moved = True
    while moved:
        moved = False
        for change in itertools.product((-1, 0, 1), repeat=len(found.second)):
            second = tuple(q + one for q, one in zip(found.second, change, strict=True))
            if not any(change) or not all(0 <= q <= layers for q, layers in zip(second, tables.layers, strict=True)):
                continue
            columns = best_columns(tables, found.ranks, found.units, holds, room, second)
            if columns is None:
                continue
            value = tables.seconds(found.ranks, found.units, columns, found.tokens, second)
            if value < found.seconds * (1 - 1e-12):
                found, moved = found._replace(seconds=value, columns=columns, second=second), True
    return found


def best_order(tables: Tables, ranks: Ranks, *, portal: int | None = None) -> Ranks:
    """Return the ring order, by swaps, in which equal and speed-proportional cuts travel fastest; `portal` stands first."""
    n = len(ranks)
    pairs = {(i, j): tables.cluster.link(i, j) for i in ranks for j in ranks if i != j}
    if n < 3 or len(set(pairs.values())) == 1:
        return ranks
    bytes_each = tables.stacks[0].hidden_bytes * max(1, tables.num_tokens // n)
    cost = {pair: link.transfer_s(bytes_each) for pair, link in pairs.items()}

    def slow(order: Ranks) -> tuple[float, float]:
        hops = [cost[order[i], order[(i + 1) % n]] for i in range(n)]
        return max(hops), math.fsum(hops)

    order = list(ranks)
    fixed = 1 if portal is not None else 0
    best = slow(tuple(order))
    moved = True
    while moved:
        moved = False
        for i, j in itertools.combinations(range(fixed, n), 2):
            for candidate in (
                [*order[:i], order[j], *order[i + 1 : j], order[i], *order[j + 1 :]],
                [*order[:i], *reversed(order[i : j + 1]), *order[j + 1 :]],
            ):
                value = slow(tuple(candidate))
                if value < best:
                    order, best, moved = candidate, value, True
    return tuple(order)


def variety(tables: Tables, found: Found, schemes: int | None) -> list[Found]:
    """Return plans on the same ring that differ in schemes and in how tokens are cut, for a price other than Eq. 9 to choose from."""
    room, n = tables.room(found.ranks), len(found.ranks)
    holders = tuple(count > 0 for count in found.tokens)
    holds = tables.holds(found.tokens)
    numbers = scheme_numbers(tables.layers, 24, schemes)
    by_number = cuts(tables, found.ranks, holds, room, numbers)
    if not by_number:
        return []
    ordered = sorted(by_number)
    ends = dict.fromkeys((ordered[-1], ordered[0], found.second))
    pool = [*token_cuts(tables, found.ranks, holders), *programmed_cuts(tables, found.ranks, holders, ends)] if n > 1 else [found.tokens]
    made = []
    for second in ends:
        units = by_number[second].units() if second in by_number else found.units
        seconds = sorted((tables.tokens_s(found.ranks, tokens, second), tokens) for tokens in pool)
        for tokens in dict.fromkeys((seconds[0][1], pool[0], pool[min(4, len(pool) - 1)])):
            one = _complete(tables, found.ranks, units, tokens, second, room)
            if one is not None:
                made.append(one)
    return made
