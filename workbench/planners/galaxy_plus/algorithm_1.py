"""Heterogeneity and memory aware HMP planning as printed (Galaxy+, section III-C, Algorithm 1).

The printed algorithm leaves some points open; we chose:

1. Line 5 gives fractions of heads, columns and tokens: rounded by largest remainder, the first of equals gets more.
2. "Out-of-memory" (lines 8, 31, 34) is Eq. 8 with P = all layers, both blocks together: while columns move, heads stay.
3. "Overflowing workload" (line 13) is the fewest units or columns whose removal makes the device fit, at most all it has.
4. Free devices (line 9) are those of L with room for one more unit.  Their additions (line 15) are rounded by largest remainder.  This
   may overload them, which the recursion corrects.  They are determined once for all devices of line 12.
5. If no device of L is free, nothing is shifted and the partition is returned as it is; line 34 decides.
6. Line 17 lacks a "Return": the recursion's result is returned.
7. Line 16 removes a device from L for good.  Lines 32 and 33 each start with all devices; with one shared list, line 33 could never take
   heads from a device that line 32 emptied of columns.
8. After a rebalance (lines 32-35) P and Q are not set, as `else` (line 36) skips the substitution: all layers keep scheme 1.
9. Line 20 takes the layers from the first on, the encoder's before the decoder's.
10. Line 22 checks every device, also one without tokens: see MemoryRule.full_everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workbench.core.inference import InferencePlan, proportional_parts
from workbench.planners.galaxy_plus.memory import SequenceProblem, part_bytes
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.times import capacity


def algorithm_1(problem: SequenceProblem, *, substitute: bool = True, method: str = "algorithm_1") -> InferencePlan:
    """Return the plan of Algorithm 1; the module's docstring lists our choices for open points.

    substitute: False keeps scheme 1 in all layers (Galaxy).
    Raises PlanError, naming device and bytes, where the printed algorithm exits with Fail (line 35).
    """
    profile, cluster, chosen = problem.profile, problem.cluster, problem.members
    v = [capacity(profile, rank, problem.lengths) for rank in chosen]
    layers = profile.num_layers
    unit_bytes, column_bytes, _ = map(int, part_bytes(profile, (0,) * len(profile.stacks)))
    plan = InferencePlan(
        method=method,
        paradigm="hybrid",
        ranks=chosen,
        units=proportional_parts(profile.stacks[0].num_units, v),
        columns=proportional_parts(profile.stacks[0].columns, v),
        shares=tuple(v),
        schemes=(1,) * layers,
        overlap=True,
        length=problem.length,
    )

    def spare_bytes(plan: InferencePlan) -> list[int]:
        needs = problem.needs(plan)
        return [problem.memory.budget_bytes(cluster, rank) - needs[rank].total_bytes for rank in chosen]

    def balanced(plan: InferencePlan, name: str, piece_bytes: int, left: Sequence[int]) -> InferencePlan:
        """Move the overflow of one partition to devices with room (lines 7-17).  piece_bytes: of a unit or column in all layers."""
        spare = spare_bytes(plan)
        over = [d for d in left if spare[d] < 0]
        free = [d for d in left if spare[d] >= piece_bytes]
        if not over or not free:
            return plan
        parts = list(getattr(plan, name))
        for d in over:
            waiting = min(parts[d], -(spare[d] // piece_bytes))
            for f, count in zip(free, proportional_parts(waiting, [v[f] for f in free]), strict=True):
                parts[f] += count
            parts[d] -= waiting
        plan = replace(plan, **{name: tuple(parts)})  # type: ignore[arg-type]
        return balanced(plan, name, piece_bytes, [d for d in left if d not in over])

    if min(spare_bytes(plan)) < 0:
        everyone = range(len(chosen))
        plan = balanced(balanced(plan, "columns", column_bytes, everyone), "units", unit_bytes, everyone)
        problem.check(plan)  # lines 34-35
        plan = replace(plan, notes=("heads and columns were shifted to devices with more memory",))
    elif substitute:
        for second in range(1, layers + 1):
            more = replace(plan, schemes=(2,) * second + (1,) * (layers - second))
            if min(spare_bytes(more)) < 0:
                break
            plan = more
    return replace(plan, predicted_s=price_plan(plan, profile, cluster, decoder_length=problem.decoder_length).total_s)
