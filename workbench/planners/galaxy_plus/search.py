"""The search for hybrid plans (Galaxy+ Eq. 9): one neighbourhood, and one climber for any price."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.memory import MemoryRule, inference_needs, part_bytes, room_bytes
from workbench.planners.galaxy_plus.pricing import HybridPricer, second_layers
from workbench.planners.galaxy_plus.times import Line, block_lines, capacity, ends_s

Ranks = tuple[int, ...]
Price = Callable[[InferencePlan], float]
Move = Callable[[InferencePlan, float], Iterator[InferencePlan]]

MOST_POSITIONS = 10
"""Rings of more devices are not given to the linear programme, whose size is their square, and of their neighbours few are looked at."""
FIRST_STEP = 0.125
NEAR = 1.03
"""A plan of other devices, or of another order, whose seconds by Eq. 9 are higher by this factor is not given to another price."""
GAIN = 1e-4
"""The least share by which a step must be faster by another price than Eq. 9."""


class Search:
    """One model, cluster and sequence.  lengths, longest: tokens of each stack, timed and held in memory.

    ranks: the devices that may take part; is_ring: all of them, in this order.  portal: stands first.
    schemes: of all layers, which at least two devices then split; None: free.
    """

    def __init__(
        self,
        profile: InferenceProfile,
        cluster: Cluster,
        *,
        method: str,
        lengths: Sequence[int],
        longest: Sequence[int],
        memory: MemoryRule,
        ranks: Ranks,
        portal: int | None,
        schemes: int | None,
        is_ring: bool,
    ) -> None:
        self.profile, self.cluster, self.method, self.lengths, self.longest = profile, cluster, method, tuple(lengths), tuple(longest)
        self.memory, self.ranks, self.portal, self.schemes, self.is_ring = memory, ranks, portal, schemes, is_ring
        self.layers = tuple(shape.num_layers for shape in profile.stacks)
        self.speed = {rank: capacity(profile, rank, lengths) for rank in ranks}
        self._pricer = HybridPricer(profile, cluster, lengths)
        self.room = cache(lambda ring: room_bytes(profile, cluster, memory, ring, longest))
        self.part_bytes = cache(lambda second: part_bytes(profile, second))
        self._columns_line = cache(self._line_of_columns)

    def seconds(self, plan: InferencePlan) -> float:
        """Return Eq. 9."""
        return self._pricer(plan).layers_s

    def total_s(self, plan: InferencePlan) -> float:
        """Return the seconds with both ends."""
        return self._pricer(plan).total_s + ends_s(self.profile, plan.ranks[0], self.lengths)

    def fitted(self, plan: InferencePlan | None) -> InferencePlan | None:
        """Return the plan if it fits, with other columns if need be; None if no columns fit."""
        if plan is None or self._fits(plan):
            return plan
        plan = self.leveled(plan)
        return plan if plan is not None and self._fits(plan) else None

    def _fits(self, plan: InferencePlan) -> bool:
        if self.schemes is not None and len(self.ranks) > 1 and not is_split(plan):
            return False
        needs = inference_needs(
            plan,
            self.profile,
            length=self.longest[0],
            decoder_length=self.longest[-1] if len(self.longest) > 1 else None,
            memory=self.memory,
        )
        return all(need.total_bytes <= self.memory.budget_bytes(self.cluster, rank) for rank, need in needs.items())

    def leveled(self, plan: InferencePlan) -> InferencePlan | None:
        """Return the plan with the columns whose slowest device is fastest and that memory holds; None if there are none."""
        second, shape = second_layers(plan, self.profile), self.profile.stacks[0]
        unit, own, other = self.part_bytes(second)
        # Rounding a second stack's cut may cost a unit and a column more.
        slack = unit + own + other if len(self.layers) > 1 else 0.0
        caps = []
        for nbytes, units, share in zip(self.room(plan.ranks), plan.units, plan.shares, strict=True):
            is_full = share > 0 or self.memory.full_everywhere
            left = nbytes - slack - units * unit - is_full * other * shape.columns
            if left < 0:
                return None
            each = own if is_full else own + other
            caps.append(min(shape.columns, int(left / each)) if each > 0 else shape.columns)
        if sum(caps) < shape.columns:
            return None
        lines = [self._columns_line(rank, second) for rank in plan.ranks]
        return replace(plan, columns=water_level(lines, caps, shape.columns))

    def _line_of_columns(self, rank: int, second: tuple[int, ...]) -> Line:
        """Return the line over columns of all tensor-parallel feed-forward networks; of all layers if there is none."""
        weights = [layers - q for layers, q in zip(self.layers, second, strict=True)]
        fixed = slope = 0.0
        for stack, weight in enumerate(weights if any(weights) else self.layers):
            line, shape = block_lines(self.profile, rank, stack, self.lengths)["tensor"], self.profile.stacks[stack]
            fixed, slope = fixed + weight * line[0], slope + weight * line[1] * shape.columns / self.profile.stacks[0].columns
        return fixed, slope

    def climb(
        self,
        plan: InferencePlan,
        price: Price | None = None,
        *,
        most: int = 10_000,
        last_step: float = 0.01,
    ) -> tuple[InferencePlan, float]:
        """Return the plan and its price (default: Eq. 9) after at most `most` others were priced; each faster one is the next start.

        Moves go coarse before fine.
        """
        judge, gain = price or self.seconds, GAIN if price else 1e-6
        best_s, seen, step = judge(plan), {plan}, FIRST_STEP
        guided = (self._left, self._exchanged, self._swapped)
        while step >= last_step and most > 0:
            improved = False
            for kind in self._neighbours(step):
                for moved in kind(plan, step):
                    if moved in seen:
                        continue
                    seen.add(moved)
                    limit_s = best_s if price is None else NEAR * self.seconds(plan) if kind in guided else math.inf
                    if self.seconds(moved) >= limit_s or (one := self.fitted(moved)) is None:
                        continue
                    if most <= 0:
                        return plan, best_s
                    value, most = judge(one), most - 1
                    if value < best_s * (1 - gain):
                        plan, best_s, improved = one, value, True
                        break
            if not improved:
                step /= 2
        return plan, best_s

    def _neighbours(self, step: float) -> list[Move]:
        """Return the kinds of moves: devices that join or leave, schemes, order of the ring, tokens, columns, units."""
        kinds: list[Move] = [_tokens, _columns, self._units]
        if self.schemes is None:
            kinds.insert(0, self._schemes)
        if not self.is_ring and step >= FIRST_STEP:
            kinds = [self._joined, *kinds[:-3], self._swapped, *kinds[-3:], self._left, self._exchanged]
        return kinds

    def _joined(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield the ring with one device more, which gets tokens and columns by its speed, or half of that, and no heads.

        A slow device may be worth its part of the feed-forward networks while its part of the heads, a whole one, is too much for it.
        """
        in_ring = sum(self.speed[rank] for rank in plan.ranks)
        places = range(0 if self.portal is None else 1, plan.num_positions + 1)
        for rank in (rank for rank in self.ranks if rank not in plan.ranks):
            for part in (1.0, 0.5):
                share = part * self.speed[rank] / (in_ring + self.speed[rank])
                columns = round(share * sum(plan.columns))
                rest = proportional_parts(sum(plan.columns) - columns, plan.columns)
                shares = [(1 - share) * own for own in plan.shares]
                for at in places if plan.num_positions < MOST_POSITIONS else places[-1:]:
                    yield replace(
                        plan,
                        ranks=(*plan.ranks[:at], rank, *plan.ranks[at:]),
                        units=(*plan.units[:at], 0, *plan.units[at:]),
                        columns=(*rest[:at], columns, *rest[at:]),
                        shares=(*shares[:at], share * sum(plan.shares), *shares[at:]),
                    )

    def _left(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield the ring without one of its devices, whose parts the others take."""
        for at in range(0 if self.portal is None else 1, plan.num_positions if plan.num_positions > 1 else 0):
            keep = [other for other in range(plan.num_positions) if other != at]
            speed = [self.speed[plan.ranks[other]] for other in keep]

            def given(parts: Sequence[float], at: int = at, keep: list[int] = keep, speed: list[float] = speed) -> list[float]:
                more = proportional_parts(int(parts[at]), speed)
                return [parts[other] + one for other, one in zip(keep, more, strict=True)]

            yield replace(
                plan,
                ranks=tuple(plan.ranks[other] for other in keep),
                units=tuple(map(int, given(plan.units))),
                columns=tuple(map(int, given(plan.columns))),
                shares=tuple(map(float, given(plan.tokens(plan.length)))),
                overlap=plan.overlap and len(keep) > 1,
                both_ways=plan.both_ways and len(keep) > 2,
            )

    def _exchanged(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield the ring with one of its devices replaced by another, which takes over its work."""
        for at in range(0 if self.portal is None else 1, plan.num_positions):
            for rank in self.ranks:
                if rank not in plan.ranks:
                    yield replace(plan, ranks=(*plan.ranks[:at], rank, *plan.ranks[at + 1 :]))

    def _swapped(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield the plan with two devices exchanged in the ring, with their tokens or without; of a large ring neighbours only."""
        for i, j in itertools.combinations(range(0 if self.portal is None else 1, plan.num_positions), 2):
            if j == i + 1 or plan.num_positions <= MOST_POSITIONS:
                order = list(range(plan.num_positions))
                order[i], order[j] = order[j], order[i]
                names = ("ranks", "units", "columns", "shares")
                moved = replace(plan, **{name: tuple(getattr(plan, name)[at] for at in order) for name in names})  # type: ignore[arg-type]
                yield moved
                yield replace(moved, shares=plan.shares)

    def _units(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield the plan with units moved from position to position, and with columns that suit them."""
        for parts in _shifts(plan.units, max(1, round(step * sum(plan.units)))):
            moved = replace(plan, units=parts)
            yield moved
            if (leveled := self.leveled(moved)) is not None:
                yield leveled

    def _schemes(self, plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
        """Yield other numbers of scheme-2 layers in each stack, the first layers of each."""
        numbers = second_layers(plan, self.profile)
        for at, layers in enumerate(self.layers):
            few = max(1, round(step * layers))
            for q in dict.fromkeys((layers, 0, numbers[at] + few, numbers[at] - few)):
                if 0 <= q <= layers and q != numbers[at]:
                    second = (*numbers[:at], q, *numbers[at + 1 :])
                    schemes = [
                        2 if layer < count else 1 for count, all_of in zip(second, self.layers, strict=True) for layer in range(all_of)
                    ]
                    yield replace(plan, schemes=tuple(schemes))


def is_split(plan: InferencePlan) -> bool:
    """Return whether at least two devices compute: heads, in scheme 1 columns, in scheme 2 all columns of some tokens."""
    shares = plan.shares or (0.0,) * plan.num_positions
    first, second = 1 in plan.schemes, 2 in plan.schemes
    parts = zip(plan.units, plan.columns, shares, strict=True)
    return sum(bool(units or (first and columns) or (second and share)) for units, columns, share in parts) > 1


def _tokens(plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    tokens, count = plan.tokens(plan.length), plan.num_positions
    whole = [plan.length * (position + 1) // count - plan.length * position // count for position in range(count)]
    for part in (1.0, 0.5) if step >= FIRST_STEP else ():  # towards equal parts, as rings like them
        mixed = [round((1 - part) * now + part * equal) for now, equal in zip(tokens, whole, strict=True)]
        mixed[0] += plan.length - sum(mixed)
        if min(mixed) >= 0:
            yield replace(plan, shares=tuple(map(float, mixed)))
    for parts in _shifts(tokens, max(1, round(step * plan.length))):
        yield replace(plan, shares=tuple(map(float, parts)))


def _columns(plan: InferencePlan, step: float) -> Iterator[InferencePlan]:
    if 1 in plan.schemes:
        for parts in _shifts(plan.columns, max(1, round(step * sum(plan.columns)))):
            yield replace(plan, columns=parts)


def _shifts(parts: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """Yield the parts with `step` moved between two positions, from the largest part first and to the smallest first."""
    by_size = sorted(range(len(parts)), key=lambda position: -parts[position])
    givers, takers = (by_size, by_size) if len(parts) <= MOST_POSITIONS else (by_size[:2], by_size[-8:])
    for giver, taker in itertools.product(givers, reversed(takers)):
        if giver != taker and parts[giver] >= step:
            moved = list(parts)
            moved[giver] -= step
            moved[taker] += step
            yield tuple(moved)


def water_level(lines: Sequence[Line], caps: Sequence[int], total: int) -> tuple[int, ...]:
    """Return whole numbers of that sum, at most `caps`, whose slowest line is fastest; a line counts only where its number is not 0.

    As water finds its level: between two of the levels at which a device begins or is full their sum is linear.
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
    parts = [max(0, min(cap, int((level - fixed) / slope - 1e-9))) for (fixed, slope), cap in zip(lines, caps, strict=True)]
    for _ in range(total - sum(parts)):
        able = [d for d, part in enumerate(parts) if part < caps[d]]
        parts[min(able, key=lambda d: lines[d][0] + lines[d][1] * (parts[d] + 1))] += 1
    return tuple(parts)
