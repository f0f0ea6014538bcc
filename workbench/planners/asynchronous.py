"""Cut a model over devices for an asynchronous pipeline, within each device's memory (Confidant, section 3.2, Eq. 1-3).

Eq. 3: A(l, n) = min over p of max(A(p, n - 1), 2 T_c, T_e(p + 1, l)): the pace of the pipeline is the pace of its
slowest stage or slowest link, over which an activation goes one way and a gradient the other.  T_e is infinite if
memory does not suffice.  We build the table from the last device on, because the stash of a stage depends on how many
devices follow: N - i - 1 versions on device i of N.
Memory is the workbench's measured model.
The order of the devices is given, as in the paper.  The same recursion also finds the best choice of devices in a given
order, and the best of all orders of all sets of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from workbench.core.errors import PlanError
from workbench.core.plan import Activations, Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.planners.memory import (
    ASYNCHRONOUS,
    Demand,
    FootprintTable,
    Need,
    check,
    named_layers,
    rank_need,
    too_small,
)
from workbench.planners.orders import sorted_orders
from workbench.planners.problem import Problem

MOST_IN_EVERY_ORDER = 8
"""With more devices, only the cluster's order and those by speed and by memory are tried, each with every choice of
devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """pace_s: seconds per mini-batch in steady state.  order: ranks.  cuts: device order[i] has layers [cuts[i], cuts[i
    + 1]).
    """

    pace_s: float
    order: tuple[int, ...]
    cuts: tuple[int, ...]


class Equation3:
    """The terms of Eq. 3 for a problem: seconds of layers on devices, whether they fit, and seconds between devices.

    versions: of the weights, see delay_of.
    """

    def __init__(self, problem: Problem[Profile], *, versions: VersionRule = "stashing") -> None:
        self.versions: VersionRule = versions
        self.profile, self.cluster, self.batch_size = profile, cluster, batch_size = (
            problem.profile,
            problem.cluster,
            problem.batch_size,
        )
        sequence_length, self.memory_length = problem.sequence_length, problem.longest
        count, ranks = profile.num_layers, range(cluster.world_size)
        starts, stops = self._ranges = np.triu_indices(count + 1, 1)
        self._seconds, self._footprints = list[np.ndarray](), list[FootprintTable]()
        for layers in profile.layers:
            passes = [
                one.forward_s(batch_size, sequence_length) + one.backward_s(batch_size, sequence_length)
                for one in layers
            ]
            each = [seconds + one.seconds("STEP", 1, 1) for seconds, one in zip(passes, layers, strict=True)]
            total = np.concatenate([[0.0], np.cumsum(each)])
            seconds = np.full((count + 1, count + 1), np.inf)
            seconds[self._ranges] = total[stops] - total[starts]
            self._seconds.append(seconds)
        for rank in ranks:
            no_copies = (0,) * cluster.world_size  # their number is the most mini-batches in flight
            table = FootprintTable(profile, rank, starts, stops, sequence_length=self.memory_length, copies=no_copies)
            self._footprints.append(table)
        self._stages: dict[tuple[int, int, int], np.ndarray] = {}
        sizes = [one.output_bytes(batch_size, sequence_length) for one in profile.layers[0]]
        pairs = [(a, b) for a in ranks for b in ranks if a != b]
        one_way = {(a, b): np.array([0.0, *map(cluster.link(a, b).transfer_s, sizes)]) for a, b in pairs}
        self._between = {(a, b): seconds + one_way[b, a] for (a, b), seconds in one_way.items()}

    @property
    def most_stages(self) -> int:
        """Return the most devices that can have a stage, of at least one layer."""
        return min(self.cluster.world_size, self.profile.num_layers)

    def between_s(self, rank: int, following: int) -> np.ndarray:
        """Return 2 T_c by x: seconds of an activation after layer x - 1 and of its gradient, (layers + 1,)."""
        return self._between[rank, following]

    def need(
        self, rank: int, behind: int, start: int, stop: int, *, num_stages: int, activations: Activations = "memory"
    ) -> Need:
        """Return the memory need of layers [start, stop) on a device with `behind` devices after it, by the measured
        model.
        """
        return rank_need(
            self.profile,
            rank,
            start,
            stop,
            samples=self.batch_size,
            sequence_length=self.memory_length,
            in_flight=behind + 1,
            copies=delay_of(self.versions, behind, num_stages),
            activations=activations,
        )

    def seconds(self, rank: int) -> np.ndarray:
        """Return T_e of layers [x, y) on a device, whatever its memory, (layers + 1, layers + 1)."""
        return self._seconds[rank]

    def stage(self, rank: int, behind: int, num_stages: int) -> np.ndarray:
        """Return T_e of layers [x, y) on a device with `behind` devices after it; infinite where its memory does not
        suffice.
        """
        copies = delay_of(self.versions, behind, num_stages)
        if (rank, behind, copies) not in self._stages:
            held = self._footprints[rank].with_copies(self.batch_size, behind, copies)
            fits = held <= self.cluster.devices[rank].memory_bytes
            stage = self._seconds[rank].copy()
            stage[self._ranges] = np.where(fits, stage[self._ranges], np.inf)
            self._stages[rank, behind, copies] = stage
        return self._stages[rank, behind, copies]


