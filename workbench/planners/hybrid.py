"""Plan hybrid data and pipeline parallelism for heterogeneous devices (PAC+, section V-A, Algorithm 1, Eq. 3-7).

Cached epochs: section V-B.  Eq. 3-4 and their reading are in balance.py, Eq. 5-6 in closed_form.py.
The paper uses one device order; order="all" shows the loss by that: Algorithm 1 on other orders of the same devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from workbench.core.costs import collective_s
from workbench.core.errors import ConfigError, PlanError, check_choice
from workbench.core.once import once
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile, trainable_bytes
from workbench.core.schedule import ALLREDUCE, Ranks
from workbench.core.units import size_words
from workbench.planners import memory
from workbench.planners.balance import Balanced, StageTimes, balance
from workbench.planners.closed_form import ClosedForm, PhaseTimes
from workbench.planners.memory import cached_need
from workbench.planners.orders import OTHER_ORDER, device_types, search_orders, sorted_orders
from workbench.planners.problem import Problem
from workbench.planners.shares import SAVES, device_sets, smallest_maximum

SAMPLE_KINDS = ("LOAD", "SF", "SB")


@once
def plan_cached(problem: Problem[Profile], *, ranks: Sequence[int] | None = None) -> Stage:
    """Return the shares of the fastest cached step: max(LOAD + SF + SB) + all-reduce + max(STEP).

    The all-reduce takes longer with more devices, so a device may be left out.  With up to 10 devices every subset is
    tried, with more the fastest n for every n.  ranks: the devices that may take part (default: all).  Raises PlanError
    if the adapters do not fit.
    """
    profile, cluster, batch_size = problem.profile, problem.cluster, problem.batch_size
    if batch_size < 1:
        raise ConfigError(
            f"A cached step of {batch_size} samples was asked for.", "It must be at least 1.", "Raise batch_size."
        )
    usable = sorted(range(cluster.world_size) if ranks is None else ranks)
    costs = {rank: _costs(problem, rank) for rank in usable}
    steps = {rank: _step_s(profile, rank, problem.sequence_length) for rank in usable}
    nbytes = trainable_bytes(profile.layers[0])
    even = max(1, batch_size // len(usable))
    best_s, best = math.inf, tuple[Share, ...]()
    for members in device_sets({rank: costs[rank][even] for rank in usable}):
        counts = smallest_maximum([costs[rank] for rank in members], batch_size)
        if counts is None or 0 in counts:
            continue
        slowest = max(costs[rank][samples] for rank, samples in zip(members, counts, strict=True))
        seconds = slowest + collective_s(cluster, ALLREDUCE, members, nbytes) + max(steps[rank] for rank in members)
        if seconds < best_s * SAVES:
            best_s, best = (
                seconds,
                tuple(Share(rank=rank, samples=samples) for rank, samples in zip(members, counts, strict=True)),
            )
    if not best:
        raise _cached_refusal(problem, usable)
    return Stage(start=0, stop=profile.num_layers, shares=best)


def _sample_s(profile: Profile, rank: int, samples: int, sequence_length: int) -> float:
    if samples == 0:
        return 0.0
    kinds = (profile.layer_seconds(rank, kind, samples, sequence_length) for kind in SAMPLE_KINDS)
    return sum(itertools.chain.from_iterable(zip(*kinds, strict=True)))


def _step_s(profile: Profile, rank: int, sequence_length: int) -> float:
    return profile.seconds(rank, "STEP", 1, sequence_length)


def _costs(problem: Problem[Profile], rank: int) -> list[float]:
    """Return the seconds of 0 to batch_size samples, infinite where the device runs out of memory; a decrease is
    noise.
    """
    budget = problem.cluster.devices[rank].memory_bytes
    seconds = [0.0]
    for samples in range(1, problem.batch_size + 1):
        need = cached_need(problem.profile, rank, samples=samples, sequence_length=problem.longest)
        seconds.append(
            math.inf
            if need.total_bytes > budget
            else _sample_s(problem.profile, rank, samples, problem.sequence_length)
        )
    return list(itertools.accumulate(seconds, max))


def _cached_refusal(problem: Problem[Profile], usable: Sequence[int]) -> PlanError:
    smallest = {
        rank: cached_need(problem.profile, rank, samples=1, sequence_length=problem.longest).total_bytes
        for rank in usable
    }
    rank = min(usable, key=lambda rank: smallest[rank] - problem.cluster.devices[rank].memory_bytes)
    device = problem.cluster.devices[rank]
    return PlanError(
        f"Device '{device.name}' has {size_words(device.memory_bytes)};",
        f"in the cached epochs the adapters and one sample need {size_words(smallest[rank])}, and "
        f"{problem.batch_size} samples"
        f" do not fit on {len(usable)} devices together.",
        "Add a device, raise its memory, lower the batch size, or raise the adapters' reduction factor.",
    )


Objective = Literal["paper", "bottleneck"]
MAX_CELLS = 1_600_000
"""The table entries of Eq. 3 computed for all orders together: 0.05 s for 8 orders of 8 devices and 48 layers."""
CELLS_OF_AN_ORDER = 12_000
"""The fixed cost of an order, in table entries."""
MAX_PLANS = 32
"""The number of plans returned for all orders together."""
MORE_ORDERS = 10
"""If nothing fits in these orders, this many times as many are tried to find one in which something does."""


def plan(
    problem: Problem[Profile],
    *,
    order: Sequence[int] | Literal["all"] | None = None,
    cached: bool = True,
    **settings: Any,
) -> Plan:
    """Return W_sigma of Algorithm 1, with the shares of the cached epochs if `cached`.

    order: the ordered set D as ranks, or "all" to try every distinct order (see orders.search_orders: all of them if
    MAX_CELLS allows, else a local search).  Default: the cluster's order; if nothing fits in it, as for "all", with a
    note.
    objective: "paper" chooses sigma by Eq. 7; "bottleneck" by our correction of Eq. 5 (see closed_form.PhaseTimes).
    settings: others of `candidates`.  Raises PlanError, naming device, stage and bytes, if no plan fits.
    """
    best = candidates(problem, order=order, **settings)[0]
    return (
        replace(best, cached=plan_cached(problem, ranks=None if isinstance(order, str) else order)) if cached else best
    )


def candidates(
    problem: Problem[Profile],
    *,
    order: Sequence[int] | Literal["all"] | None = None,
    objective: Objective = "paper",
    method: str = "pac_plus",
    max_group: int | None = None,
    times: StageTimes | None = None,
) -> list[Plan]:
    """Return W_s for every number of stages s that fits, in order of the objective, for re-ranking by simulation.

    With several orders these are the MAX_PLANS cheapest, with a W_s of each order.
    max_group: the most devices of a group (1: a plain pipeline).  times: the problem's, if there are any.  Raises
    PlanError if nothing fits.
    """
    profile, cluster, size, micro_batches = (
        problem.profile,
        problem.cluster,
        problem.micro_batch_size,
        problem.micro_batches,
    )
    check_choice("objective", objective, get_args(Objective))
    times = times or StageTimes(problem)
    best: dict[tuple[Stage, ...], tuple[float, Plan]] = {}
    members = replace(problem, ranks=None if isinstance(order, str) else order).members
    if max_group is not None and max_group * profile.num_layers < len(members):
        raise ConfigError(
            f"Groups of at most {max_group} devices were asked for.",
            f"{len(members)} devices need more than the {profile.num_layers} layers of '{profile.model}' then.",
            "Raise max_group, or name fewer devices in order.",
        )
    closed_form = ClosedForm(problem)

    def look(ranks: Ranks) -> float:
        least = math.inf
        for balanced in balance(times, profile.num_layers, ranks, micro_batches, max_group=max_group):
            cost = closed_form(balanced.stages, micro_batches)
            value = cost.total_s if objective == "paper" else cost.bottleneck_s
            least = min(least, value)
            if balanced.stages not in best:
                plan = Plan(
                    method=method,
                    stages=balanced.stages,
                    micro_batch_size=size,
                    num_micro_batches=micro_batches,
                    predicted_s=cost.parts(),
                    notes=_notes(cost, balanced),
                )
                best[balanced.stages] = (value, plan)
        return least

    def search(evaluate: Callable[[Ranks], float], first: Sequence[Ranks] = (), *, more: int = 1) -> None:
        """Evaluate orders (see orders.search_orders), beginning with some.  more: times as many as usual."""
        starts = [members, *sorted_orders(profile, cluster, problem.sequence_length)]
        cells = CELLS_OF_AN_ORDER + profile.num_layers**2 * cluster.world_size**3 // 6
        max_orders = more * (MAX_CELLS // cells + len(starts))
        search_orders(device_types(profile, cluster), evaluate, [*first, *starts], max_orders=max_orders)

    if isinstance(order, str):
        if order != "all":
            raise ConfigError(
                f"The device order '{order}' was asked for.", "Known: 'all', or a list of ranks.", "Choose one of them."
            )
        search(look)
    else:
        look(members)
    if not best:
        is_fixed = order is not None and not isinstance(order, str)
        over = StageTimes(problem, excess=True)
        nearest: dict[tuple[int, ...], Balanced] = {}

        def missing(ranks: Ranks) -> float:
            balances = balance(over, profile.num_layers, ranks, micro_batches, max_group=max_group)
            nearest[ranks] = min(balances, key=lambda balanced: balanced.bottleneck_s)
            return nearest[ranks].bottleneck_s

        if is_fixed:
            missing(members)
        else:
            search(missing, more=MORE_ORDERS)
        closest = min(nearest, key=lambda ranks: nearest[ranks].bottleneck_s)
        if nearest[closest].bottleneck_s > 0:
            raise _refusal(problem, nearest[closest], is_fixed=is_fixed)
        search(look, [closest])
        if order is None:
            best = {
                stages: (value, replace(plan, notes=(OTHER_ORDER, *plan.notes)))
                for stages, (value, plan) in best.items()
            }
    ranked = sorted(best.values(), key=lambda pair: (pair[0], len(pair[1].stages)))[:MAX_PLANS]
    for _, plan in ranked:
        memory.check(profile, cluster, plan, sequence_length=problem.longest)
    return [plan for _, plan in ranked]


def _notes(cost: PhaseTimes, balanced: Balanced) -> tuple[str, ...]:
    if cost.slowest_stage == len(balanced.stages) - 1:
        return ()
    return (
        f"The paper's Eq. 5 and 6 time a step by its last stage: {cost.total_s:.4g} s. Stage {cost.slowest_stage} is"
        f" slower, and by its time a step takes {cost.bottleneck_s:.4g} s.",
    )


def _refusal(problem: Problem[Profile], nearest: Balanced, *, is_fixed: bool) -> PlanError:
    """Return the error for the plan that comes closest to fitting, with its missing bytes."""
    cluster = problem.cluster
    plan = Plan(
        method="",
        stages=nearest.stages,
        micro_batch_size=problem.micro_batch_size,
        num_micro_batches=problem.micro_batches,
    )
    needs = memory.plan_needs(problem.profile, plan, sequence_length=problem.longest)
    rank = max(needs, key=lambda rank: needs[rank].total_bytes - cluster.devices[rank].memory_bytes)
    index = plan.stage_of(rank)
    assert index is not None
    where = "No plan in this order of the devices" if is_fixed else "No plan"
    why = f" {where} comes nearer ({plan.partition()} on {plan.grouping()})."
    return memory.too_small(cluster, memory.stage_demand(rank, f"stage {index}", plan.stages[index], needs[rank]), why)
