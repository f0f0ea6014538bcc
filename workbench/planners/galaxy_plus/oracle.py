"""The exact optimum of Galaxy+ Eq. 9 by mixed-integer linear programming (HiGHS), which the planners are compared with.

For each number of scheme-2 layers Eq. 6-9 are linear in the partitions: one programme each, those pruned whose relaxation is no
better than what is known.  Written without any of the planners' code.  The ring is given: its order and who is in it are not searched,
but a device may get no units, no columns and no tokens (it then passes messages on).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, check_inference
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.times import (
    attention_s,
    checked_ranks,
    con_s,
    mlp_sequence_s,
    mlp_tensor_s,
    num_blocks,
    stack_lengths,
)

Line = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The best plan, its seconds by Eq. 9, and a proven lower bound of them.

    solved: programmes (or, by brute force, plans) that were solved.  pruned: programmes left out, as their relaxation is no better.
    """

    plan: InferencePlan
    value_s: float
    bound_s: float
    solved: int
    pruned: int = 0


def oracle(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    gap: float = 1e-4,
    below_s: float = math.inf,
    time_limit_s: float = 20.0,
) -> Optimum | None:
    """Return the optimum of Eq. 9 on the ring of these ranks, None if no plan fits, or none takes less than `below_s`.

    gap: relative, within which HiGHS proves the optimum.  below_s: to prove of a plan that no other is much better, which is quicker.
    time_limit_s: of one programme; what it leaves open lowers bound_s.
    With two stacks both must be cut alike: as many units and columns, as many tokens.  Raises ConfigError otherwise.
    """
    chosen = checked_ranks(profile, cluster, ranks)
    lengths = stack_lengths(profile, length, decoder_length)
    stacks = profile.stacks
    if len({(shape.num_units, shape.columns, n) for shape, n in zip(stacks, lengths, strict=True)}) > 1:
        raise ConfigError(
            f"The optimum for '{profile.model}' was asked for.",
            "Its two stacks differ in units, columns or tokens, so that one partition does not determine the other linearly.",
            "Compare plans by price_plan instead.",
        )
    programme = _Programme(profile, cluster, chosen, lengths, memory)
    numbers = list(itertools.product(*(range(shape.num_layers + 1) for shape in stacks)))
    relaxed = [(programme.solve(q, integer=False), q) for q in numbers]
    waiting = sorted((found.fun, q) for found, q in relaxed if found.x is not None)
    best: tuple[float, InferencePlan] | None = None
    bound, solved, unsolved = math.inf, 0, 0
    for lower, q in waiting:
        # Only what is better than the best by more than the gap is of interest: HiGHS proves most of the rest infeasible at once.
        cutoff = below_s if best is None else best[0] * (1 - gap)
        if lower >= cutoff:
            break
        found = programme.solve(q, integer=True, gap=gap, time_limit_s=time_limit_s, cutoff=cutoff)
        solved += 1
        if found.status == 2:
            bound = min(bound, cutoff)
            continue
        bound = min(bound, max(lower, found.mip_dual_bound if found.mip_dual_bound is not None else lower))
        if found.x is None:
            unsolved += 1
            continue
        plan = programme.plan(found.x, q)
        value = price_plan(plan, profile, cluster, length=length, decoder_length=decoder_length).layers_s
        if best is None or value < best[0]:
            best = value, plan
    if best is None and unsolved:
        raise ConfigError(
            f"The optimum for '{profile.model}' was asked for.",
            f"HiGHS neither found nor excluded a plan in {time_limit_s} s, {unsolved} times.",
            "Raise time_limit_s, or use fewer devices.",
        )
    if best is None:
        return None
    rest = waiting[solved][0] if solved < len(waiting) else math.inf
    check_inference(best[1], profile, cluster, length=length, decoder_length=decoder_length, memory=memory)
    return Optimum(plan=best[1], value_s=best[0], bound_s=min(best[0], bound, rest), solved=solved, pruned=len(waiting) - solved)


