"""Assign contiguous blocks and a ring order to devices: RingAda's coordinator (section IV-B, 1), whose algorithm the
paper leaves open.

Our algorithm minimises the expected time of the whole training (see estimate), in which the load moves to the top as
layers unfreeze, not of one moment.
The search moves layers between the ring's devices and swaps devices as long as that helps, from several starts.
Each device brings its own samples.  So as many devices as possible are on the ring, and of so many the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, combinations, pairwise, permutations
from typing import NamedTuple

import numpy as np

from workbench.core.plan import Plan, one_device_stages
from workbench.methods.ringada.estimate import RingEstimate
from workbench.methods.ringada.moves import Stages
from workbench.planners.memory import Demand, too_small

_FEW = 4
"""With at most this many devices, every ring order is a start."""
_SOME = 6
"""With at most this many devices, a swap and a move are also tried together."""
_EXACT = 10
"""With at most this many devices, the search for a ring that fits tries every order; with more, those with most memory
come first."""


def _demand(pricer: RingEstimate) -> Demand:
    """Return what the roomiest device would need: the layers behind as many as fit on the others."""
    *others, roomiest = sorted(
        range(pricer.cluster.world_size), key=lambda rank: pricer.cluster.devices[rank].memory_bytes
    )
    start, num_layers = 0, pricer.profile.num_layers
    for rank in others:
        start = max([start, *np.flatnonzero(pricer.fits(rank)[start]).tolist()])
    return pricer.demand(roomiest, min(start, num_layers - 1), num_layers)


def plan_ring(pricer: RingEstimate) -> Plan:
    """Return the blocks and the ring order of as many devices as have room for a block.

    A note says why devices are left out.  Raises PlanError if the devices' memory is too small.
    """
    cluster, num_layers = pricer.cluster, pricer.profile.num_layers
    most = min(cluster.world_size, num_layers)
    results = (_search(pricer, count) for count in range(most, 0, -1))
    order, cuts, price_s = next((result for result in results if result[2] < float("inf")), ((), (), float("inf")))
    if price_s == float("inf"):
        raise too_small(cluster, _demand(pricer), f" No assignment of {num_layers} blocks to any devices fits.")
    why = (
        f"it has {num_layers} blocks, one or more for each device"
        if len(order) == num_layers
        else "more do not fit in memory"
    )
    left_out = (
        f"The ring has {len(order)} of {cluster.world_size} devices ({why}); the samples of the others are not "
        "trained on."
    )
    return Plan(
        method="ringada",
        stages=one_device_stages(order, cuts, pricer.micro_batch_size),
        micro_batch_size=pricer.micro_batch_size,
        num_micro_batches=pricer.micro_batches,
        predicted_s={"average mini-batch": price_s},
        notes=(left_out,) if len(order) < cluster.world_size else (),
    )


class Segment(NamedTuple):
    """Rounds of a run that train about the same layers.

    first: the number of their first round.  counts: their mini-batches by depth (see RingEstimate.counts).
    """

    first: int
    counts: np.ndarray

    @property
    def num_steps(self) -> int:
        """Return the number of their mini-batches."""
        return int(self.counts.sum())


def plan_segments(
    once: Plan, pricer: RingEstimate, segments: Sequence[Segment], change_s: Callable[[Stages, Stages, int], float]
) -> Plan:
    """Return a plan that follows the unfreezing by dynamic programming: each segment gets a new assignment or keeps the
    previous one.

    once: the single plan for the whole training, which each segment may keep; the other candidates are the best for
    one, two, four ... segments.  pricer: prices the whole training.  change_s: the seconds of moving layers from one
    assignment to another before a round.
    The sum of the rounds' and the moves' seconds is the least over all sequences of these assignments, so it never
    exceeds `once`'s.
    """
    rings = {(tuple(stage.ranks[0] for stage in once.stages), (0, *(stage.stop for stage in once.stages))): once.stages}
    runs = (segments[first : first + size] for size in (1, 2, 4, 8, 16) for first in range(len(segments) - size + 1))
    for some in runs:
        counts = np.sum([segment.counts for segment in some], axis=0)
        seconds = partial(pricer.total_s, counts=counts)
        order, cuts, _ = _search(pricer, len(once.stages), seconds, members=once.busy_ranks)
        rings.setdefault((order, cuts), one_device_stages(order, cuts, once.micro_batch_size))
    total_s, moves_s, chosen = _cheapest(list(rings.items()), pricer, segments, change_s)
    stages, steps = list(rings.values()), sum(segment.num_steps for segment in segments)
    pairs = zip(segments[1:], pairwise(chosen), strict=True)
    changes = [(segment.first, stages[ring]) for segment, (before, ring) in pairs if ring != before]
    predicted_s = {"average mini-batch": (total_s - moves_s) / steps} | (
        {"changes of the plan": moves_s / steps} if changes else {}
    )
    return replace(once, stages=stages[chosen[0]], later=tuple(changes), predicted_s=predicted_s)


_Way = tuple[float, float, tuple[int, ...]]
"""A choice of rings for some segments: all seconds, the seconds of moves, and the indices of the rings."""


def _cheapest(
    rings: Sequence[tuple[Ring, Stages]],
    pricer: RingEstimate,
    segments: Sequence[Segment],
    change_s: Callable[[Stages, Stages, int], float],
) -> _Way:
    """Return the index of the ring for each segment, by dynamic programming."""
    orders, cuts = np.array([order for (order, _), _ in rings]), np.array([cuts for (_, cuts), _ in rings])
    ways: list[_Way] = [(0.0, 0.0, ())] * len(rings)  # the best sequence that ends with each ring
    for number, segment in enumerate(segments):
        rounds_s = pricer.total_s(orders, cuts, segment.counts)
        cheapest, longer = sorted(enumerate(ways), key=lambda pair: pair[1][0]), list[_Way]()
        for ring, best in enumerate(ways):
            for before, (so_far_s, moves_s, chosen) in cheapest if number else ():
                if so_far_s >= best[0]:
                    break
                one_s = change_s(rings[before][1], rings[ring][1], segment.first)
                best = min(best, (so_far_s + one_s, moves_s + one_s, chosen))
            longer.append((best[0] + float(rounds_s[ring]), best[1], (*best[2], ring)))
        ways = longer
    return min(ways)


Seconds = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (orders, cuts) -> seconds of each ring (see RingEstimate)
Ring = tuple[tuple[int, ...], tuple[int, ...]]  # the devices in order, and the cuts


def _search(
    pricer: RingEstimate, count: int, seconds: Seconds | None = None, *, members: Collection[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    """Return the best ring of so many devices that the search reaches, and its seconds; infinite seconds if none fits.

    seconds: a cost function to use instead of the pricer.  members: the devices that may be used (default: all).
    """
    layers, allowed = (
        pricer.profile.num_layers,
        sorted(range(pricer.cluster.world_size) if members is None else members),
    )
    price, types = seconds or pricer, pricer.types
    fits = {rank: pricer.fits(rank) for rank in allowed}
    usable = [rank for rank in allowed if fits[rank].any()]
    if len(usable) < count:
        return (), (), float("inf")
    speed = [1 / max(sum(layer.forward_s(1, 1) for layer in row), 1e-12) for row in pricer.profile.layers]
    if len(usable) <= _FEW:
        alike = {tuple(types[rank] for rank in order): order for order in permutations(reversed(usable), count)}
        orders = list(alike.values())
    else:
        fastest = sorted(usable, key=lambda rank: -speed[rank])[:count]
        largest = sorted(usable, key=lambda rank: (-int(fits[rank].sum()), -speed[rank]))[:count]
        orders = [tuple(order) for some in (fastest, largest) for order in (sorted(some), some, some[::-1])]
    best: tuple[float, Ring] = (float("inf"), ((), ()))
    passed = set[Ring]()
    for order in dict.fromkeys(orders):
        weights = [speed[rank] for rank in order], [speed[rank] / (1 + place) for place, rank in enumerate(order)]
        starts = [_fitting_cuts(layers, shares, [fits[rank] for rank in order]) for shares in weights]
        best = min([best, *(_improved(price, types, (order, cuts), usable, passed) for cuts in starts if cuts)])
    if best[0] == float("inf") and (ring := _fitting_ring(layers, fits, usable, count)):
        best = _improved(price, types, ring, usable, passed)
    return (*best[1], best[0])


def _improved(
    pricer: Seconds, types: Sequence[int], ring: Ring, usable: Sequence[int], passed: set[Ring]
) -> tuple[float, Ring]:
    """Return a ring and its seconds that no move of a layer, no other device, no swap of two devices and no combination
    improves; or a ring from which an earlier search continued.

    passed: the rings of the earlier searches, to which this one's are added.
    """

    def best_of(rings: list[Ring]) -> tuple[float, Ring]:
        seconds = pricer(np.array([order for order, _ in rings]), np.array([cuts for _, cuts in rings]))
        return float(seconds.min()), rings[int(seconds.argmin())]

    now_s, ring = best_of([ring])
    while ring not in passed:
        passed.add(ring)
        better_s, better = best_of([ring, *_moved(ring)])
        if better_s >= now_s * (1 - 1e-9):
            changed = [*_swapped(ring, types), *_exchanged(ring, types, usable)]
            better_s, better = best_of([ring, *changed])
            if better_s >= now_s * (1 - 1e-9) and len(usable) <= _SOME:
                better_s, better = best_of([ring, *(moved for neighbour in changed for moved in _moved(neighbour))])
        if better_s >= now_s * (1 - 1e-9):
            break
        now_s, ring = better_s, better
    return now_s, ring


def _fitting_cuts(num_layers: int, weights: Sequence[float], fits: Sequence[np.ndarray]) -> tuple[int, ...]:
    """Return the cuts closest to proportional ones that fit: the least maximum of layers divided by weight; () if none
    fit.

    weights, fits: one of each for every device, in their order.  Each device has at least one layer.
    """
    counts = np.arange(num_layers + 1)[None] - np.arange(num_layers + 1)[:, None]
    least = np.where(
        np.arange(num_layers + 1) == num_layers, 0.0, np.inf
    )  # of layers [x, all) on the devices behind, by x
    stops = list[np.ndarray]()
    for weight, fitting in zip(reversed(weights), reversed(fits), strict=True):
        table = np.where(fitting, np.maximum(counts / weight, least), np.inf)
        stops.append(table.argmin(axis=1))
        least = table.min(axis=1)
    if least[0] == np.inf:
        return ()
    cuts = [0]
    for stops_of_device in reversed(stops):
        cuts.append(int(stops_of_device[cuts[-1]]))
    return tuple(cuts)


def _fitting_ring(num_layers: int, fits: Mapping[int, np.ndarray], usable: Sequence[int], count: int) -> Ring | None:
    """Return a ring of so many devices that fits, of those that any order can give; None if there is none (see
    _EXACT).
    """
    if len(usable) > _EXACT:
        return None  # those with most memory have been tried
    ends: dict[int, dict[int, tuple[int, int]]] = {
        0: {0: (0, 0)}
    }  # set of devices: {layers on them: (last device, layers before it)}
    for members in sorted(range(1, 1 << len(usable)), key=int.bit_count):
        reached = ends[members] = {}
        for place, rank in enumerate(usable):
            before = ends[members & ~(1 << place)] if members >> place & 1 else {}
            for start in before:
                reached |= dict.fromkeys(np.flatnonzero(fits[rank][start]).tolist(), (place, start))
        if members.bit_count() == count and num_layers in reached:
            order, cuts = list[int](), [num_layers]
            while members:
                place, start = ends[members][cuts[-1]]
                order.append(usable[place])
                cuts.append(start)
                members &= ~(1 << place)
            return tuple(reversed(order)), tuple(reversed(cuts))
    return None


def _moved(ring: Ring) -> list[Ring]:
    """Return the rings with a layer moved from one device to another, and those with all layers but one per device on
    one device.
    """
    (order, cuts), places = ring, range(len(ring[0]))
    pairs = [(a, b) for a in places for b in places if a != b and cuts[a + 1] - cuts[a] > 1]
    more = cuts[-1] - len(order)
    gathered = [(order, tuple(k + more * (k > place) for k in range(len(cuts)))) for place in places]
    return [
        (order, tuple(cut - (a < k <= b) + (b < k <= a) for k, cut in enumerate(cuts))) for a, b in pairs
    ] + gathered


def _swapped(ring: Ring, types: Sequence[int]) -> list[Ring]:
    """Return the rings with two devices swapped; the numbers of layers stay with the places, or move with the
    devices.
    """
    rings, (order, cuts) = list[Ring](), ring
    for b, a in combinations(range(len(order)), 2):
        if types[order[a]] != types[order[b]]:
            other, sizes = list(order), [stop - start for start, stop in pairwise(cuts)]
            other[a], other[b] = other[b], other[a]
            sizes[a], sizes[b] = sizes[b], sizes[a]
            rings += [(tuple(other), cuts), (tuple(other), tuple(accumulate(sizes, initial=0)))]
    return rings


def _exchanged(ring: Ring, types: Sequence[int], usable: Sequence[int]) -> list[Ring]:
    """Return the rings with one device replaced by one outside, one of each type."""
    order, cuts = ring
    outside = {types[rank]: rank for rank in usable if rank not in order}
    return [
        ((*order[:place], rank, *order[place + 1 :]), cuts)
        for place in range(len(order))
        for kind, rank in outside.items()
        if kind != types[order[place]]
    ]