class _State(NamedTuple):
    """The end of a pipeline.  rank: its first device.  behind: the number of devices after it.  others: these as bits,
    or 0 if open.
    """

    rank: int
    behind: int
    others: int = 0


def partition_in_order(costs: Equation3, order: Sequence[int], *, in_memory: bool = True) -> Partition:
    """Return the best cuts of all layers over all devices in this order (Eq. 3); pace_s is infinite if none fits.

    in_memory: False considers computing speed alone (FTPipeHD).
    """
    ends = [_State(rank, behind) for behind, rank in enumerate(reversed(order))]
    following = dict(zip(ends[1:], ends[:-1], strict=True))
    return _best(costs, len(order), ends, lambda end: [following[end]], only_whole=True, in_memory=in_memory)


def partition_of_some(costs: Equation3, order: Sequence[int]) -> Partition:
    """Return the best cuts over all choices of devices that keep this order: Eq. 3 with the number of following devices
    as an index.
    """
    later = {rank: order[place + 1 :] for place, rank in enumerate(order)}

    def following(end: _State) -> list[_State]:
        return [_State(rank, end.behind - 1) for rank in later[end.rank] if len(later[rank]) >= end.behind - 1]

    ends = [_State(rank, behind) for behind in range(costs.most_stages) for rank in order if len(later[rank]) >= behind]
    return _best_by_count(costs, ends, following)


def partition_in_any_order(costs: Equation3) -> Partition:
    """Return the best cuts over all orders of all sets of devices: Eq. 3 with the set of following devices as an
    index.
    """
    ranks = range(costs.cluster.world_size)

    def following(end: _State) -> list[_State]:
        return [_State(rank, end.behind - 1, end.others & ~(1 << rank)) for rank in ranks if end.others >> rank & 1]

    sets = sorted(range(1 << len(ranks)), key=int.bit_count)
    members = ((rank, others) for others in sets for rank in ranks if not others >> rank & 1)
    ends = [
        _State(rank, others.bit_count(), others) for rank, others in members if others.bit_count() < costs.most_stages
    ]
    return _best_by_count(costs, ends, following)


_Following = Callable[[_State], Sequence[_State]]


def _best_by_count(costs: Equation3, ends: Sequence[_State], following: _Following) -> Partition:
    """Return the best pipeline of any number of devices.  Vertical sync needs a search for each number, on which its
    versions depend.
    """
    if costs.versions != "vertical_sync":
        return _best(costs, costs.most_stages, ends, following, only_whole=False)
    counts = range(1, costs.most_stages + 1)
    found = [
        _best(costs, count, [end for end in ends if end.behind < count], following, only_whole=True) for count in counts
    ]
    return min(found, key=lambda one: one.pace_s)


def _best(
    costs: Equation3,
    num_stages: int,
    ends: Iterable[_State],
    following: _Following,
    *,
    only_whole: bool,
    in_memory: bool = True,
) -> Partition:
    """Return the pipeline with the best pace; of equally good ones one of fewest devices.

    ends: the possible ends of pipelines, shorter ones first.  following: those that may follow a first device.
    only_whole: whether the pipeline must have num_stages devices.
    """
    pace: dict[_State, np.ndarray] = {}  # of layers [x, all), by x
    choices: dict[
        _State, tuple[np.ndarray, list[_State]]
    ] = {}  # by x: where the first device stops, and the end that follows
    for end in ends:
        stage = costs.stage(end.rank, end.behind, num_stages) if in_memory else costs.seconds(end.rank)
        if not end.behind:
            pace[end] = stage[:, -1]
            continue
        later = following(end)
        rest = np.array([np.maximum(costs.between_s(end.rank, one.rank), pace[one]) for one in later])
        table = np.maximum(stage, rest.min(axis=0))
        stops = table.argmin(axis=1)
        pace[end] = table.min(axis=1)
        choices[end] = stops, [later[place] for place in rest.argmin(axis=0)[stops]]
    whole = [end for end in pace if end.behind == num_stages - 1 or not only_whole]
    end = min(whole, key=lambda end: (pace[end][0], end.behind))
    pace_s, order, cuts = float(pace[end][0]), [end.rank], [0]
    while end in choices:
        stops, nexts = choices[end]
        end, stop = nexts[cuts[-1]], int(stops[cuts[-1]])
        order.append(end.rank)
        cuts.append(stop)
    return Partition(pace_s=pace_s, order=tuple(order), cuts=(*cuts, costs.profile.num_layers))


