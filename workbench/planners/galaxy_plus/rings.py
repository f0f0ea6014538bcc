"""Which devices take part, and in what order round the ring: rings worth a search, by a quick estimate of Galaxy+ Eq. 9."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from workbench.core.inference import proportional_parts
from workbench.planners.galaxy_plus.search import best_order
from workbench.planners.galaxy_plus.tables import Ranks, Tables
from workbench.planners.galaxy_plus.times import layers_s

ALL_SUBSETS_UP_TO = 8


def rings(tables: Tables, ranks: Sequence[int], *, portal: int | None = None, effort: int = 2) -> list[Ranks]:
    """Return rings to search, the most promising first.  All devices in the given order are always among them."""
    whole_s = {rank: max(layers_s(tables.profile, rank, tables.lengths), 1e-12) for rank in ranks}
    subsets = _subsets(ranks, whole_s, portal)
    chosen: dict[Ranks, None] = {}
    for subset in _most_promising(tables, subsets, whole_s, 2 + 2 * effort):
        chosen[first_placed(tables, best_order(tables, subset, portal=portal), portal)] = None
    everyone = first_placed(tables, tuple(ranks), portal)
    chosen[everyone] = None
    if tuple(ranks) != everyone and portal is None:
        chosen[tuple(ranks)] = None
    if effort:
        chosen[first_placed(tables, best_order(tables, everyone, portal=portal), portal)] = None
    return list(chosen)


def first_placed(tables: Tables, ring: Ranks, portal: int | None) -> Ranks:
    """Return the ring turned so that the portal stands first; without one the device with most memory, if embedding and head count."""
    if portal is None and (tables.memory.embedding != "first" or not tables.memory.ends_bytes(tables.profile, 0)):
        return ring
    first = portal if portal is not None else max(ring, key=lambda rank: (tables.cluster.devices[rank].memory_bytes, -ring.index(rank)))
    at = ring.index(first)
    return (*ring[at:], *ring[:at])


def _subsets(ranks: Sequence[int], whole_s: dict[int, float], portal: int | None) -> list[Ranks]:
    """Return sets of devices with the portal first: all of few devices, else the fastest of each number."""
    others = [rank for rank in ranks if rank != portal]
    fixed = () if portal is None else (portal,)
    if len(ranks) <= ALL_SUBSETS_UP_TO:
        found = [fixed + subset for count in range(len(others) + 1) for subset in itertools.combinations(others, count)]
        return [subset for subset in found if subset]
    by_speed = sorted(others, key=lambda rank: whole_s[rank])
    counts = sorted({round(1.25**power) for power in range(40)} | {len(others)})
    found = [fixed + tuple(rank for rank in others if rank in set(by_speed[:count])) for count in counts if count <= len(others)]
    return [subset for subset in dict.fromkeys(found) if subset]


def _most_promising(tables: Tables, subsets: Sequence[Ranks], whole_s: dict[int, float], keep: int) -> list[Ranks]:
    """Return the sets with least estimated seconds, computation and ring, fastest first; those that do not fit are left out.

    A ring is estimated only for sets whose computation alone is faster than the estimates kept so far.
    """
    computed = sorted((compute, subset, second) for subset in subsets for compute, second in _compute_s(tables, subset, whole_s))
    best: dict[Ranks, float] = {}
    limit = math.inf
    for compute, subset, second in computed:
        if compute > limit:
            break
        best[subset] = min(best.get(subset, math.inf), compute + _ring_s(tables, subset, second, whole_s))
        if len(best) >= keep:
            limit = sorted(best.values())[keep - 1]
    return sorted(best, key=lambda subset: (best[subset], subset))[:keep]


def _compute_s(tables: Tables, ranks: Ranks, whole_s: dict[int, float]) -> list[tuple[float, tuple[int, ...]]]:
    """Return about the seconds of computation, work by speed as far as memory goes, with no and with most scheme-2 layers, if they fit."""
    room = tables.room(first_placed(tables, ranks, ranks[0]))
    total = tables.num_units * tables.unit_bytes + tables.feed_forward_bytes((0,) * len(tables.layers))[0] * tables.num_columns
    if min(room) < 0 or sum(room) < total:
        return []
    full = tables.feed_forward_bytes(tables.layers)[2]
    attention = tables.num_units * tables.unit_bytes
    # The part of all layers that can be scheme 2: none on a device too small, and n - 1 networks more in all for each.
    extra = full * (len(ranks) - 1)
    most = max(0.0, min(1.0, min(room) / full if full else 1.0, (sum(room) - total) / extra if extra else 1.0))
    found = []
    for second in dict.fromkeys(tuple(int(part * layers) for layers in tables.layers) for part in (0.0, most)):
        own, _, held = tables.feed_forward_bytes(second)
        need = attention + own * tables.num_columns
        caps = [max(0.0, (nbytes - held)) / max(need, 1.0) for nbytes in room]
        compute = _filled([1.0 / whole_s[rank] for rank in ranks], caps)
        if math.isfinite(compute):
            found.append((compute, second))
    return found


def _ring_s(tables: Tables, ranks: Ranks, second: tuple[int, ...], whole_s: dict[int, float]) -> float:
    """Return about the seconds of the collectives, tokens by speed or equal."""
    speed = proportional_parts(tables.num_tokens, [1.0 / whole_s[rank] for rank in ranks])
    equal = proportional_parts(tables.num_tokens, [1.0] * len(ranks))
    return min(
        sum(
            count * tables.ring_bound_s(ranks, tables.cut(stack, tokens, tables.lengths[stack]), stack)
            for stack, count in enumerate(tables.rings(second))
        )
        for tokens in (speed, equal)
    )


def _filled(speeds: Sequence[float], caps: Sequence[float]) -> float:
    """Return the seconds of work 1 shared by speed, no device more than its cap; inf if the caps do not hold it."""
    if sum(caps) < 1 - 1e-9:
        return math.inf
    able, left = list(range(len(speeds))), 1.0
    while able:
        seconds = left / sum(speeds[i] for i in able)
        over = [i for i in able if speeds[i] * seconds > caps[i]]
        if not over or left <= 1e-12:
            return seconds
        for i in over:
            left -= caps[i]
            able.remove(i)
    return seconds
