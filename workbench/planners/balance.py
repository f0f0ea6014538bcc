"""Cut a pipeline into stages so that the slowest is as fast as possible, for every number of stages (PAC+, section V-A,
Eq. 3 and 4).

Our reading of Eq. 3.  W(0 -> y, D_n, s) covers the first y layers (numbered 1 to y), T(q+1 -> y) the layers q+1 to y.
For s = 1 it is T(1 -> y, D_n), which Eq. 3's 1 <= m < n excludes and Algorithm 1's m = n includes.  For s > 1 no stage
is empty of layers or devices (q >= s - 1 and n - m >= s - 1).  The maximum does not depend on the end from which the
pipeline is cut, so we build it from the back.
Under 1F1B the front stage of a suffix of s stages then has exactly min(s, M) micro-batches in flight, so the memory
test is exact instead of a guess, and W(0 -> L, D, s) is the same.

StageTimes and dispatch divide a micro-batch among the devices of a group so that the slowest is as fast as possible
(Eq. 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import add

import numpy as np

from workbench.core.plan import Share, Stage
from workbench.core.profile import Profile
from workbench.core.schedule import Ranks
from workbench.planners.memory import FootprintTable
from workbench.planners.problem import Problem

TIE = 1e-12
"""Bottlenecks within this relative difference are equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """W_s: stages, and bottleneck_s, the time W(0 -> L, D, s) of the slowest stage."""

    stages: tuple[Stage, ...]
    bottleneck_s: float


