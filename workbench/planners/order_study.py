"""Measure the loss by a fixed device order: run Algorithm 1 on other orders of the same devices (PAC+, section V-A; the paper uses one)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from workbench.core.plan import Plan
from workbench.planners.balance import StageTimes, balance
from workbench.planners.orders import Order, device_types, search_orders, sorted_orders
from workbench.planners.pac_plus import candidates
from workbench.planners.pricing import Pricer, Problem

MAX_ORDERS = 5040
"""Up to this many orders are all tried; with more, a search evaluates at most this many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRow:
    """One order: its ranks, their devices' names, its best plan, the predicted seconds of a step, and those as a multiple of the best."""

    ranks: Order
    names: tuple[str, ...]
    plan: Plan
    step_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderStudy:
    """rows: the orders that were kept, best first.  fixed: the order in which the cluster lists its devices, None if nothing fits in it.

    num_orders: distinct orders of device types.  looked_at: those that were evaluated (all of them if exhaustive).
    refused: those of them in which no plan fits.
    """

    rows: tuple[OrderRow, ...]
    fixed: OrderRow | None
    exhaustive: bool
    num_orders: int
    looked_at: int
    refused: int


def order_study(
    problem: Problem,
    *,
    price: Callable[[Plan], float] | None = None,
    keep: int = 20,
    max_orders: int = MAX_ORDERS,
) -> OrderStudy:
    """Return Algorithm 1's result for every distinct order of the devices, or along a local search if there are more than max_orders.

    price: seconds of a step under a plan, for example by simulation.  It is called for the plans of the `keep` best orders and of the fixed
    order, and ranks them; without it Price.bottleneck_s counts.  Raises PlanError if no plan fits in any order.
    """
    profile, cluster, count = problem.profile, problem.cluster, problem.micro_batches
    times, pricer = StageTimes(problem), Pricer(profile, cluster, sequence_length=problem.sequence_length)

    def look(ranks: Order) -> float:
        found = balance(times, profile.num_layers, ranks, count)
        return min((pricer(balanced.stages, count).bottleneck_s for balanced in found), default=math.inf)

    types, fixed = device_types(profile, cluster), tuple(range(cluster.world_size))
    starts = [fixed, *sorted_orders(profile, cluster, problem.sequence_length)]
    search = search_orders(types, look, starts, max_orders=max_orders)
    fitting = sorted((value, order) for order, value in search.value.items() if math.isfinite(value))
    kept = dict.fromkeys(order for _, order in fitting[:keep])
    # The fixed order may be equal by types to another one in the list.
    kinds = tuple(types)
    same = next((order for order in search.value if tuple(types[rank] for rank in order) == kinds), fixed)
    if not fitting or math.isfinite(search.value.get(same, math.inf)):
        kept |= {same: None}

    def planned(order: Order) -> tuple[float, Plan]:
        made = candidates(problem, order=order if fitting else "all", objective="bottleneck")
        if price is None:
            return search.value[order], made[0]
        return min(((price(plan), plan) for plan in made), key=lambda pair: pair[0])

    found = sorted(((*planned(order), order) for order in kept), key=lambda row: (row[0], row[2]))
    rows = {
        order: OrderRow(
            ranks=order,
            names=tuple(cluster.devices[rank].name for rank in order),
            plan=plan,
            step_s=step_s,
            ratio=step_s / found[0][0],
        )
        for step_s, plan, order in found
    }
    return OrderStudy(
        rows=tuple(rows.values()),
        fixed=rows.get(same),
        exhaustive=search.exhaustive,
        num_orders=search.num_orders,
        looked_at=len(search.value),
        refused=len(search.value) - len(fitting),
    )
