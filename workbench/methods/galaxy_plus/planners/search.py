"""The search for hybrid plans (Galaxy+ Eq. 9): one neighbourhood, and one hill climber for any price."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.equation9 import Cut, Equation9, cut_of
from workbench.methods.galaxy_plus.planners.memory import needs, part_bytes, room_bytes
from workbench.methods.galaxy_plus.planners.programme import hybrid_plan
from workbench.methods.galaxy_plus.planners.terms import Line, capacity, lengths_of
from workbench.planners.memory import fits
from workbench.planners.problem import Problem

Price = Callable[[InferencePlan], float]
Move = Callable[[Cut, float], Iterator[Cut]]

MOST_POSITIONS = 10
"""Larger rings are not given to the linear programme, whose size is quadratic, and only few of their neighbours are
tried."""
FIRST_STEP = 0.125
NEAR = 1.03
"""A plan with another order is not rated by another price if its seconds by Eq. 9 are higher by this factor."""
GAIN = 1e-4
"""The minimum relative gain of a step by a price other than Eq. 9."""


class Search:
    """The search for one problem's plans.

    portal: the device that is first.  schemes: the scheme of all layers, which at least two devices then split; None:
    free.
    """

    def __init__(
        self, problem: Problem[InferenceProfile], *, method: str, portal: int | None, schemes: int | None
    ) -> None:
        profile, lengths, ranks = problem.profile, lengths_of(problem), problem.members
        self.problem, self.profile, self.cluster, self.lengths, self.ranks = (
            problem,
            profile,
            problem.cluster,
            lengths,
            ranks,
        )
        self.method, self.portal, self.schemes = method, portal, schemes
        self.layers = tuple(shape.num_layers for shape in profile.stacks)
        self.speed = {rank: capacity(profile, rank, lengths) for rank in ranks}
        self.kind: dict[int, int] = {}
        for rank in ranks:
            self.kind[rank] = next((first for first in set(self.kind.values()) if self._are_alike(first, rank)), rank)
        self._passed: set[Cut] = set()
        self._pricer = Equation9(profile, problem.cluster, lengths)
        self.room = cache(partial(room_bytes, problem))
        self.part_bytes = cache(lambda second: part_bytes(problem, second))
        self._columns_line, self._columns = cache(self._line_of_columns), cache(self._level)

    def _are_alike(self, a: int, b: int) -> bool:
        """Return whether a plan stays the same if two devices swap places; only one of them then needs to be tried."""
        costs, link, others = self.profile.costs, self.cluster.link, [rank for rank in self.ranks if rank not in (a, b)]
        if (
            self.portal in (a, b)
            or costs[a] != costs[b]
            or self.cluster.devices[a].memory_bytes != self.cluster.devices[b].memory_bytes
        ):
            return False
        return link(a, b) == link(b, a) and all(link(a, c) == link(b, c) and link(c, a) == link(c, b) for c in others)

    def _left_out(self, cut: Cut) -> Iterable[int]:
        """Return the devices that the plan does not use, one of each kind."""
        return sorted({self.kind[rank]: rank for rank in reversed(self.ranks) if rank not in cut.ranks}.values())

    def seconds(self, cut: Cut) -> float:
        """Return the seconds of Eq. 9."""
        return self._pricer(cut)

    def plan(self, cut: Cut, like: InferencePlan | None = None) -> InferencePlan:
        """Return the plan of a cut.  like: a plan whose other settings it gets; without it, predicted_s includes
        embedding and head.
        """
        plan, several = hybrid_plan(self.method, self.profile, cut), len(cut.ranks)
        if like is None:
            return replace(plan, predicted_s=self._pricer.total_s(cut))
        parts = {name: getattr(plan, name) for name in ("ranks", "units", "columns", "shares", "schemes")}
        return replace(like, **parts, overlap=like.overlap and several > 1, both_ways=like.both_ways and several > 2)

    def fitted(self, cut: Cut | None) -> Cut | None:
        """Return the cut if it fits, if necessary with other columns; None if no columns fit."""
        if cut is None or self._fits(cut):
            return cut
        cut = self.leveled(cut)
        return cut if cut is not None and self._fits(cut) else None

    def _fits(self, cut: Cut) -> bool:
        plan = hybrid_plan(self.method, self.profile, cut)
        if self.schemes is not None and len(self.ranks) > 1 and not is_split(plan):
            return False
        return fits(self.cluster, needs(self.problem, plan))

    def leveled(self, cut: Cut) -> Cut | None:
        """Return the cut with the columns that fit in memory and make the slowest device fastest; None if there are
        none.
        """
        shape = self.profile.stacks[0]
        unit, own_column, other = self.part_bytes(cut.second)
        # Rounding a second stack's cut may need one more unit and one more column.
        slack = unit + own_column + other if len(self.layers) > 1 else 0.0
        caps = []
        for nbytes, units, share in zip(self.room(cut.ranks), cut.units, cut.shares, strict=True):
            is_full = share > 0 or self.profile.full_everywhere
            free_bytes = nbytes - slack - units * unit - is_full * other * shape.columns
            if free_bytes < 0:
                return None
            each = own_column if is_full else own_column + other
            caps.append(min(shape.columns, int(free_bytes / each)) if each > 0 else shape.columns)
        if sum(caps) < shape.columns:
            return None
        return cut._replace(columns=self._columns(cut.ranks, cut.second, tuple(caps)))

    def _level(self, ranks: Ranks, second: tuple[int, ...], caps: tuple[int, ...]) -> tuple[int, ...]:
        return water_level([self._columns_line(rank, second) for rank in ranks], caps, self.profile.stacks[0].columns)

    def _line_of_columns(self, rank: int, second: tuple[int, ...]) -> Line:
        """Return the line over columns of all tensor-parallel feed-forward networks; of all layers if there are no such
        networks.
        """
        weights = [layers - q for layers, q in zip(self.layers, second, strict=True)]
        fixed = slope = 0.0
        for stack, weight in enumerate(weights if any(weights) else self.layers):
            line, shape = self._pricer.lines(rank, stack)["tensor"], self.profile.stacks[stack]
            fixed, slope = (
                fixed + weight * line[0],
                slope + weight * line[1] * shape.columns / self.profile.stacks[0].columns,
            )
        return fixed, slope

    def climb(self, plan: InferencePlan, price: Price, *, most: int) -> tuple[InferencePlan, float]:
        """Return the plan and its price after rating at most `most` others; each faster one is the next start."""
        cut, seconds = self._climb(
            cut_of(plan, self.profile), lambda cut: price(self.plan(cut, plan)), GAIN, most, 0.01
        )
        return self.plan(cut, plan), seconds

    def climbed(self, cut: Cut, last_step: float) -> Cut:
        """Return the cut that climbing reaches with Eq. 9; each faster cut is the next start."""
        return self._climb(cut, None, 1e-6, 10_000, last_step)[0]

    def _climb(
        self, cut: Cut, judge: Callable[[Cut], float] | None, gain: float, most: int, last_step: float
    ) -> tuple[Cut, float]:
        """Climb with coarse moves before fine ones.  judge: default Eq. 9.  gain: the minimum relative gain of
        a step.
        """
        now_s = self.seconds(cut)
        best_s, visited, step = judge(cut) if judge else now_s, {cut}, FIRST_STEP
        while step >= last_step and most > 0:
            improved = False
            for kind in self._neighbours(step, judge is None):
                limit_s = now_s if judge is None else NEAR * now_s if kind == self._swapped else math.inf
                for moved in kind(cut, step):
                    if moved in visited:
                        continue
                    visited.add(moved)
                    if self.seconds(moved) >= limit_s or (fitted := self.fitted(moved)) is None:
                        continue
                    if most <= 0:
                        return cut, best_s
                    value, most = judge(fitted) if judge else self.seconds(fitted), most - 1
                    if value < best_s * (1 - gain):
                        if judge is None and fitted in self._passed:  # another climb by Eq. 9 continued from there
                            return fitted, value
                        self._passed.add(fitted)
                        cut, best_s, now_s, improved = fitted, value, self.seconds(fitted), True
                        break
            if not improved:
                step /= 4
        return cut, best_s

    def _neighbours(self, step: float, is_closed_form: bool) -> list[Move]:
        """Return the kinds of moves: devices that join, schemes, order of the ring, tokens, columns, units."""
        kinds: list[Move] = [self._tokens, self._leveled if is_closed_form else _columns, self._units]
        if self.schemes is None:
            kinds.insert(0, self._schemes)
        if step >= FIRST_STEP:
            kinds = [self._joined, *kinds[:-3], self._swapped, *kinds[-3:]]
        return kinds

    def _joined(self, cut: Cut, step: float) -> Iterator[Cut]:
        """Yield the ring with one more device, which gets tokens and columns by its speed, or half of that, and no
        heads.

        A slow device may be worth its part of the feed-forward networks, even if a whole head is too much for it.
        """
        in_ring, count = sum(self.speed[rank] for rank in cut.ranks), len(cut.ranks)
        places = range(0 if self.portal is None else 1, count + 1)
        for rank in self._left_out(cut):
            for part in (1.0, 0.5):
                share = part * self.speed[rank] / (in_ring + self.speed[rank])
                added = [round(share * sum(parts)) for parts in (cut.columns, cut.shares)]
                columns, shares = (
                    proportional_parts(round(sum(parts)) - amount, parts)
                    for amount, parts in zip(added, (cut.columns, cut.shares), strict=True)
                )
                for place in places if count < MOST_POSITIONS else places[-1:]:
                    pairs = zip((rank, 0, *added), (cut.ranks, cut.units, columns, shares), strict=True)
                    yield Cut._make(
                        [*((*parts[:place], amount, *parts[place:]) for amount, parts in pairs), cut.second]
                    )

    def _swapped(self, cut: Cut, step: float) -> Iterator[Cut]:
        """Yield the cut with two devices swapped in the ring, with or without their tokens; in a large ring only
        neighbours.
        """
        count = len(cut.ranks)
        for i, j in itertools.combinations(range(0 if self.portal is None else 1, count), 2):
            if j == i + 1 or count <= MOST_POSITIONS:
                order = list(range(count))
                order[i], order[j] = order[j], order[i]
                moved = Cut._make([*(tuple(parts[position] for position in order) for parts in cut[:4]), cut.second])
                if self.kind[cut.ranks[i]] != self.kind[cut.ranks[j]]:
                    yield moved
                yield moved._replace(shares=cut.shares)

    def _tokens(self, cut: Cut, step: float) -> Iterator[Cut]:
        length, count = self.lengths[0], len(cut.ranks)
        tokens = proportional_parts(length, cut.shares)
        equal_tokens = [length * (position + 1) // count - length * position // count for position in range(count)]
        for part in (1.0, 0.5) if step >= FIRST_STEP else ():  # towards equal parts, which suit rings
            mixed = [round((1 - part) * now + part * equal) for now, equal in zip(tokens, equal_tokens, strict=True)]
            mixed[0] += length - sum(mixed)
            if min(mixed) >= 0:
                yield cut._replace(shares=tuple(mixed))
        for parts in _shifts(tokens, max(1, round(step * length))):
            yield cut._replace(shares=parts)

    def _units(self, cut: Cut, step: float) -> Iterator[Cut]:
        """Yield the cut with units moved between positions, and with columns that suit them."""
        for parts in _shifts(cut.units, max(1, round(step * sum(cut.units)))):
            yield (moved := cut._replace(units=parts))
            yield from self._leveled(moved, step)

    def _leveled(self, cut: Cut, step: float) -> Iterator[Cut]:
        """Yield the cut with the best columns by Eq. 9."""
        if (leveled := self.leveled(cut)) is not None:
            yield leveled

    def _schemes(self, cut: Cut, step: float) -> Iterator[Cut]:
        """Yield other numbers of scheme-2 layers in each stack."""
        for index, layers in enumerate(self.layers):
            few = max(1, round(step * layers))
            for q in dict.fromkeys((layers, 0, cut.second[index] + few, cut.second[index] - few)):
                if 0 <= q <= layers and q != cut.second[index]:
                    yield cut._replace(second=(*cut.second[:index], q, *cut.second[index + 1 :]))


def is_split(plan: InferencePlan) -> bool:
    """Return whether at least two devices compute: heads, in scheme 1 columns, in scheme 2 all columns of
    some tokens.
    """
    shares = plan.shares or (0.0,) * plan.num_positions
    first, second = 1 in plan.schemes, 2 in plan.schemes
    parts = zip(plan.units, plan.columns, shares, strict=True)
    return sum(bool(units or (first and columns) or (second and share)) for units, columns, share in parts) > 1


def _columns(cut: Cut, step: float) -> Iterator[Cut]:
    for parts in _shifts(cut.columns, max(1, round(step * sum(cut.columns)))):
        yield cut._replace(columns=parts)


def _shifts(parts: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the parts with `step` moved between two positions, from the largest and to the smallest part first."""
    by_size = sorted(range(len(parts)), key=lambda position: -parts[position])
    givers, takers = (by_size, by_size) if len(parts) <= MOST_POSITIONS else (by_size[:2], by_size[-8:])
    for giver, taker in itertools.product(givers, reversed(takers)):
        if giver != taker and parts[giver] >= step:
            moved = list(parts)
            moved[giver] -= step
            moved[taker] += step
            yield tuple(moved)