def even_partition(costs: Equation3, order: Sequence[int]) -> Partition:
    """Return an equal number of layers for each device, in this order (the paper's PipeDream); the first devices get
    one more.
    """
    layers, count = costs.profile.num_layers, len(order)
    cuts = tuple(place * (layers // count) + min(place, layers % count) for place in range(count + 1))
    return Partition(pace_s=pace_of(costs, order, cuts), order=tuple(order), cuts=cuts)


def pace_of(costs: Equation3, order: Sequence[int], cuts: Sequence[int]) -> float:
    """Return Eq. 3's value of given cuts: the slowest stage or link, even if it does not fit."""
    seconds = [float(costs.seconds(rank)[cuts[at], cuts[at + 1]]) for at, rank in enumerate(order)]
    links = [
        float(costs.between_s(rank, following)[cuts[at + 1]]) for at, (rank, following) in enumerate(pairwise(order))
    ]
    return max(*seconds, *links, 0.0)


def asynchronous_plan(costs: Equation3, partition: Partition, *, method: str, check_memory: bool = True) -> Plan:
    """Return a partition as a plan.  Raises PlanError naming the stage that does not fit, its device and the missing
    bytes.
    """
    if partition.pace_s == float("inf"):
        raise nothing_fits(costs, partition.order)
    blocks = zip(partition.order, pairwise(partition.cuts), strict=True)
    stages = tuple(
        Stage(start=start, stop=stop, shares=(Share(rank=rank, samples=costs.batch_size),))
        for rank, (start, stop) in blocks
    )
    plan = Plan(
        method=method,
        stages=stages,
        micro_batch_size=costs.batch_size,
        num_micro_batches=1,
        predicted_s={"mini-batch in the long run": partition.pace_s},
    )
    if check_memory:
        check(
            costs.profile,
            costs.cluster,
            plan,
            sequence_length=costs.memory_length,
            order=ASYNCHRONOUS,
            versions=costs.versions,
        )
    return plan


def plan_asynchronous(costs: Equation3, *, searches: bool, method: str) -> Plan:
    """Return the best plan: of any order of any set of devices if `searches`, else of the cluster's devices in their
    order.

    In their order all devices have a stage, as in the paper, if Eq. 3 finds such a partition that fits.  If not, which
    the paper does not treat, the plan is the best over all choices of devices in this order.  With more than
    MOST_IN_EVERY_ORDER devices `searches` tries every choice of devices in a few orders.  Raises PlanError if nothing
    fits.
    """
    world, layers = costs.cluster.world_size, costs.profile.num_layers
    everyone, notes = tuple(range(world)), tuple[str, ...]()
    if searches and world <= MOST_IN_EVERY_ORDER:
        found = partition_in_any_order(costs)
    elif searches:
        orders = [everyone, *sorted_orders(costs.profile, costs.cluster, costs.memory_length)]
        found = min((partition_of_some(costs, order) for order in orders), key=lambda one: one.pace_s)
    else:
        found = Partition(pace_s=float("inf"), order=everyone, cuts=())
        if world <= layers:
            found = partition_in_order(costs, everyone)
        if found.pace_s == float("inf"):
            found = partition_of_some(costs, everyone)
            why = (
                "no partition over all devices fits in memory"
                if world <= layers
                else f"{world} devices cannot share {layers} layers"
            )
            notes = (f"In the cluster's order {why}: this is the fastest partition over some of them.",)
    if found.pace_s == float("inf"):
        raise nothing_fits(costs, everyone[:layers])
    plan = asynchronous_plan(costs, found, method=method)
    return replace(plan, notes=(*plan.notes, *notes))


def nothing_fits(costs: Equation3, order: Sequence[int]) -> PlanError:
    """Return the error if no partition fits on devices in an order: the first block that does not fit behind as many
    layers as fit on the devices before it.
    """
    start, layers = 0, costs.profile.num_layers
    for place, rank in enumerate(order):
        behind, budget = len(order) - place - 1, costs.cluster.devices[rank].memory_bytes
        most = layers - behind  # each following device has at least one
        needs = {
            stop: costs.need(rank, behind, start, stop, num_stages=len(order)) for stop in range(start + 1, most + 1)
        }
        stop = max((stop for stop, need in needs.items() if need.total_bytes <= budget), default=0)
        if not stop or (not behind and stop < layers):
            stop = start + 1 if behind else layers
            part = f"{named_layers(start, stop)}, behind as many as fit on the devices before it,"
            return too_small(costs.cluster, Demand(rank, part, needs[stop].total_bytes, needs[stop].purposes))
        start = stop
    raise AssertionError("a partition fits")
