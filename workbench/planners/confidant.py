"""Cut a model over devices for an asynchronous pipeline, within each device's memory (Confidant, section 3.2, Eq. 1-3).

Eq. 3: A(l, n) = min over p of max(A(p, n - 1), 2 T_c, T_e(p + 1, l)): the pace of the pipeline is the pace of its slowest stage or slowest
link, over which an activation goes one way and a gradient the other.  T_e is infinite if memory does not suffice.  We build the table
from the last device on, because the stash of a stage depends on how many devices follow: N - i - 1 versions on device i of N.
Memory is the workbench's measured model; `printed_need` is Eq. 1 and 2 as printed.
The order of the devices is given, as in the paper, or the same recursion finds the best of all orders of all sets of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.planners.memory import ASYNCHRONOUS, FootprintTable, Need, check, rank_need, readable
from workbench.planners.orders import sorted_orders

MOST_IN_EVERY_ORDER = 8
"""With more devices, only the orders by speed and by memory are tried, with all devices in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """pace_s: seconds per mini-batch in steady state.  order: ranks.  cuts: device order[i] has layers [cuts[i], cuts[i + 1])."""

    pace_s: float
    order: tuple[int, ...]
    cuts: tuple[int, ...]


class StageCosts:
    """The inputs of Eq. 3: seconds of layers on devices, whether they fit, and seconds between devices.

    sequence_length: for timing.  memory_length: for memory.  versions: of the weights, see delay_of.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        batch_size: int,
        sequence_length: int,
        memory_length: int,
        versions: VersionRule = "stashing",
    ) -> None:
        self.versions: VersionRule = versions
        self.profile, self.cluster, self.batch_size, self.memory_length = profile, cluster, batch_size, memory_length
        count, world = profile.num_layers, cluster.world_size
        starts, stops = np.triu_indices(count + 1, 1)
        at = np.arange(len(starts))
        self._seconds, self._fits = [], []  # by rank: (layers + 1, layers + 1); (devices behind, layers + 1, layers + 1)
        for rank, device in enumerate(cluster.devices):
            each = [
                one.forward_s(batch_size, sequence_length) + one.backward_s(batch_size, sequence_length) + one.seconds("STEP", 1, 1)
                for one in profile.layers[rank]
            ]
            total = np.concatenate([[0.0], np.cumsum(each)])
            seconds = np.full((count + 1, count + 1), np.inf)
            seconds[starts, stops] = total[stops] - total[starts]
            self._seconds.append(seconds)
            table = FootprintTable(
                profile, rank, starts, stops, sequence_length=memory_length, copies=[self.copies(behind) for behind in range(world)]
            )
            fits = np.zeros((world, count + 1, count + 1), bool)
            for behind in range(world):
                held = table.nbytes(np.array(batch_size), np.full(len(starts), behind), at)
                fits[behind, starts, stops] = held <= device.memory_bytes
            self._fits.append(fits)
        sizes = [one.output_bytes(batch_size, sequence_length) for one in profile.layers[0]]
        ranks = range(world)
        one_way = {
            (a, b): np.array([0.0, *(cluster.link(a, b).transfer_s(size) for size in sizes)]) for a in ranks for b in ranks if a != b
        }
        self._between = {(a, b): seconds + one_way[b, a] for (a, b), seconds in one_way.items()}

    def between_s(self, rank: int, following: int, stop: int) -> float:
        """Return 2 T_c: seconds of an activation after layer stop - 1 and of its gradient."""
        return float(self._between[rank, following][stop])

    def need(self, rank: int, behind: int, start: int, stop: int) -> Need:
        """Return the memory need of layers [start, stop) on a device with `behind` devices after it, by the measured model."""
        return rank_need(
            self.profile,
            rank,
            start,
            stop,
            samples=self.batch_size,
            sequence_length=self.memory_length,
            in_flight=behind + 1,
            copies=self.copies(behind),
        )

    def copies(self, behind: int) -> int:
        """Return the versions that a stage keeps besides the newest, as if all devices had a stage."""
        return delay_of(self.versions, behind, self.cluster.world_size)

    def stage(self, rank: int, behind: int, *, in_memory: bool = True) -> np.ndarray:
        """Return T_e of layers [x, y) on a device with `behind` devices after it, (layers + 1, layers + 1)."""
        return np.where(self._fits[rank][behind], self._seconds[rank], np.inf) if in_memory else self._seconds[rank]

    def before(self, rank: int, behind: int, next_rank: int, rest: np.ndarray, *, in_memory: bool = True) -> np.ndarray:
        """Return the seconds of layers [x, all) by x and the end of the first device's layers; rest: of the others by x, (layers + 1,)."""
        return np.maximum(self.stage(rank, behind, in_memory=in_memory), np.maximum(self._between[rank, next_rank], rest))


