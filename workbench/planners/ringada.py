"""Assign contiguous blocks and a ring order to devices: RingAda's coordinator (section IV-B, 1), whose algorithm the paper leaves open.

Ours minimises the expected time of the whole training, in which the load moves to the top as layers unfreeze, not of one moment.
A mini-batch with some unfrozen layers takes as long as the busiest device computes, or as the unfrozen part takes, whichever is longer:
without stale weights its first forward pass waits for the last update.  In that part the micro-batches of a mini-batch form a pipeline:
one passes there and back, the others follow at the pace of the slowest stage.
The search moves single layers between neighbours on the ring and swaps devices as long as that helps, from several beginnings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.planners.memory import readable

_FEW = 4
"""So many devices or fewer: every ring order is a beginning."""


class RingPricer:
    """The seconds of an average mini-batch of a training.

    depths: unfrozen layers -> mini-batches of the run in which they are so many.  rest_bytes: of a device besides its layers.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        batch_size: int,
        micro_batches: int,
        sequence_length: int,
        depths: Mapping[int, int],
        rest_bytes: int = 0,
        memory_length: int = 0,
    ) -> None:
        self.profile, self.cluster, self._micro_batches, self._rest_bytes = profile, cluster, micro_batches, rest_bytes
        size, layers = -(-batch_size // micro_batches), profile.num_layers
        firsts = np.array([layers - depth for depth in depths])  # the lowest unfrozen layer of each depth
        self._weights = np.array(list(depths.values())) / sum(depths.values())
        index = np.arange(layers)[:, None]
        is_frozen, is_lowest = index < firsts, index == firsts  # (layers, depths)

        def summed(cells: np.ndarray) -> np.ndarray:
            return np.concatenate([np.zeros((1, cells.shape[1])), np.cumsum(cells, axis=0)])

        self._frozen, self._unfrozen, self._step = [], [], []
        for row in profile.layers:
            seconds = {kind: np.array([[layer.seconds(kind, size, sequence_length)] for layer in row]) for kind in "PFBA"}
            step = np.array([[layer.seconds("STEP", 1, 1)] for layer in row])
            there_and_back = seconds["F"] + np.where(is_lowest, seconds["A"], seconds["B"])
            self._frozen.append(summed(np.where(is_frozen, seconds["P"], 0.0)))
            self._unfrozen.append(summed(np.where(is_frozen, 0.0, there_and_back)))
            self._step.append(summed(np.where(is_frozen, 0.0, step)))
        self._firsts = firsts
        nbytes = profile.layers[0][0].output_bytes(size, sequence_length)
        world = range(cluster.world_size)
        self._crossing = np.array([[0.0 if a == b else cluster.link(a, b).transfer_s(nbytes) for b in world] for a in world])
        self._bytes = self._layer_bytes(size, memory_length or sequence_length)

    def needs(self, rank: int, start: int, stop: int) -> int:
        """Return the bytes that layers [start, stop) need on a device, all of them unfrozen, and what it keeps besides."""
        return int(self._bytes[rank][stop] - self._bytes[rank][start]) + self._rest_bytes

    def __call__(self, order: Sequence[int], cuts: Sequence[int]) -> float:
        """Return the seconds of a ring: device order[s] has layers [cuts[s], cuts[s + 1]).  Infinite if a device's memory is too small."""
        stages = [(rank, start, stop) for rank, (start, stop) in zip(order, pairwise(cuts), strict=True)]
        if any(self.needs(rank, start, stop) > self.cluster.devices[rank].memory_bytes for rank, start, stop in stages):
            return float("inf")
        frozen = np.stack([self._frozen[rank][stop] - self._frozen[rank][start] for rank, start, stop in stages])
        unfrozen = np.stack([self._unfrozen[rank][stop] - self._unfrozen[rank][start] for rank, start, stop in stages])
        step = np.stack([self._step[rank][stop] - self._step[rank][start] for rank, start, stop in stages])
        count = self._micro_batches
        busiest = (count * (frozen + unfrozen) + step).max(axis=0)
        is_open = np.array([[stop] for _, _, stop in stages]) > self._firsts
        # A hidden state goes from stage to stage, home to the initiator, and its gradient the same way back.
        hops = np.array([self._crossing[a, b] + self._crossing[b, a] for a, b in pairwise(order)] + [self._home(order[-1])])
        once = unfrozen.sum(axis=0) + (hops[:, None] * is_open).sum(axis=0) + step.max(axis=0)
        chain = once + (count - 1) * unfrozen.max(axis=0)
        return float((np.maximum(busiest, chain) * self._weights).sum())

    def _home(self, last: int) -> float:
        """Return the mean seconds there and back between the ring's last device and an initiator."""
        both = self._crossing[last] + self._crossing[:, last]
        return float(both.mean())

    def _layer_bytes(self, size: int, length: int) -> list[np.ndarray]:
        moments = 2 + self.profile.optimizer_bytes_per_trainable_byte
        found = []
        for row in self.profile.layers:
            kept = [self._micro_batches * layer.context_bytes(size, length) for layer in row]
            own = [layer.frozen_bytes + moments * layer.trainable_bytes + one for layer, one in zip(row, kept, strict=True)]
            found.append(np.concatenate([[0.0], np.cumsum(own)]))
        return found


def plan_ring(pricer: RingPricer, *, batch_size: int, micro_batches: int) -> Plan:
    """Return the blocks and the ring order of all devices.

    Raises PlanError for more devices than layers, or if the devices' memory is too small.
    """
    cluster, num_layers = pricer.cluster, pricer.profile.num_layers
    if cluster.world_size > num_layers:
        raise PlanError(
            f"A ring of {cluster.world_size} devices was asked for.",
            f"'{pricer.profile.model}' has {num_layers} blocks, and each device takes one or more.",
            "Take fewer devices, or a model of more layers.",
        )
    order, cuts, price_s = _search(pricer)
    if price_s == float("inf"):
        rank = min(range(cluster.world_size), key=lambda rank: cluster.devices[rank].memory_bytes)
        device, needed = cluster.devices[rank], pricer.needs(rank, 0, 1)
        raise PlanError(
            f"A ring of {', '.join(device.name for device in cluster.devices)} was asked for.",
            f"No assignment of {num_layers} blocks fits their memory; '{device.name}' has {readable(device.memory_bytes)},"
            f" and one block with embedding and head needs {readable(needed)}.",
            "Add a device, raise its memory, or lower the micro-batch size or the bottleneck.",
        )
    size = batch_size // micro_batches
    blocks = zip(order, pairwise(cuts), strict=True)
    stages = tuple(Stage(start=start, stop=stop, shares=(Share(rank=rank, samples=size),)) for rank, (start, stop) in blocks)
    return Plan(
        method="ringada", stages=stages, micro_batch_size=size, num_micro_batches=micro_batches, predicted_s={"average mini-batch": price_s}
    )


def _search(pricer: RingPricer) -> tuple[tuple[int, ...], tuple[int, ...], float]:
    world, layers = pricer.cluster.world_size, pricer.profile.num_layers
    speed = [1 / max(sum(layer.forward_s(1, 1) for layer in row), 1e-12) for row in pricer.profile.layers]
    by_speed = tuple(sorted(range(world), key=lambda rank: speed[rank]))
    orders = list(permutations(range(world))) if world <= _FEW else [tuple(range(world)), by_speed, by_speed[::-1]]
    best = (orders[0], _proportional(layers, [1.0] * world), float("inf"))
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def price(order: tuple[int, ...], cuts: tuple[int, ...]) -> float:
        if (order, cuts) not in known:
            known[order, cuts] = pricer(order, cuts)
        return known[order, cuts]

    for order in orders:
        for weights in ([1.0] * world, [speed[rank] for rank in order], [speed[rank] / (1 + place) for place, rank in enumerate(order)]):
            found = order, _proportional(layers, weights)
            now_s = price(*found)
            while True:
                nearby = min(_neighbours(*found), key=lambda one: price(*one), default=found)
                if price(*nearby) >= now_s * (1 - 1e-9):
                    break
                found, now_s = nearby, price(*nearby)
            if now_s < best[2]:
                best = (*found, now_s)
    return best


def _proportional(num_layers: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return cuts in proportion to weights, at least one layer each."""
    whole, cuts, total = sum(weights), [0], 0.0
    for place, weight in enumerate(weights):
        total += weight
        least, most = cuts[-1] + 1, num_layers - (len(weights) - 1 - place)
        cuts.append(min(max(round(num_layers * total / whole), least), most))
    return tuple(cuts)


def _neighbours(order: tuple[int, ...], cuts: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    for a in range(len(order)):  # one layer from any device to any other
        for b in range(len(order)):
            if a != b and cuts[a + 1] - cuts[a] > 1:
                shift = [int(a < k <= b) - int(b < k <= a) for k in range(len(cuts))]
                found.append((order, tuple(cut - one for cut, one in zip(cuts, shift, strict=True))))
    for a in range(len(order)):  # two devices change places, with or without their layers' numbers
        for b in range(a):
            swapped = list(order)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            sizes = [stop - start for start, stop in pairwise(cuts)]
            sizes[a], sizes[b] = sizes[b], sizes[a]
            found.append((tuple(swapped), cuts))
            found.append((tuple(swapped), (0, *np.cumsum(sizes).tolist())))
    return found