class _Programme:
    """The variables: units a, columns b, tokens s, flags of each being above 0, and times of blocks and of every hop's end."""

    def __init__(
        self, profile: InferenceProfile, cluster: Cluster, ranks: tuple[int, ...], lengths: tuple[int, ...], memory: MemoryRule
    ) -> None:
        if any(min(c.fixed_s, c.token_s, c.unit_s, c.token_unit_s) < 0 for row in profile.costs for s in row for c in s.pieces.values()):
            raise ConfigError(
                "An optimum was asked for.", "A cost of the profile is below 0.", "Profile again, or use an analytic profile."
            )
        self.profile, self.cluster, self.ranks, self.lengths, self.memory = profile, cluster, ranks, lengths, memory
        n, stacks = len(ranks), profile.stacks
        self.units, self.columns, self.tokens = stacks[0].num_units, stacks[0].columns, lengths[0]
        self.count = n
        self.width = 6 * n  # a, b, s and their flags
        self.rows: list[tuple[dict[int, float], float]] = []  # coefficients @ x <= limit
        self.attention: list[list[int]] = []
        self.tensor: list[int] = []
        self.sequence: list[int] = []
        self.con: list[int] = []
        self.gather: list[int] = []
        self.scatter: list[int] = []
        for stack, shape in enumerate(stacks):
            blocks = ("own", "cross") if shape.has_cross_attention else ("own",)
            self.attention.append([self._slowest(0, block, stack) for block in blocks])
            self.tensor.append(self._slowest(1, "tensor", stack))
            self.sequence.append(self._slowest(2, "sequence", stack))
            self.con.append(self._slowest(2, "con", stack))
            self.gather.append(self._ring(stack, 0))
            self.scatter.append(self._ring(stack, 1))

    def _seconds(self, what: str, stack: int, rank: int, count: int) -> float:
        if what == "tensor":
            return mlp_tensor_s(self.profile, rank, stack, count, self.lengths)
        if what == "sequence":
            return mlp_sequence_s(self.profile, rank, stack, count)
        if what == "con":
            return con_s(self.profile, rank, stack, count)
        if what == "add":
            return self.profile.costs[rank][stack].seconds("ADD", count)
        return attention_s(self.profile, rank, stack, count, self.lengths)[what == "cross"]

    def _line(self, what: str, stack: int, rank: int, most: int) -> Line:
        """Return (fixed, slope) of a time that is affine from 1 to `most`."""
        low, high = self._seconds(what, stack, rank, 1), self._seconds(what, stack, rank, most)
        slope = (high - low) / (most - 1) if most > 1 else 0.0
        return low - slope, slope

    def _slowest(self, part: int, what: str, stack: int) -> int:
        """Return the variable that is at least every device's seconds of `part` (0 units, 1 columns, 2 tokens)."""
        variable, self.width = self.width, self.width + 1
        most = (self.units, self.columns, self.tokens)[part]
        for d, rank in enumerate(self.ranks):
            fixed, slope = self._line(what, stack, rank, most)
            self.rows.append(({part * self.count + d: slope, (3 + part) * self.count + d: fixed, variable: -1.0}, 0.0))
        return variable

    def _ring(self, stack: int, shift: int) -> int:
        """Return the variable that is at least the end of every hop of a ring collective."""
        n, last = self.count, self.width
        self.width += 1
        ends: dict[tuple[int, int], int] = {}
        for step in range(n - 1):
            for i in range(n):
                ends[step, i], self.width = self.width, self.width + 1
                owner, to = (i - step - shift) % n, self.ranks[(i + 1) % n]
                link = self.cluster.link(self.ranks[i], to)
                fixed, slope = link.latency_s, self.profile.stacks[stack].hidden_bytes / link.bytes_per_s
                if shift:
                    add = self._line("add", stack, to, self.tokens)
                    fixed, slope = fixed + add[0], slope + add[1]
                hop = {2 * n + owner: slope, 5 * n + owner: fixed, ends[step, i]: -1.0}
                before = [ends[step - 1, i], ends[step - 1, (i - 1) % n]] if step else [None]
                for one in before:
                    self.rows.append((hop if one is None else {**hop, one: 1.0}, 0.0))
                self.rows.append(({ends[step, i]: 1.0, last: -1.0}, 0.0))
        return last

    def solve(  # type: ignore[no-untyped-def]
        self, q: tuple[int, ...], *, integer: bool, gap: float = 1e-4, time_limit_s: float = 20.0, cutoff: float = math.inf
    ):
        """Return HiGHS's answer for so many scheme-2 layers in each stack."""
        n, stacks = self.count, self.profile.stacks
        price = np.zeros(self.width)
        for stack, shape in enumerate(stacks):
            p = shape.num_layers - q[stack]
            rings = p * num_blocks(shape) + q[stack] * (num_blocks(shape) - 1)
            for variable in self.attention[stack]:
                price[variable] += shape.num_layers
            price[self.tensor[stack]] += p
            price[self.sequence[stack]] += q[stack]
            price[self.con[stack]] += shape.num_layers
            price[self.gather[stack]] += rings
            price[self.scatter[stack]] += rings
        rows = [*self.rows, *self._memory_rows(q)]
        data: list[float] = []
        row_at: list[int] = []
        column_at: list[int] = []
        limits: list[float] = []
        for number, (row, limit) in enumerate(rows):
            data.extend(row.values())
            column_at.extend(row)
            row_at.extend([number] * len(row))
            limits.append(limit)
        for part, most in enumerate((self.units, self.columns, self.tokens)):
            for d in range(n):  # above 0 only with its flag
                data.extend((1.0, -float(most)))
                row_at.extend((len(limits), len(limits)))
                column_at.extend((part * n + d, (3 + part) * n + d))
                limits.append(0.0)
        lower = np.full(len(limits), -np.inf)
        for part, most in enumerate((self.units, self.columns, self.tokens)):
            data.extend([1.0] * n)
            row_at.extend([len(limits)] * n)
            column_at.extend(range(part * n, (part + 1) * n))
            limits.append(float(most))
            lower = np.append(lower, float(most))
        if math.isfinite(cutoff):
            at = np.flatnonzero(price)
            data.extend(price[at])
            row_at.extend([len(limits)] * len(at))
            column_at.extend(at)
            limits.append(cutoff)
            lower = np.append(lower, -np.inf)
        matrix = csr_matrix((data, (row_at, column_at)), shape=(len(limits), self.width))
        upper = np.full(self.width, np.inf)
        for part, most in enumerate((self.units, self.columns, self.tokens)):
            upper[part * n : (part + 1) * n] = most
        upper[3 * n : 6 * n] = 1
        kinds = np.zeros(self.width)
        kinds[: 6 * n] = 1 if integer else 0
        return milp(
            price,
            integrality=kinds,
            bounds=Bounds(np.zeros(self.width), upper),
            constraints=LinearConstraint(matrix, lower, np.array(limits)),
            options={"mip_rel_gap": gap, "time_limit": time_limit_s},
        )

    def _memory_rows(self, q: tuple[int, ...]) -> list[tuple[dict[int, float], float]]:
        """Return Eq. 8-9 for each device, in megabytes so that the numbers are of one size."""
        n, rows = self.count, []
        stacks = self.profile.stacks
        unit = sum(shape.num_layers * (shape.unit_bytes + shape.cross_unit_bytes) for shape in stacks)
        first = sum((shape.num_layers - second) * shape.column_bytes for shape, second in zip(stacks, q, strict=True))
        second = sum(number * shape.column_bytes for shape, number in zip(stacks, q, strict=True))
        layers = sum(shape.num_layers * shape.layer_bytes for shape in stacks) if self.memory.layers else 0
        working = self.profile.working_bytes_per_token * max(self.lengths) if self.memory.working else 0
        for d, rank in enumerate(self.ranks):
            room = self.memory.budget_bytes(self.cluster, rank) - layers - working - self.memory.ends_bytes(self.profile, d)
            a, b, holds = d, n + d, 5 * n + d
            full = second * self.columns
            if self.memory.full_everywhere:
                rows.append(({a: unit, b: first}, room - full))
            else:  # all columns of scheme-2 layers with tokens, its own columns of them without: both at least hold
                rows.append(({a: unit, b: first, holds: full}, room))
                rows.append(({a: unit, b: first + second}, room))
        return [({at: number / 1e6 for at, number in row.items()}, limit / 1e6) for row, limit in rows]

    def plan(self, x: np.ndarray, q: tuple[int, ...]) -> InferencePlan:
        """Return the plan of a solution."""
        n = self.count
        a, b, s = (tuple(int(number) for number in np.rint(x[part * n : (part + 1) * n])) for part in range(3))
        schemes: list[int] = []
        for shape, second in zip(self.profile.stacks, q, strict=True):
            schemes += [2] * second + [1] * (shape.num_layers - second)
        return InferencePlan(
            method="oracle",
            paradigm="hybrid",
            ranks=self.ranks,
            units=a,
            columns=b,
            shares=tuple(float(count) for count in s),
            schemes=tuple(schemes),
            length=self.lengths[0],
        )