def partition_in_order(costs: StageCosts, order: Sequence[int], *, in_memory: bool = True) -> Partition:
    """Return the best cuts of all layers over all devices in this order (Eq. 3); pace_s is infinite if none fits.

    in_memory: False considers computing speed alone (FTPipeHD).
    """
    rest = costs.stage(order[-1], 0, in_memory=in_memory)[:, -1]
    chosen: list[np.ndarray] = []
    for behind, (rank, following) in enumerate(reversed(list(pairwise(order))), start=1):
        table = costs.before(rank, behind, following, rest, in_memory=in_memory)
        chosen.append(table.argmin(axis=1))
        rest = table.min(axis=1)
    cuts = [0]
    for stops in reversed(chosen):
        cuts.append(int(stops[cuts[-1]]))
    return Partition(pace_s=float(rest[0]), order=tuple(order), cuts=(*cuts, costs.profile.num_layers))


def partition_in_any_order(costs: StageCosts) -> Partition:
    """Return the best cuts over all orders of all sets of devices: Eq. 3 with the set of following devices as a further index."""
    world = costs.cluster.world_size
    found: dict[tuple[int, int], np.ndarray] = {}  # (set, its first device): seconds of layers [x, all), by x
    choices: dict[tuple[int, int], np.ndarray] = {}  # the first device's stop and the next device, (2, layers + 1)
    for members in sorted(range(1, 1 << world), key=int.bit_count):
        ranks = [rank for rank in range(world) if members >> rank & 1]
        for rank in ranks:
            others = members & ~(1 << rank)
            if not others:
                found[members, rank] = costs.stage(rank, 0)[:, -1]
                continue
            best = np.full(costs.profile.num_layers + 1, np.inf)
            stops, after = np.zeros(len(best), int), np.zeros(len(best), int)
            for following in ranks:
                if following != rank:
                    table = costs.before(rank, len(ranks) - 1, following, found[others, following])
                    least = table.min(axis=1)
                    better = least < best
                    best, after = np.where(better, least, best), np.where(better, following, after)
                    stops = np.where(better, table.argmin(axis=1), stops)
            found[members, rank], choices[members, rank] = best, np.stack([stops, after])
    members, rank = min(found, key=lambda key: (found[key][0], key[0].bit_count()))
    pace_s, order, cuts = float(found[members, rank][0]), [rank], [0]
    while (members, rank) in choices:
        stop, following = map(int, choices[members, rank][:, cuts[-1]])
        members, rank = members & ~(1 << rank), following
        order.append(rank)
        cuts.append(stop)
    return Partition(pace_s=pace_s, order=tuple(order), cuts=(*cuts, costs.profile.num_layers))


