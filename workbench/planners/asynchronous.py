"""Cut a model over devices for an asynchronous pipeline, within each device's memory (Confidant, section 3.2, Eq. 1-3).

Eq. 3: A(l, n) = min over p of max(A(p, n - 1), 2 T_c, T_e(p + 1, l)).  The pace of the pipeline is that of its slowest
stage or slowest link; a link carries an activation forwards and a gradient backwards.  T_e is infinite if memory does
not suffice.  We build the table from the last device on, because the stash of a stage depends on how many
devices follow: N - i - 1 versions on device i of N.
On shared air all links together are one more: no two messages pass it at once, so the pace is at least the sum over the
cuts of the air's time.  The least sum for each pace of stages and links comes from the same recursion, and a bisection
over these paces finds the best.
Memory is the workbench's measured model.
The order of the devices is given, as in the paper.  The same recursion also finds the best choice of devices in a given
order, and the best of all orders of all sets of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from workbench.core.errors import PlanError
from workbench.core.plan import Plan, named_layers, one_device_stages
from workbench.core.proportions import proportional_parts
from workbench.planners.equation3 import Equation3, Partition, air_of, pace_of
from workbench.planners.memory import (
    ASYNCHRONOUS,
    Demand,
    check,
    too_small,
)
from workbench.planners.orders import sorted_orders

MOST_IN_EVERY_ORDER = 8
"""With more devices, only the cluster's order and those by speed and by memory are tried, each with every choice of
devices."""


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


def _some_of(costs: Equation3, order: Sequence[int]) -> _Search:
    """Search all choices of devices that keep this order: Eq. 3 with the number of following devices as an index."""
    later = {rank: order[place + 1 :] for place, rank in enumerate(order)}

    def following(end: _State) -> list[_State]:
        return [_State(rank, end.behind - 1) for rank in later[end.rank] if len(later[rank]) >= end.behind - 1]

    ends = [_State(rank, behind) for behind in range(costs.most_stages) for rank in order if len(later[rank]) >= behind]
    return ends, following


def partition_in_any_order(costs: Equation3) -> Partition:
    """Return the best cuts over all orders of all sets of devices: Eq. 3 with the set of following devices as an
    index.
    """
    return _best_by_count(costs, *_any_order_of(costs))


def _any_order_of(costs: Equation3) -> _Search:
    ranks = range(costs.cluster.world_size)

    def following(end: _State) -> list[_State]:
        return [_State(rank, end.behind - 1, end.others & ~(1 << rank)) for rank in ranks if end.others >> rank & 1]

    sets = sorted(range(1 << len(ranks)), key=int.bit_count)
    members = ((rank, others) for others in sets for rank in ranks if not others >> rank & 1)
    ends = [
        _State(rank, others.bit_count(), others) for rank, others in members if others.bit_count() < costs.most_stages
    ]
    return ends, following


_Following = Callable[[_State], Sequence[_State]]
_Search = tuple[Sequence[_State], _Following]
"""The possible ends of pipelines, shorter ones first, and those that may follow a first device."""


def _best_by_count(costs: Equation3, ends: Sequence[_State], following: _Following) -> Partition:
    """Return the best pipeline of any number of devices.  Vertical sync needs a search for each number, on which its
    versions depend.
    """
    if costs.versions != "vertical_sync":
        return _best(costs, costs.most_stages, ends, following, only_whole=False)
    return min(_best_of_each_count(costs, ends, following), key=lambda partition: partition.pace_s)


def _best_of_each_count(costs: Equation3, ends: Sequence[_State], following: _Following) -> list[Partition]:
    """Return the best pipeline of 1, 2, ... devices."""
    counts = range(1, costs.most_stages + 1)
    return [
        _best(costs, count, [end for end in ends if end.behind < count], following, only_whole=True) for count in counts
    ]


def _best(
    costs: Equation3,
    num_stages: int,
    ends: Sequence[_State],
    following: _Following,
    *,
    only_whole: bool,
    in_memory: bool = True,
) -> Partition:
    """Return the pipeline with the best pace; of equally good ones one of fewest devices.

    ends: the possible ends of pipelines, shorter ones first.  following: those that may follow a first device.
    only_whole: whether the pipeline must have num_stages devices.
    """
    candidates = [end for end in ends if end.behind == num_stages - 1 or not only_whole]

    def stage(end: _State) -> np.ndarray:
        return costs.stage(end.rank, end.behind, num_stages) if in_memory else costs.seconds(end.rank)

    def best_within(limit_s: float | None) -> _Chain:
        """Return the best pace; with a limit of it, the least time on air."""
        least: dict[_State, np.ndarray] = {}  # of layers [x, all), by x
        choices: dict[
            _State, tuple[np.ndarray, list[_State]]
        ] = {}  # by x: where the first device stops, and the end that follows
        for end in ends:
            first_s = stage(end) if limit_s is None else np.where(stage(end) <= limit_s, 0.0, np.inf)
            if not end.behind:
                least[end] = first_s[:, -1]
                continue
            later = following(end)
            rest = np.array([_after(costs, end.rank, follower.rank, least[follower], limit_s) for follower in later])
            table = np.maximum(first_s, rest.min(axis=0)) if limit_s is None else first_s + rest.min(axis=0)
            stops = table.argmin(axis=1)
            least[end] = table.min(axis=1)
            choices[end] = stops, [later[place] for place in rest.argmin(axis=0)[stops]]
        end = min(candidates, key=lambda end: (least[end][0], end.behind))
        value, order, cuts = float(least[end][0]), [end.rank], [0]
        while end in choices:
            stops, nexts = choices[end]
            end, stop = nexts[cuts[-1]], int(stops[cuts[-1]])
            order.append(end.rank)
            cuts.append(stop)
        return _Chain(value, tuple(order), (*cuts, costs.profile.num_layers))

    best = best_within(None)
    if best.value < float("inf") and air_of(costs, best.order, best.cuts) > best.value:
        best = _best_on_air(costs, best, best_within)
    return Partition(pace_s=best.value, order=best.order, cuts=best.cuts)


class _Chain(NamedTuple):
    """value: the pace, or the time on air."""

    value: float
    order: tuple[int, ...]
    cuts: tuple[int, ...]


def _after(costs: Equation3, rank: int, following: int, least: np.ndarray, limit_s: float | None) -> np.ndarray:
    """Return, by x, the pace of all that follows a device's layers [.., x), the link included; with a limit, its time
    on air.
    """
    between_s = costs.between_s[rank, following]
    if limit_s is None:
        return np.maximum(between_s, least)
    return np.where(between_s <= limit_s, costs.on_air_s[rank, following] + least, np.inf)


def _best_on_air(costs: Equation3, fastest: _Chain, best_within: Callable[[float | None], _Chain]) -> _Chain:
    """Return the pipeline whose pace is the best with all its messages on shared air, by bisection over the seconds
    that a stage or a link may take.

    fastest: the pipeline of the best pace without that.
    """
    ranks = range(costs.cluster.world_size)
    paces = np.unique(np.concatenate([*(costs.seconds(rank).ravel() for rank in ranks), *costs.between_s.values()]))
    paces = paces[np.isfinite(paces) & (paces >= fastest.value)]
    best = fastest._replace(value=air_of(costs, fastest.order, fastest.cuts))
    low, high = 0, len(paces) - 1
    while low <= high:
        middle = (low + high) // 2
        tried = best_within(float(paces[middle]))
        value = max(tried.value, pace_of(costs, tried.order, tried.cuts))
        best = min(best, tried._replace(value=value), key=lambda pipeline: (pipeline.value, len(pipeline.order)))
        if tried.value <= paces[middle]:
            high = middle - 1
        else:
            low = middle + 1
    return best


def even_partition(costs: Equation3, order: Sequence[int]) -> Partition:
    """Return an equal number of layers for each device, in this order (the paper's PipeDream); the first devices get
    one more.
    """
    counts = proportional_parts(costs.profile.num_layers, (1,) * len(order))
    cuts = tuple(accumulate(counts, initial=0))
    return Partition(pace_s=pace_of(costs, order, cuts), order=tuple(order), cuts=cuts)


def asynchronous_plan(costs: Equation3, partition: Partition, *, method: str, check_memory: bool = True) -> Plan:
    """Return a partition as a plan.  Raises PlanError naming the stage that does not fit, its device and the missing
    bytes.
    """
    if partition.pace_s == float("inf"):
        raise nothing_fits(costs, partition.order)
    plan = Plan(
        method=method,
        stages=one_device_stages(partition.order, partition.cuts, costs.batch_size),
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


def plan_asynchronous(
    costs: Equation3, *, searches: bool, method: str, simulated_s: Callable[[Plan], float] | None = None
) -> Plan:
    """Return the best plan: over every set of devices in every order if `searches`, otherwise over the cluster's
    devices in their order.

    In their order all devices have a stage, as in the paper, if Eq. 3 finds such a partition that fits.  If not, which
    the paper does not treat, the plan is the best over all choices of devices in this order.  With more than
    MOST_IN_EVERY_ORDER devices `searches` tries every choice of devices in a few orders.
    simulated_s: the simulated pace of a plan.  On shared air messages wait for each other, which Eq. 3 does not see: if
    `searches`, the best plans of 1, 2, ... devices are compared by it.
    Raises PlanError if nothing fits.
    """
    if searches and simulated_s is not None and costs.cluster.medium == "wifi":
        partitions = [partition for search in _searches(costs) for partition in _best_of_each_count(costs, *search)]
        found_plans = [
            asynchronous_plan(costs, partition, method=method)
            for partition in sorted(partitions, key=lambda partition: len(partition.order))
            if partition.pace_s < float("inf")
        ]
        if found_plans:
            return min(found_plans, key=simulated_s)
    world, layers = costs.cluster.world_size, costs.profile.num_layers
    everyone, notes = tuple(range(world)), tuple[str, ...]()
    if searches:
        best = min(
            (_best_by_count(costs, *search) for search in _searches(costs)), key=lambda partition: partition.pace_s
        )
    else:
        best = Partition(pace_s=float("inf"), order=everyone, cuts=())
        if world <= layers:
            best = partition_in_order(costs, everyone)
        if best.pace_s == float("inf"):
            best = _best_by_count(costs, *_some_of(costs, everyone))
            why = (
                "no partition over all devices fits in memory"
                if world <= layers
                else f"{world} devices cannot share {layers} layers"
            )
            notes = (f"In the cluster's order {why}: this is the fastest partition over some of them.",)
    if best.pace_s == float("inf"):
        raise nothing_fits(costs, everyone[:layers])
    plan = asynchronous_plan(costs, best, method=method)
    return replace(plan, notes=(*plan.notes, *notes))


def _searches(costs: Equation3) -> list[_Search]:
    """Return the search of every order of every set of devices, or with many devices those of a few orders."""
    if costs.cluster.world_size <= MOST_IN_EVERY_ORDER:
        return [_any_order_of(costs)]
    everyone = tuple(range(costs.cluster.world_size))
    orders = [everyone, *sorted_orders(costs.profile, costs.cluster, costs.memory_length)]
    return [_some_of(costs, order) for order in orders]


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
