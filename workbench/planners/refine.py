"""Improve a plan step by step under any cost function, beyond Algorithm 1's balanced partitions (PAC+, section V-A, Eq.
7).

Algorithm 1 balances forward plus backward of the stages and considers one plan for each number of stages.  Messages,
all-reduces and the order of the phases count only in Eq. 5-7, and waiting counts nowhere.  So a neighbouring plan may
be faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.planners import memory
from workbench.planners.balance import StageTimes
from workbench.planners.closed_form import ClosedForm, Stages
from workbench.planners.hybrid import candidates
from workbench.planners.neighbours import ROUNDING, Neighbours
from workbench.planners.orders import OTHER_ORDER
from workbench.planners.problem import Problem

GAIN = 1e-6
"""The minimum relative gain of a step."""
NEAR = 1.1
"""A plan whose closed-form time is higher by this factor is skipped: its cost is unlikely to be lower."""
MAX_MET = 400
"""After this many plans no further start is improved: 0.03 s."""


def refine(
    starts: Sequence[Plan],
    problem: Problem[Profile],
    price: Callable[[Plan], float],
    *,
    max_prices: int = 400,
    least: Callable[[Plan], float] = lambda plan: 0.0,
    times: StageTimes | None = None,
) -> Plan:
    """Return a plan at least as good by `price` (seconds of a step) as starts[0], which fits in memory like the starts.

    starts: plans with one micro-batch size.  The closed form (PhaseTimes.bottleneck_s) improves them, the best first,
    until no move helps.  The best plan by `price` among all these is then improved by `price`.
    max_prices: the most plans that are priced.  least: a lower bound of `price`; a plan that it rules out counts, but
    is not priced.  times: the problem's, if there are any.
    The shares of the cached epochs do not change.
    """
    first, count = starts[0], starts[0].num_micro_batches
    closed_form = ClosedForm(problem)
    cut = replace(problem, batch_size=first.mini_batch_size, micro_batches=count)
    neighbours = Neighbours(cut, times if times is not None and cut == problem else StageTimes(cut), closed_form)
    fitting: dict[tuple[int, int], bool] = {}
    met: set[object] = set()
    closed: dict[Stages, float] = {}
    priced: dict[Stages, float] = {}

    def closed_s(stages: Stages, limit_s: float = math.inf) -> float:
        met.add(stages)
        if stages not in closed:
            closed[stages] = closed_form.phase_times(stages, count).bottleneck_s
        return closed[stages]

    def priced_s(stages: Stages, limit_s: float = math.inf) -> float:
        """Return the price; if it is not below the limit, perhaps only a lower bound of it."""
        if stages not in priced:
            plan = replace(first, stages=closed_form.stages(stages))
            bound_s = math.inf if len(priced) >= max_prices else least(plan) * (1 - ROUNDING)
            priced[stages] = bound_s if bound_s >= limit_s else price(plan)
        return priced[stages]

    def within(moves: Iterable[Stages], limit_s: float) -> list[Stages]:
        """Return the plans whose closed-form time is at most the limit, the best first."""
        near = []
        for stages in moves:
            met.add(stages)
            if (stages in closed or closed_form.at_least_s(stages, count) <= limit_s) and closed_s(stages) <= limit_s:
                near.append(stages)
        return sorted(near, key=closed_s)

    def descend(best: Stages, value: Callable[[Stages, float], float], near: float) -> Stages:
        """Return the stages at which no neighbour is better; each step takes the first better one in closed-form
        order.
        """
        improved = True
        while improved:
            improved = False
            near_s, better_s = near * closed_s(best), value(best, math.inf) * (1 - GAIN)
            for stages in within(neighbours.of(best, near_s, met), near_s):
                if fits(stages) and value(stages, better_s) < better_s:
                    best, improved = stages, True
                    break
        return best

    def fits(stages: Stages) -> bool:
        return all(stage_fits(number, live) for number, live in zip(stages, neighbours.lives(len(stages)), strict=True))

    def stage_fits(number: int, live: int) -> bool:
        """Return whether a stage fits into the memory of its devices with so many micro-batches in flight."""
        if (number, live) not in fitting:
            [stage] = closed_form.stages((number,))
            needs = memory.stage_needs(
                problem.profile, stage, first.micro_batch_size, sequence_length=problem.longest, in_flight=live
            )
            fitting[number, live] = memory.fits(problem.cluster, needs)
        return fitting[number, live]

    numbers = [tuple(map(closed_form.number, plan.stages)) for plan in starts]
    reached = dict.fromkeys(numbers)
    for stages in sorted(reached, key=closed_s):
        if len(met) < MAX_MET:
            reached[descend(stages, closed_s, 1 - GAIN)] = None
    least_s = min(map(closed_s, reached))
    near = [stages for stages in sorted(reached, key=closed_s) if closed_s(stages) <= NEAR * least_s]
    best = numbers[0]
    for stages in near:
        if priced_s(stages, priced_s(best)) < priced_s(best):
            best = stages
    best = descend(best, priced_s, NEAR)
    if best == numbers[0]:
        return first
    parts = closed_form.phase_times(best, count).parts()
    why = (
        f"A search around the first plan ({first.where()}) shortened the step from {1e3 * priced[numbers[0]]:,.1f} to "
        f"{1e3 * priced[best]:,.1f} ms (simulated)."
    )
    return replace(
        first,
        stages=closed_form.stages(best),
        predicted_s=parts,
        notes=(*(note for note in first.notes if note == OTHER_ORDER), why),
    )


def refine_on_any_count(
    starts: Sequence[Plan],
    problem: Problem[Profile],
    price: Callable[[Plan], float],
    *,
    method: str,
    max_prices: int,
    least: Callable[[Plan], float] = lambda plan: 0.0,
) -> Plan:
    """Return the plan that `refine` finds from the starts, or a faster one on the fastest 1, 2, 4, ... devices.

    Algorithm 1 uses all devices.  The closed form, which does not see waiting, may find no reason to leave one out, and
    from all devices no small change leads to a plan of few.  method: the plans' method.  least: see refine.
    """
    settings: Any = {"max_prices": max_prices, "least": least, "times": StageTimes(problem)}
    refined = refine(starts, problem, price, **settings)
    limit_s, world_size = price(refined), problem.cluster.world_size
    alone_s = [problem.profile.train_s(rank, problem.batch_size, problem.sequence_length) for rank in range(world_size)]
    fastest = sorted(range(world_size), key=alone_s.__getitem__)
    fewer: list[Plan] = []
    count = 1
    while count < world_size:
        # However they share a mini-batch, computing alone takes them so long.
        together_s = 1 / sum(1 / max(alone_s[rank], 1e-12) for rank in fastest[:count])
        if together_s < limit_s:
            with contextlib.suppress(PlanError):  # where the model does not fit
                order = sorted(fastest[:count])
                plans = candidates(problem, order=order, objective="bottleneck", method=method, times=settings["times"])
                fewer.append(plans[0])
        count *= 2
    near_s = NEAR * limit_s
    near = [plan for plan in fewer if least(plan) * (1 - ROUNDING) <= near_s and price(plan) <= near_s]
    if not near:
        return refined
    return min(refined, refine(near, problem, price, **settings), key=price)