def even_partition(costs: StageCosts, order: Sequence[int]) -> Partition:
    """Return an equal number of layers for each device, in this order (the paper's PipeDream); the first devices get one more."""
    layers, count = costs.profile.num_layers, len(order)
    cuts = tuple(place * (layers // count) + min(place, layers % count) for place in range(count + 1))
    return Partition(pace_s=pace_of(costs, order, cuts), order=tuple(order), cuts=cuts)


def pace_of(costs: StageCosts, order: Sequence[int], cuts: Sequence[int]) -> float:
    """Return Eq. 3's value of given cuts: the slowest stage or link, even if it does not fit."""
    seconds = [float(costs.stage(rank, 0, in_memory=False)[cuts[at], cuts[at + 1]]) for at, rank in enumerate(order)]
    links = [costs.between_s(rank, following, cuts[at + 1]) for at, (rank, following) in enumerate(pairwise(order))]
    return max(*seconds, *links, 0.0)


def asynchronous_plan(costs: StageCosts, partition: Partition, *, method: str, check_memory: bool = True) -> Plan:
    """Return a partition as a plan.  Raises PlanError naming the stage that does not fit, its device and the missing bytes."""
    if partition.pace_s == float("inf"):
        raise nothing_fits(costs, partition.order)
    blocks = zip(partition.order, pairwise(partition.cuts), strict=True)
    stages = tuple(Stage(start=start, stop=stop, shares=(Share(rank=rank, samples=costs.batch_size),)) for rank, (start, stop) in blocks)
    plan = Plan(
        method=method,
        stages=stages,
        micro_batch_size=costs.batch_size,
        num_micro_batches=1,
        predicted_s={"mini-batch in the long run": partition.pace_s},
    )
    if check_memory:
        check(costs.profile, costs.cluster, plan, sequence_length=costs.memory_length, order=ASYNCHRONOUS, versions=costs.versions)
    return plan


def plan_asynchronous(costs: StageCosts, *, searches: bool, method: str) -> Plan:
    """Return the best plan: of any order of any set of devices if `searches`, else of the cluster's devices in their order.

    Every device adds a version of the weights to each device before it.  If Eq. 3 finds no partition over all devices that fits, the last
    devices are left idle, as few as possible; the paper does not treat this case.  With more than MOST_IN_EVERY_ORDER devices a few
    orders are searched.  Raises PlanError if nothing fits.
    """
    world, layers = costs.cluster.world_size, costs.profile.num_layers
    whole = tuple(range(min(world, layers)))
    if searches and world <= MOST_IN_EVERY_ORDER:
        found = partition_in_any_order(costs)
    else:
        orders = [whole, *(sorted_orders(costs.profile, costs.cluster, costs.memory_length) if searches else ())]
        fewer = ((partition_in_order(costs, order[:count]) for order in orders) for count in range(len(whole), min(1, len(whole) - 1), -1))
        best = (min(found, key=lambda one: one.pace_s) for found in fewer)
        found = next((one for one in best if one.pace_s < float("inf")), Partition(pace_s=float("inf"), order=whole, cuts=()))
    if found.pace_s == float("inf"):
        raise nothing_fits(costs, whole)
    plan = asynchronous_plan(costs, found, method=method)
    if searches or len(found.order) == len(whole):
        return plan
    idle = ", ".join(costs.cluster.devices[rank].name for rank in whole[len(found.order) :])
    return replace(plan, notes=(*plan.notes, f"Over all devices no partition fits in memory; idle: {idle}."))


def compatibilities(capacities: Sequence[Sequence[float]], batteries: Sequence[float], left: float, eta: float = 1e-3) -> list[float]:
    """Return DC of each idle device as a replacement for a leaving one (Eq. 4): p b / (H + eta); the highest is the best.

    capacities: for each device the seconds of 1 to L layers.  batteries: the remaining charge.  left: p, the remaining share of the run.
    Both H, the sum of the seconds, and b are mapped to 0 to 1 from the least to the most among the devices, so their units cancel.
    The paper does not define them if least and most are equal, or for one device.  Then the devices do not differ, and each counts as the
    best: H = 0 and b = 1.  Of equal scores the first counts.  As printed, p is a factor of all scores and changes no choice, and the device
    with the least charge scores 0, however fast it is.
    """
    if not batteries:
        return []
    sums = np.array([np.sum(one) for one in capacities], float)
    charges = np.array(batteries, float)
    slow = (sums - sums.min()) / (np.ptp(sums) or 1.0)
    full = (charges - charges.min()) / np.ptp(charges) if np.ptp(charges) else np.ones(len(charges))
    return list(left * full / (slow + eta))


def nothing_fits(costs: StageCosts, order: Sequence[int]) -> PlanError:
    """Return the error if no partition fits on devices in an order: the block that does not fit, its device, and the missing bytes."""
    start, layers = 0, costs.profile.num_layers
    for place, rank in enumerate(order):
        behind, device = len(order) - place - 1, costs.cluster.devices[rank]
        most = layers - behind  # each following device has at least one
        blocks = {stop: costs.need(rank, behind, start, stop).total_bytes for stop in range(start + 1, most + 1)}
        stop = max((stop for stop, held in blocks.items() if held <= device.memory_bytes), default=0)
        if not stop or (not behind and stop < layers):
            stop = start + 1 if behind else layers
            held = blocks[stop]
            block = f"layer {start}" if stop == start + 1 else f"layers {start}-{stop - 1}"
            stashed = f" with stashed weights ({behind} times)" if behind else ""
            return PlanError(
                f"An asynchronous pipeline of {', '.join(costs.cluster.devices[one].name for one in order)} was asked for.",
                f"With as many layers as fit on the devices before it, {block} on '{device.name}'{stashed} needs {readable(held)};"
                f" the device has {readable(device.memory_bytes)}: {readable(held - device.memory_bytes)} too little.",
                "Add a device, raise its memory, lower batch_size, or train fewer weights (technique=lora).",
            )
        start = stop
    raise AssertionError("a partition fits")


def printed_need(need: Need, *, num_layers: int, behind: int, heads: int, batch: int, tokens: int, hidden: int, feed_forward: int) -> int:
    """Return M_tot of Eq. 1 in bytes, with M_act by Eq. 2 as printed, which we read as one layer's.

    need: of the layers by our model, for M_model, M_pipe (together its weights) and M_grad.  behind: N - i - 1, the following devices.
    The factors of Eq. 2 are those of Korthikanti et al. (2023), who count two bytes per value; 8 h_f / h is twice theirs.
    """
    activations = tokens * batch * hidden * (18 + 8 * feed_forward / hidden + 5 * heads * tokens / hidden)
    return round(need.weights_bytes + need.gradient_bytes + (behind + 1) * num_layers * activations)