def water_level(lines: Sequence[Line], caps: Sequence[int], total: int) -> tuple[int, ...]:
    """Return integers with sum `total`, at most `caps`, whose slowest line is as fast as possible; a line with integer
    0 does not count.

    Like water finding its level: between two levels at which a device starts or is full, the sum is linear.
    """
    least = 1e-9 * max(1e-30, *(fixed + slope * total for fixed, slope in lines)) / total
    lines = [(fixed, max(slope, least)) for fixed, slope in lines]
    bends = [(fixed, 1.0 / slope) for (fixed, slope), cap in zip(lines, caps, strict=True) if cap]
    bends += [(fixed + slope * cap, -1.0 / slope) for (fixed, slope), cap in zip(lines, caps, strict=True) if cap]
    bends.sort()
    level, number, rate = bends[0][0], 0.0, 0.0
    for bend, change in bends:
        more = rate * (bend - level)
        if number + more >= total:
            break
        level, number, rate = bend, number + more, rate + change
    if rate > 0:
        level += max(0.0, total - number) / rate
    parts = [
        max(0, min(cap, int((level - fixed) / slope - 1e-9))) for (fixed, slope), cap in zip(lines, caps, strict=True)
    ]
    for _ in range(total - sum(parts)):
        able = [d for d, part in enumerate(parts) if part < caps[d]]
        parts[min(able, key=lambda d: lines[d][0] + lines[d][1] * (parts[d] + 1))] += 1
    return tuple(parts)
