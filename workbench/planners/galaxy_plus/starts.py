"""Where the search for hybrid plans starts: promising rings, and cuts from the relaxed linear programme (Galaxy+ Eq. 9)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from workbench.core.inference import proportional_parts
from workbench.planners.galaxy_plus.pricing import Cut
from workbench.planners.galaxy_plus.programme import Programme
from workbench.planners.galaxy_plus.search import MOST_POSITIONS, Ranks, Search


def rings(search: Search, most: int) -> list[Cut]:
    """Return the best plain cuts of the most promising rings, and of each size; of more than 8 devices the fastest are looked at."""
    if search.is_ring:
        return []
    others = [rank for rank in search.ranks if rank != search.portal]
    if len(others) <= 8:
        sets = [set(some) for count in range(len(others) + 1) for some in itertools.combinations(others, count)]
    else:
        counts = sorted({round(1.25**power) for power in range(40)} | {len(others)})
        sets = [set(sorted(others, key=search.speed.__getitem__, reverse=True)[:count]) for count in counts]
    found = []
    all_of = [turned(search, tuple(rank for rank in search.ranks if rank == search.portal or rank in some)) for some in sets]
    for ring in {_kinds(search, ring): ring for ring in reversed(all_of) if ring}.values():
        if cuts := list(starts(search, ring, numbers(search, 2), plain=True, every=search.schemes == 2)):
            found.append(min(cuts, key=search.seconds))
    found.sort(key=lambda cut: (search.seconds(cut), cut.ranks))
    of_sizes = {len(cut.ranks): cut for cut in reversed(found)}
    return list(dict.fromkeys([*found[:most], *of_sizes.values()]))


def _kinds(search: Search, ring: Ranks) -> Ranks:
    """Return the kinds of a ring's devices, the same for every ring that takes as long: without a portal it may be turned."""
    kinds = tuple(search.kind[rank] for rank in ring)
    return kinds if search.portal is not None else min(kinds[at:] + kinds[:at] for at in range(len(kinds)))


def turned(search: Search, ring: Ranks) -> Ranks:
    """Return the ring with the portal first; without one the device with most memory, if embedding and head count."""
    first = search.portal
    if not ring:
        return ring
    if first is None:
        if search.memory.embedding != "first" or not search.memory.ends_bytes(search.profile, 0):
            return ring
        first = max(ring, key=lambda rank: (search.cluster.devices[rank].memory_bytes, -ring.index(rank)))
    at = ring.index(first)
    return (*ring[at:], *ring[:at])


def numbers(search: Search, most: int) -> list[tuple[int, ...]]:
    """Return numbers of scheme-2 layers in each stack, at most about `most` of them, evenly."""
    if search.schemes is not None:
        return [tuple(0 if search.schemes == 1 else count for count in search.layers)]
    each = max(2, round(most ** (1 / len(search.layers)))) - 1
    axes = (sorted({round(count * step / each) for step in range(each + 1)}) for count in search.layers)
    return list(itertools.product(*axes))


def near(search: Search, second: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return these numbers of scheme-2 layers, and some a little larger or smaller."""
    if search.schemes is not None:
        return [second]
    axes = [
        {q + change * max(1, layers // 16) for change in range(-2, 3)} & set(range(layers + 1))
        for q, layers in zip(second, search.layers, strict=True)
    ]
    return list(itertools.product(*axes))


def starts(search: Search, ring: Ranks, seconds: Sequence[tuple[int, ...]], *, every: bool = False, plain: bool = False) -> Iterator[Cut]:
    """Yield the relaxed programme's plans, rounded, for some numbers of scheme-2 layers.

    plain: cuts by speed instead, as on a large ring.
    every: also with devices that have no room for all of a scheme-2 layer left without tokens, which then need not hold it in full.
    """
    room = search.room(ring)
    if min(room) < 0:
        return
    shape, n = search.profile.stacks[0], len(ring)
    programme = None
    if 1 < n <= MOST_POSITIONS and not plain:
        programme = Programme(search.profile, search.cluster, ring, search.lengths, room, search.memory)
    by_room = sorted(range(n), key=lambda i: room[i])
    fewest = n - 1 if every and not search.memory.full_everywhere else 0
    for second in seconds:
        least = math.inf
        for without in range(fewest + 1 if any(second) else 1):
            holders = [i not in by_room[:without] for i in range(n)]
            unit_bytes, _, other_bytes = search.part_bytes(second)
            if without and room[by_room[without - 1]] >= other_bytes * shape.columns + unit_bytes * shape.num_units:
                break  # it has room for all of a scheme-2 layer
            if programme is None:
                weights = [search.speed[rank] for rank in ring]
                parts = [weights, weights, [one * has for one, has in zip(weights, holders, strict=True)]]
            else:
                found = programme.solve(second, holders=holders)
                if found.x is None:
                    continue
                if found.fun > least:
                    break  # one device more without tokens only makes it worse
                least = found.fun
                parts = [[max(0.0, float(one)) for one in part] for part in programme.parts(found.x)]
            full = other_bytes * shape.columns
            most = [
                (nbytes - (has or search.memory.full_everywhere) * full) / max(unit_bytes, 1e-9)
                for nbytes, has in zip(room, holders, strict=True)
            ]
            units = tuple(_roomy(list(proportional_parts(shape.num_units, parts[0])), most))
            columns, tokens = proportional_parts(shape.columns, parts[1]), proportional_parts(search.lengths[0], parts[2])
            cut = search.fitted(search.leveled(Cut(ring, units, columns, tokens, second)))
            if cut is not None:
                yield cut


def _roomy(units: list[int], room: Sequence[float]) -> list[int]:
    """Return the units, those beyond a position's room (in units) given to the positions with most room left."""
    while any(count > most for count, most in zip(units, room, strict=True) if count):
        left = [most - count for count, most in zip(units, room, strict=True)]
        taker, giver = (
            max(range(len(units)), key=left.__getitem__),
            min((i for i, count in enumerate(units) if count), key=left.__getitem__),
        )
        if left[taker] < 1 or left[giver] >= 0:
            break
        units[giver] -= 1
        units[taker] += 1
    return units
