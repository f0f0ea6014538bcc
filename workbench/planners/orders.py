"""Choose the device order: Algorithm 1 takes 'an ordered set of all devices' and leaves the order open (PAC+, section
V-A).

Equal devices are interchangeable, so only the distinct orders of device types count: 4 of one type and 4 of another
have 70.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from workbench.core.cluster import Cluster
from workbench.core.profile import Profile

Order = tuple[int, ...]
OTHER_ORDER = (
    "Nothing fits with the devices in the order of the cluster: this plan has another order, as with order=all."
)
"""The note on a plan that replaces one in the given order."""


def device_types(profile: Profile, cluster: Cluster) -> tuple[int, ...]:
    """Return each rank's type: the lowest rank with equal speed, memory and links."""
    kinds = []
    for rank, device in enumerate(cluster.devices):
        name = device.name if cluster.pairs else ""  # with links between named devices, each name is a type
        kinds.append((replace(device, name=name, address=None), profile.layers[rank]))
    return tuple(kinds.index(kind) for kind in kinds)


def count_orders(types: Sequence[int]) -> int:
    """Return the number of distinct orders: n! / (n_1! n_2! ...)."""
    return math.factorial(len(types)) // math.prod(math.factorial(types.count(kind)) for kind in set(types))


def distinct_orders(types: Sequence[int]) -> Iterator[Order]:
    """Yield the ranks in every distinct order of their types, with rising ranks within a type, in lexical order."""
    left = {kind: [rank for rank, other in enumerate(types) if other == kind] for kind in set(types)}
    chosen: list[int] = []

    def extend() -> Iterator[Order]:
        if len(chosen) == len(types):
            yield tuple(chosen)
        for ranks in sorted(ranks for ranks in left.values() if ranks):
            chosen.append(ranks.pop(0))
            yield from extend()
            ranks.insert(0, chosen.pop())

    return extend()


def sorted_orders(profile: Profile, cluster: Cluster, sequence_length: int) -> list[Order]:
    """Return the orders by speed and by memory, rising and falling, without repetitions."""
    ranks = range(cluster.world_size)
    seconds = [profile.train_s(rank, 1, sequence_length) for rank in ranks]
    memory = [device.memory_bytes for device in cluster.devices]
    keys = [(seconds[rank], -memory[rank]) for rank in ranks], [(-memory[rank], seconds[rank]) for rank in ranks]
    orders = (sorted(ranks, key=key.__getitem__, reverse=falls) for key in keys for falls in (False, True))
    return list(dict.fromkeys(map(tuple, orders)))


def search_orders(
    types: Sequence[int], evaluate: Callable[[Order], float], starts: Iterable[Order], *, max_orders: int
) -> dict[Order, float]:
    """Evaluate every distinct order if there are at most `max_orders`; otherwise climb from the best of `starts` by
    swapping two devices.

    The climb takes the first swap that helps, in random order.  It ends if none helps or after max_orders evaluations.
    Returns the value of each evaluated order.
    """
    if count_orders(types) <= max_orders:
        return {order: evaluate(order) for order in distinct_orders(types)}
    values: dict[tuple[int, ...], float] = {}
    value: dict[Order, float] = {}

    def look(order: Order) -> float:
        key = tuple(types[rank] for rank in order)
        if key not in values:
            values[key] = value[order] = evaluate(order)
        return values[key]

    best = min(starts, key=look)
    draw = random.Random(0)
    improved = True
    while improved:
        improved = False
        places = [(i, j) for i, j in combinations(range(len(best)), 2) if types[best[i]] != types[best[j]]]
        draw.shuffle(places)
        for i, j in places:
            if len(values) >= max_orders:
                break
            swapped = list(best)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            if look(tuple(swapped)) < look(best):
                best, improved = tuple(swapped), True
                break
    return value
