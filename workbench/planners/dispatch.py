"""Divide a micro-batch among the devices of a group so that the slowest is fastest (PAC+, section V-A, Eq. 4)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.profile import Profile
from workbench.planners.memory import boundary_bytes_per_token


def dispatch(costs: Sequence[Sequence[float]], samples: int) -> tuple[float, tuple[int, ...]]:
    """Return H(samples, group) of Eq. 4 and each device's samples, from costs[device][i] of i samples (0 to `samples`).

    An infinite cost is an out-of-memory; the result is infinite, and its shares all 0, if the group cannot take them.
    Of equally good shares, the one that loads the later devices least unevenly is taken.
    """
    tables = [list(costs[0][: samples + 1])]
    for row in costs[1:]:
        before = tables[-1]
        tables.append([min(max(before[b - i], row[i]) for i in range(b + 1)) for b in range(samples + 1)])
    best = tables[-1][samples]
    if not math.isfinite(best):
        return best, (0,) * len(costs)
    shares, left = [], samples
    for device in range(len(costs) - 1, 0, -1):
        row, before = costs[device], tables[device - 1]
        take = min(range(left + 1), key=lambda i: (max(before[left - i], row[i]), before[left - i] + row[i], i))
        shares.append(take)
        left -= take
    return best, (left, *reversed(shares))


class StageTimes:
    """T(x -> y, group) of Eq. 3 for every range of layers at once, by Eq. 4 vectorised over ranges.

    Ranges [x, y) with x < y are numbered by `index`.  Memory depends on how many micro-batches are in flight, so every
    time exists once per `in_flight` from 1 to `max_in_flight`.  A rank that gets no sample costs and holds nothing.
    memory_length: the sequence length that memory must hold, if not the one that is timed.
    excess: minimise the bytes above the budget instead of the seconds (to explain why nothing fits).
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        *,
        micro_batch_size: int,
        sequence_length: int,
        max_in_flight: int,
        memory_length: int | None = None,
        excess: bool = False,
    ) -> None:
        num_layers = profile.num_layers
        self.micro_batch_size = micro_batch_size
        starts, stops = np.triu_indices(num_layers)
        self.starts, self.stops = starts, stops + 1
        self.index = np.full((num_layers + 1, num_layers + 1), -1)
        self.index[self.starts, self.stops] = np.arange(len(starts))
        seconds = [self._seconds(profile, rank, sequence_length) for rank in range(profile.world_size)]
        over = [self._over(profile, cluster, rank, memory_length or sequence_length, max_in_flight) for rank in range(profile.world_size)]
        # When memory is plentiful the in-flight counts do not differ, and are computed once.
        masks = np.stack([(device > 0) for device in over], axis=1).reshape(max_in_flight, -1)
        self._variant = [0]
        for live in range(1, max_in_flight):
            same = not excess and np.array_equal(masks[live], masks[live - 1])
            self._variant.append(self._variant[-1] + (0 if same else 1))
        kept = [self._variant.index(variant) for variant in range(self._variant[-1] + 1)]
        self._costs = []
        for rank in range(profile.world_size):
            chosen = over[rank][kept]
            cost = np.maximum(chosen, 0.0) if excess else np.where(chosen > 0, np.inf, seconds[rank])
            cost[:, 0] = 0.0
            self._costs.append(np.ascontiguousarray(cost.transpose(1, 0, 2)))  # (B + 1, variants, ranges)
        self._tables: dict[frozenset[int], np.ndarray] = {}

    def group(self, ranks: Sequence[int]) -> np.ndarray:
        """Return T of a group: (variants, ranges) seconds, infinite where it runs out of memory."""
        return self._table(tuple(ranks))[self.micro_batch_size]

    def variant(self, in_flight: int) -> int:
        """Return the first index of `group` for a number of micro-batches in flight."""
        return self._variant[in_flight - 1]

    def shares(self, start: int, stop: int, ranks: Sequence[int], in_flight: int) -> tuple[int, ...]:
        """Return the samples of each rank that reach T."""
        where, variant = self.index[start, stop], self.variant(in_flight)
        costs = [self._costs[rank][:, variant, where].tolist() for rank in ranks]
        return dispatch(costs, self.micro_batch_size)[1]

    def _table(self, ranks: tuple[int, ...]) -> np.ndarray:
        key = frozenset(ranks)
        if key not in self._tables:
            if len(ranks) == 1:
                self._tables[key] = self._costs[ranks[0]]
            else:
                self._tables[key] = _extend(self._table(ranks[:-1]), self._costs[ranks[-1]])
        return self._tables[key]

    def _seconds(self, profile: Profile, rank: int, sequence_length: int) -> np.ndarray:
        """Return (B + 1, ranges): t_f + t_b of a range, summed over its layers."""
        layers = profile.layers[rank]
        rows = [
            [layer.forward_s(b, sequence_length) + layer.backward_s(b, sequence_length) for b in range(self.micro_batch_size + 1)]
            for layer in layers
        ]
        summed = np.concatenate([np.zeros((1, self.micro_batch_size + 1)), np.cumsum(np.array(rows), axis=0)])
        return np.maximum(summed[self.stops] - summed[self.starts], 0.0).T

    def _over(self, profile: Profile, cluster: Cluster, rank: int, sequence_length: int, max_in_flight: int) -> np.ndarray:
        """Return (in-flight, B + 1, ranges): the bytes of memory.rank_need above the device's budget."""
        layers = profile.layers[rank]

        def summed(values: list[int]) -> np.ndarray:
            total = np.concatenate([[0], np.cumsum(values)])
            return total[self.stops] - total[self.starts]

        trainable = summed([layer.trainable_bytes for layer in layers])
        optimizer = np.rint(trainable * profile.optimizer_bytes_per_trainable_byte)
        fixed = summed([layer.frozen_bytes for layer in layers]) + 2 * trainable + optimizer
        context = summed([layer.context_bytes_per_token + layer.tap_bytes_per_token for layer in layers])
        workspace = np.array(
            [max(layer.workspace_bytes_per_token for layer in layers[x:y]) for x, y in zip(self.starts, self.stops, strict=True)]
        )
        boundary = np.array([boundary_bytes_per_token(profile, rank, int(x), int(y)) for x, y in zip(self.starts, self.stops, strict=True)])
        tokens = sequence_length * np.arange(self.micro_batch_size + 1)[None, :, None]
        live = np.arange(1, max_in_flight + 1)[:, None, None]
        return fixed + tokens * (live * context + workspace + boundary) - float(cluster.devices[rank].memory_bytes)


def _extend(table: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Return Eq. 4's next table: table[b - i] for the group before, cost[i] for the device that joins."""
    result = table.copy()  # i = 0: nothing for the device that joins
    scratch = np.empty_like(table)
    for i in range(1, len(table)):
        part = scratch[: len(table) - i]
        np.maximum(table[: len(table) - i], cost[i], out=part)
        np.minimum(result[i:], part, out=result[i:])
    return result
