"""Galaxy+ Eq. 5-9 on one ring as a linear programme for HiGHS: integers for the oracle, relaxed for the planner's
starts.

For each number of scheme-2 layers Eq. 6-9 are linear in the partitions.  The oracle solves one programme each and
prunes those whose relaxation is no better than the best known plan.  The ring is given: its order and its devices are
not searched, but a device may get no units, no columns and no tokens (it then forwards messages).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.equation9 import Cut, Equation9
from workbench.methods.galaxy_plus.planners.memory import check, part_bytes, room_bytes
from workbench.methods.galaxy_plus.planners.terms import (
    LayerTimes,
    Line,
    air_slopes,
    hop_lines,
    lengths_of,
    num_blocks,
)
from workbench.planners.problem import Problem

Row = dict[int, float]
"""Coefficients by variable."""


class PlanLP:
    """The variables: units a, columns b, tokens s, flags for each being above 0, and times of blocks and of every hop's
    end.

    A second stack is split in the first one's proportion.  For a given number of scheme-2 layers Eq. 6-9 are linear in
    these.
    """

    def __init__(self, problem: Problem[InferenceProfile], ranks: Sequence[int], room: Sequence[float]) -> None:
        """ranks: the ring.  room: bytes at each position for attention and feed-forward weights."""
        profile, lengths = problem.profile, lengths_of(problem)
        if any(
            min(c.fixed_s, c.token_s, c.unit_s, c.token_unit_s) < 0
            for row in profile.costs
            for s in row
            for c in s.pieces.values()
        ):
            raise ConfigError(
                "An optimum was asked for.",
                "A cost of the profile is below 0.",
                "Profile again, or use an analytic profile.",
            )
        self.problem, self.profile, self.cluster = problem, profile, problem.cluster
        self.ranks, self.room = tuple(ranks), room
        first = profile.stacks[0]
        self.totals = (first.num_units, first.columns, lengths[0])
        self.width = 6 * len(ranks)  # a, b, s and their flags
        self.rows: list[tuple[Row, float]] = []  # coefficients @ x <= limit
        self.times: list[dict[str, int]] = []  # for each stack: variables
        for stack, (shape, length) in enumerate(zip(profile.stacks, lengths, strict=True)):
            lines = [LayerTimes(profile, rank, stack, lengths).lines() for rank in ranks]
            scales = [
                size / total for size, total in zip((shape.num_units, shape.columns, length), self.totals, strict=True)
            ]
            parts = {"own": 0, "cross": 0, "tensor": 1, "sequence": 2, "con": 2}
            times = {
                name: self._slowest(part, [device_lines[name] for device_lines in lines], scales[part])
                for name, part in parts.items()
                if name in lines[0]
            }
            adds = [device_lines["add"] for device_lines in lines]
            times |= {"gather": self._ring(stack, scales[2], None), "scatter": self._ring(stack, scales[2], adds)}
            self.times.append(times)

    def _new(self) -> int:
        self.width += 1
        return self.width - 1

    def _slowest(self, part: int, lines: Sequence[Line], scale: float) -> int:
        """Return the variable that is at least every device's seconds of `part` (0 units, 1 columns, 2 tokens)."""
        variable, n = self._new(), len(self.ranks)
        for d, (fixed, slope) in enumerate(lines):
            self.rows.append(({part * n + d: slope * scale, (3 + part) * n + d: fixed, variable: -1.0}, 0.0))
        return variable

    def _ring(self, stack: int, scale: float, adds: Sequence[Line] | None) -> int:
        """Return the variable that is at least the end of every hop of a ring collective.

        adds: seconds of a reduce-scatter's additions, by receiver.
        """
        n, last, shift = len(self.ranks), self._new(), 0 if adds is None else 1
        lines = hop_lines(self.cluster, self.ranks, self.profile.stacks[stack].hidden_bytes, adds)
        before: list[int] = []
        for step in range(n - 1):
            ends = [self._new() for _ in self.ranks]
            for i, (fixed, slope) in enumerate(lines):
                owner = (i - step - shift) % n
                hop = {2 * n + owner: slope * scale, 5 * n + owner: fixed, ends[i]: -1.0}
                self.rows += [({**hop, before[j]: 1.0}, 0.0) for j in (i, i - 1)] if before else [(hop, 0.0)]
                if step == n - 2:
                    self.rows.append(({ends[i]: 1.0, last: -1.0}, 0.0))
            before = ends
        slopes = air_slopes(self.cluster, self.ranks, self.profile.stacks[stack].hidden_bytes, shift=shift)
        if any(slopes):
            on_air = {2 * n + owner: slope * scale for owner, slope in enumerate(slopes)}
            self.rows.append(({**on_air, last: -1.0}, 0.0))
        return last

    def solve(
        self,
        q: Sequence[int],
        *,
        holders: Sequence[bool] | None = None,
        integer: bool = False,
        cutoff: float = math.inf,
    ) -> Any:
        """Return HiGHS's answer for given numbers of scheme-2 layers.  holders: positions whose token flags are set;
        None: all free.
        """
        n, price = len(self.ranks), np.zeros(self.width)
        for shape, second, times in zip(self.profile.stacks, q, self.times, strict=True):
            rings = shape.num_layers * num_blocks(shape) - second
            weights = {"tensor": shape.num_layers - second, "sequence": second, "gather": rings, "scatter": rings}
            for name, variable in times.items():
                price[variable] = weights.get(name, shape.num_layers)
        most = np.repeat(self.totals, n).astype(float)
        rows = [*self.rows, *self._memory_rows(q)]
        rows += [
            ({index: 1.0, 3 * n + index: -most[index]}, 0.0) for index in range(3 * n)
        ]  # above 0 only with its flag
        lower = [-np.inf] * len(rows) + list(map(float, self.totals))
        rows += [
            (dict.fromkeys(range(part * n, (part + 1) * n), 1.0), float(total))
            for part, total in enumerate(self.totals)
        ]
        if math.isfinite(cutoff):
            rows.append(({int(index): price[index] for index in np.flatnonzero(price)}, cutoff))
            lower.append(-np.inf)
        indices = [index for row, _ in rows for index in row]
        starts = np.cumsum([0, *(len(row) for row, _ in rows)])
        from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import, and large rings do without
        from scipy.sparse import csr_matrix

        matrix = csr_matrix(
            ([value for row, _ in rows for value in row.values()], indices, starts), shape=(len(rows), self.width)
        )
        low, high = np.zeros(self.width), np.full(self.width, np.inf)
        high[: 3 * n], high[3 * n : 6 * n] = most, 1
        if holders is not None:
            low[5 * n : 6 * n] = high[5 * n : 6 * n] = holders
        kinds = np.zeros(self.width)
        kinds[: 6 * n] = integer
        return milp(
            price,
            integrality=kinds,
            bounds=Bounds(low, high),
            constraints=LinearConstraint(matrix, lower, [limit for _, limit in rows]),
            options={"mip_rel_gap": GAP, "time_limit": TIME_LIMIT_S},
        )

    def _memory_rows(self, q: Sequence[int]) -> list[tuple[Row, float]]:
        """Return Eq. 8-9 for each device, in megabytes so that the numbers are of similar size."""
        n, rows = len(self.ranks), []
        unit, first, second = part_bytes(self.problem, q)
        for d, room in enumerate(self.room):
            a, b, holds, full = d, n + d, 5 * n + d, second * self.totals[1]
            if self.profile.full_everywhere:
                rows.append(({a: unit, b: first}, room - full))
            else:
                # with tokens all columns of scheme-2 layers, without tokens its own columns of them: both are lower
                # bounds
                rows += [({a: unit, b: first, holds: full}, room), ({a: unit, b: first + second}, room)]
        return [({index: number / 1e6 for index, number in row.items()}, limit / 1e6) for row, limit in rows]

    def parts(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return units, columns and tokens of each position in a solution."""
        n = len(self.ranks)
        return x[:n], x[n : 2 * n], x[2 * n : 3 * n]


def hybrid_plan(method: str, profile: InferenceProfile, cut: Cut) -> InferencePlan:
    """Return the plan of a cut; its shares are tokens."""
    return InferencePlan(
        method=method,
        paradigm="hybrid",
        ranks=cut.ranks,
        units=cut.units,
        columns=cut.columns,
        shares=tuple(map(float, cut.shares)),
        schemes=sum(
            ((2,) * q + (1,) * (shape.num_layers - q) for shape, q in zip(profile.stacks, cut.second, strict=True)), ()
        ),
        length=int(sum(cut.shares)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best plan, its seconds by Eq. 9, and a proven lower bound of them."""

    plan: InferencePlan
    value_s: float
    bound_s: float


GAP = 1e-4
"""The relative gap within which HiGHS proves the optimum."""
TIME_LIMIT_S = 20.0
"""Seconds for one programme."""


def oracle(problem: Problem[InferenceProfile]) -> Optimum | None:
    """Return the optimum of Eq. 9 on the ring of the problem's ranks, None if no plan fits.

    An unfinished programme lowers bound_s.  With two stacks both must have equal units, columns and tokens.  Raises
    ConfigError otherwise.
    """
    profile, chosen = problem.profile, problem.members
    stacks = profile.stacks
    if len({(shape.num_units, shape.columns, n) for shape, n in zip(stacks, lengths_of(problem), strict=True)}) > 1:
        raise ConfigError(
            f"The optimum for '{profile.model}' was asked for.",
            "Its two stacks differ in units, columns or tokens, so that one partition does not determine the "
            "other linearly.",
            "Compare plans by their simulated seconds instead.",
        )
    programme = PlanLP(problem, chosen, room_bytes(problem, chosen))
    price = Equation9(profile, problem.cluster, lengths_of(problem))
    numbers = list(itertools.product(*(range(shape.num_layers + 1) for shape in stacks)))
    relaxed = [(programme.solve(q), q) for q in numbers]
    waiting = sorted((solution.fun, q) for solution, q in relaxed if solution.x is not None)
    best: tuple[float, InferencePlan] | None = None
    bound, unsolved = math.inf, 0
    for lower, q in waiting:
        # Only a plan better than the best by more than the gap is needed: HiGHS proves most other programmes infeasible
        # at once.
        cutoff = math.inf if best is None else best[0] * (1 - GAP)
        if lower >= cutoff:
            bound = min(bound, lower)
            break
        solution = programme.solve(q, integer=True, cutoff=cutoff)
        if solution.status == 2:
            bound = min(bound, cutoff)
            continue
        bound = min(bound, max(lower, solution.mip_dual_bound if solution.mip_dual_bound is not None else lower))
        if solution.x is None:
            unsolved += 1
            continue
        units, columns, tokens = (tuple(int(count) for count in np.rint(part)) for part in programme.parts(solution.x))
        cut = Cut(chosen, units, columns, tokens, q)
        value = price(cut)
        if best is None or value < best[0]:
            best = value, hybrid_plan("oracle", profile, cut)
    if best is None and unsolved:
        raise ConfigError(
            f"The optimum for '{profile.model}' was asked for.",
            f"HiGHS neither found nor excluded a plan in {TIME_LIMIT_S} s, {unsolved} times.",
            "Use fewer devices.",
        )
    if best is None:
        return None
    check(problem, best[1])
    return Optimum(plan=best[1], value_s=best[0], bound_s=min(best[0], bound))