def balance(
    times: StageTimes, num_layers: int, ranks: Sequence[int], micro_batches: int, *, max_group: int | None = None
) -> Iterator[Balanced]:
    """Yield W_s of Eq. 3 for every number of stages s that fits, with the devices in the order of `ranks`."""
    count = len(ranks)
    widest = count if max_group is None else min(max_group, count)
    groups = times.groups(ranks, widest)
    step = max(1, CELLS_AT_ONCE // (num_layers**2 * widest))
    # Of several devices at a time: (devices, groups, columns), the groups that begin with each.
    blocks = {first: _padded(groups[first : first + step]) for first in range(0, count, step)}
    # slowest[a, x]: the best bottleneck of layers [x, L) on devices a.. in s stages; `whole`: the sum of its stage
    # times, for ties.
    slowest = np.full((count + 1, num_layers + 1), np.inf)
    total = np.full((count + 1, num_layers + 1), np.inf)
    # W_0: no layers on no devices.
    slowest[count, num_layers] = total[count, num_layers] = 0.0
    choices: list[np.ndarray] = []  # for each s: (count, L), the front stage's last device and stop, as one number
    fronts: dict[int, np.ndarray] = {}
    in_flight = 0
    for s in range(1, min(num_layers, count) + 1):
        if min(s, micro_batches) != in_flight:
            in_flight = min(s, micro_batches)
            # By the first device of a block: (devices, L, groups, L), the seconds of layers [x, y) at [:, x, :, y - 1].
            fronts = {first: np.ascontiguousarray(times.of_groups(rows, in_flight)) for first, rows in blocks.items()}
        next_slowest, next_whole = np.full_like(slowest, np.inf), np.full_like(total, np.inf)
        choice = np.full((count, num_layers), -1)
        for first, front in fronts.items():
            devices = np.arange(first, first + len(front))
            rest = np.minimum(devices[:, None] + 1 + np.arange(front.shape[2]), count)  # the devices behind each group
            value = np.maximum(front, slowest[rest, 1:][:, None]).reshape(*front.shape[:2], -1)
            best = value.min(axis=2)
            sums = np.where(
                value <= (best * (1 + TIE))[:, :, None],
                (front + total[rest, 1:][:, None]).reshape(value.shape),
                np.inf,
            )
            choice[devices] = sums.argmin(axis=2)
            next_slowest[devices, :num_layers], next_whole[devices, :num_layers] = best, sums.min(axis=2)
        slowest, total = next_slowest, next_whole
        choices.append(choice)
        if math.isfinite(slowest[0, 0]):
            yield Balanced(
                stages=_stages(times, num_layers, ranks, choices, micro_batches), bottleneck_s=float(slowest[0, 0])
            )


def _stages(
    times: StageTimes, num_layers: int, ranks: Sequence[int], choices: Sequence[np.ndarray], micro_batches: int
) -> tuple[Stage, ...]:
    stages, start, first = [], 0, 0
    for s in range(len(choices), 0, -1):
        width, before_stop = divmod(int(choices[s - 1][first, start]), num_layers)
        stop, end = before_stop + 1, first + width + 1
        group = ranks[first:end]
        samples = times.shares(start, stop, group, min(s, micro_batches))
        shares = tuple(Share(rank=rank, samples=share) for rank, share in zip(group, samples, strict=True) if share)
        stages.append(Stage(start=start, stop=stop, shares=shares))
        start, first = stop, end
    return tuple(stages)


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return tables of falling length as one, (tables, length of the first, columns); what they lack is infinite."""
    joined = np.full((len(rows), *rows[0].shape), np.inf)
    for table, row in zip(joined, rows, strict=True):
        table[: len(row)] = row
    return joined


CELLS_AT_ONCE = 1 << 15
"""The number of stages (a first device, a group, layers) compared at a time, so that they fit into the processor's
cache."""
COLUMNS_AT_ONCE = 4096
"""The number of layer ranges joined at a time, so that the tables fit into the processor's cache."""


def _with_device(before: Sequence[float], row: Sequence[float]) -> list[float]:
    """Return H of 0, 1, 2, ... samples of a group with one more device: it takes 0 to all of them, the others the rest.

    before: H of the others.  row: the device's costs.
    """
    return [min(map(max, before[samples::-1], row)) for samples in range(len(before))]


def _divided(tables: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """Return each device's samples, or 0 for all if there is no memory for the samples.  Among equally good shares, the
    result has the most even load on the later devices.

    tables: H of the first, the first two, ... devices, which ends with all samples.  costs[device][i]: of i samples.
    """
    if not math.isfinite(tables[-1][-1]):
        return (0,) * len(costs)
    shares, count = [], len(tables[-1]) - 1
    for device in range(len(costs) - 1, 0, -1):
        row, others = costs[device], tables[device - 1][count::-1]
        _, _, take = min(zip(map(max, others, row), map(add, others, row), range(count + 1), strict=False))
        shares.append(take)
        count -= take
    return (count, *reversed(shares))


class StageTimes:
    """T(x -> y, group) of Eq. 3 for all ranges of layers at once, by Eq. 4 vectorised over ranges.

    Memory, and with it the times, depend on how many micro-batches are in flight.  If the devices have memory for the
    same samples with one more in flight, both cases share a column.  A rank without samples costs nothing and needs no
    memory.
    copies[i]: copies of the trainable parameters in memory, in addition to themselves, with i + 1 in flight
    (memory.rank_need); default:
    none, with as many in flight as a pipeline can have.
    excess: minimise the bytes above the budget instead of the seconds (to explain why nothing fits).
    """

    def __init__(self, problem: Problem[Profile], *, copies: Sequence[int] = (), excess: bool = False) -> None:
        profile, size = problem.profile, problem.micro_batch_size
        count = profile.num_layers
        self.micro_batch_size = size
        starts, stops = np.triu_indices(count)
        ranges = np.full((count, count), -1)  # of layers [x, y): at [x, y - 1]
        ranges[starts, stops] = np.arange(len(starts))
        ranks = range(profile.world_size)
        copies_by_stage = copies or (0,) * min(profile.world_size, count, problem.micro_batches)
        footprints = [
            FootprintTable(profile, rank, starts, stops + 1, sequence_length=problem.longest, copies=copies_by_stage)
            for rank in ranks
        ]
        budgets = [device.memory_bytes for device in problem.cluster.devices]
        most = np.stack([table.most_samples(budget, size) for table, budget in zip(footprints, budgets, strict=True)])
        differs = (most[:, 1:] != most[:, :-1]).any(axis=0) | excess  # (in flight - 1, ranges)
        opens = np.concatenate(
            [np.ones((1, len(starts)), bool), differs]
        ).T  # (ranges, in flight): the starts of columns
        range_index, live = np.nonzero(opens)
        columns = np.cumsum(opens).reshape(opens.shape).T - 1
        # The last column is for ranges that do not exist; it is infinite.
        self._columns = np.where(ranges >= 0, columns[:, ranges], len(range_index))
        samples = np.arange(1, size + 1)[:, None]
        costs = []
        for rank in ranks:
            if excess:
                over = footprints[rank].nbytes(samples, live, range_index) - budgets[rank]
                cost = np.maximum(over, 0).astype(float)
            else:
                seconds = _seconds(profile, rank, size, problem.sequence_length)[:, starts, stops]
                cost = np.where(samples > most[rank][live, range_index], np.inf, seconds[:, range_index])
            costs.append(cost)
        self._costs = np.stack(costs, axis=1)  # (B, ranks, columns): of 1 to B samples
        self._slowest: dict[frozenset[int], np.ndarray] = {}
        self._shares: dict[tuple[int, int, tuple[int, ...], int], tuple[int, ...]] = {}
        self._column_costs: dict[tuple[int, int], list[float]] = {}
        # By column and devices: H of a group's first devices, which other groups begin with, too.
        self._tables: dict[tuple[int, tuple[int, ...]], list[float]] = {}

    def groups(self, ranks: Sequence[int], widest: int) -> list[np.ndarray]:
        """Return for each device of an order T of the groups of 1, 2, ... (at most `widest`) devices that begin with
        it, for `of_groups`: (groups, columns + 1).
        """
        orders = [tuple(ranks[first : first + widest]) for first in range(len(ranks))]
        keys = [[frozenset(order[:end]) for end in range(1, len(order) + 1)] for order in orders]
        ends = [max((end for end, key in enumerate(row, 1) if key not in self._slowest), default=0) for row in keys]
        self._find([order[:end] for order, end in zip(orders, ends, strict=True) if end])
        return [np.stack([self._slowest[key] for key in row]) for row in keys]

    def of_groups(self, rows: np.ndarray, in_flight: int) -> np.ndarray:
        """Return T of some groups: (..., L, groups, L) seconds of layers [x, y) at [..., x, :, y - 1], infinite if it
        runs out of memory or x >= y.  rows: (..., groups, columns + 1).
        """
        return rows[..., self._columns[in_flight - 1]].swapaxes(-3, -2)

    def shares(self, start: int, stop: int, ranks: Sequence[int], in_flight: int) -> tuple[int, ...]:
        """Return the samples of each rank for which the group takes T."""
        key = (start, stop, tuple(ranks), in_flight)
        if key not in self._shares:
            column = int(self._columns[in_flight - 1, start, stop - 1])
            costs = [self._costs_of(rank, column) for rank in ranks]
            tables: list[list[float]] = []
            for number, row in enumerate(costs, start=1):
                first = (column, key[2][:number])
                if first not in self._tables:
                    self._tables[first] = _with_device(tables[-1], row) if tables else row
                tables.append(self._tables[first])
            self._shares[key] = _divided(tables, costs)
        return self._shares[key]

    def most_samples(self, start: int, stop: int, in_flight: int, limit_s: float = math.inf) -> list[int]:
        """Return the most samples of a micro-batch that each rank computes within a limit, as far as it has memory.

        A group takes at most so long only if these sum to all samples.
        """
        costs = self._costs[:, :, self._columns[in_flight - 1, start, stop - 1]]
        samples = np.arange(1, len(costs) + 1)[:, None]
        most: list[int] = np.where((costs <= limit_s) & (costs < math.inf), samples, 0).max(axis=0).tolist()
        return most

    def _costs_of(self, rank: int, column: int) -> list[float]:
        """Return the costs of 0, 1, 2, ... samples on a device."""
        key = (rank, column)
        if key not in self._column_costs:
            self._column_costs[key] = [0.0, *self._costs[:, rank, column].tolist()]
        return self._column_costs[key]

    def _find(self, orders: Sequence[Ranks]) -> None:
        """Compute T of the first 1, 2, ... devices of each order: H(B, group) of Eq. 4 by column."""
        orders = sorted(orders, key=len, reverse=True)  # so that those that go on are the first
        width = self._costs.shape[2]
        rows = np.full((len(orders[0]) if orders else 0, len(orders), width + 1), np.inf)
        step = max(1, COLUMNS_AT_ONCE // max(1, len(orders)))
        for first in range(0, width, step):
            block = slice(first, min(width, first + step))
            table = np.empty(0)
            for number, row in enumerate(rows):
                added = [order[number] for order in orders if number < len(order)]
                costs = self._costs[:, added, block]
                table = _extend(table[:, : len(added)], costs) if number else costs
                row[: len(added), block] = table[self.micro_batch_size - 1]
        for place, order in enumerate(orders):
            for end in range(1, len(order) + 1):
                self._slowest.setdefault(frozenset(order[:end]), rows[end - 1, place])


def _seconds(profile: Profile, rank: int, size: int, sequence_length: int) -> np.ndarray:
    """Return (B, L, L): t_f + t_b of 1 to B samples in layers [x, y), at [:, x, y - 1], summed from x on."""
    count = profile.num_layers
    samples = range(1, size + 1)
    rows = np.array([profile.forward_s(rank, b, sequence_length) for b in samples])
    rows += [profile.backward_s(rank, b, sequence_length) for b in samples]
    summed = np.zeros((size, count, count))
    for start in range(count):
        summed[:, start, start:] = np.cumsum(rows[:, start:], axis=1)
    return summed


def _extend(table: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return Eq. 4's next table: of b samples, b - i go to the previous group and i to the added device."""
    result = np.minimum(table, cost)  # i = 0 and i = b
    scratch = np.empty_like(table)
    for i in range(1, len(table)):
        part = scratch[: len(table) - i]
        np.maximum(table[: len(table) - i], cost[i - 1], out=part)
        np.minimum(result[i:], part, out=result[i:])
    return result
