"""Times and bytes of every partition looked up instead of computed: what the search of planner.py asks thousands of times (Eq. 5-8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.memory import MemoryRule
from workbench.planners.galaxy_plus.times import MOST_IN_LISTS, attention_s, con_s, mlp_sequence_s, mlp_tensor_s, num_blocks, ring_chain_s

Line = tuple[float, float]
"""Fixed seconds and seconds for each more, of a time that is 0 for nothing."""
Ranks = tuple[int, ...]
Parts = tuple[int, ...]


class Tables:
    """One model, cluster, number of tokens and memory rule.  Partitions are the first stack's; a second is cut in proportion."""

    def __init__(
        self, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int], memory: MemoryRule, memory_lengths: Sequence[int]
    ) -> None:
        self.profile, self.cluster, self.lengths, self.memory = profile, cluster, tuple(lengths), memory
        self.stacks = profile.stacks
        self.layers = tuple(shape.num_layers for shape in self.stacks)
        first = self.stacks[0]
        self.num_units, self.num_columns, self.num_tokens = first.num_units, first.columns, self.lengths[0]
        self.unlike = any(
            (shape.num_units, shape.columns, n) != (first.num_units, first.columns, self.lengths[0])
            for shape, n in zip(self.stacks, self.lengths, strict=True)
        )
        self.unit_bytes = sum(shape.num_layers * shape.attention_bytes for shape in self.stacks) / first.num_units
        self.column_bytes = tuple(shape.feed_forward_bytes / first.columns for shape in self.stacks)
        self._working = profile.working_bytes_per_token * max(memory_lengths) if memory.working else 0
        self._layer_bytes = sum(shape.num_layers * shape.layer_bytes for shape in self.stacks) if memory.layers else 0
        self._attention: dict[int, list[list[list[float]]]] = {}
        self._lines: dict[tuple[str, int, int], Line] = {}
        self._hops: dict[tuple[int, int, int], Line] = {}
        self._links: dict[tuple[Ranks, int], list[tuple[list[Line], float, float]]] = {}
        self._tokens: dict[tuple[Ranks, Parts], list[tuple[float, float, float]]] = {}

    def attention(self, rank: int) -> list[list[list[float]]]:
        """Return [stack][block][units]: seconds of one layer's attention blocks."""
        if rank not in self._attention:
            found = []
            for stack, shape in enumerate(self.stacks):
                each = [attention_s(self.profile, rank, stack, units, self.lengths) for units in range(shape.num_units + 1)]
                found.append([list(block) for block in zip(*each, strict=True)])
            self._attention[rank] = found
        return self._attention[rank]

    def line(self, what: str, rank: int, stack: int) -> Line:
        """Return the line of 'tensor' over columns, or of 'sequence', 'con', 'add' over tokens."""
        key = what, rank, stack
        if key not in self._lines:
            profile = self.profile
            times: dict[str, Callable[[int], float]] = {
                "tensor": lambda count: mlp_tensor_s(profile, rank, stack, count, self.lengths),
                "sequence": lambda count: mlp_sequence_s(profile, rank, stack, count),
                "con": lambda count: con_s(profile, rank, stack, count),
                "add": lambda count: profile.costs[rank][stack].seconds("ADD", count),
            }
            most = self.stacks[stack].columns if what == "tensor" else self.lengths[stack]
            low, high = times[what](1), times[what](most)
            slope = (high - low) / (most - 1) if most > 1 else 0.0
            self._lines[key] = (low - slope, slope)
        return self._lines[key]

    def cut(self, stack: int, parts: Parts, total: int) -> Parts:
        """Return a partition of the first stack as that of another."""
        return parts if sum(parts) == total else proportional_parts(total, parts)

    def rings(self, second: Sequence[int]) -> list[int]:
        """Return the pairs of all-gather and reduce-scatter in each stack with so many scheme-2 layers."""
        return [layers * num_blocks(shape) - q for shape, layers, q in zip(self.stacks, self.layers, second, strict=True)]

    def units_s(self, ranks: Ranks, units: Parts) -> float:
        """Return the attention's seconds in all layers."""
        total = 0.0
        for stack, shape in enumerate(self.stacks):
            parts = self.cut(stack, units, shape.num_units)
            tables = [self.attention(rank)[stack] for rank in ranks]
            for block in range(len(tables[0])):
                total += shape.num_layers * max(table[block][count] for table, count in zip(tables, parts, strict=True))
        return total

    def columns_s(self, ranks: Ranks, columns: Parts, second: Sequence[int]) -> float:
        """Return the seconds of the tensor-parallel feed-forward networks."""
        total = 0.0
        for stack, shape in enumerate(self.stacks):
            if second[stack] < shape.num_layers:
                parts = self.cut(stack, columns, shape.columns)
                lines = (self.line("tensor", rank, stack) for rank in ranks)
                slowest = max(line[0] + line[1] * count if count else 0.0 for line, count in zip(lines, parts, strict=True))
                total += (shape.num_layers - second[stack]) * slowest
        return total

    def tokens_parts_s(self, ranks: Ranks, tokens: Parts) -> list[tuple[float, float, float]]:
        """Return, for a layer of each stack: sequence-parallel feed-forward network, connections, one all-gather and reduce-scatter."""
        key = ranks, tokens
        found = self._tokens.get(key)
        if found is None:
            found = []
            for stack in range(len(self.stacks)):
                parts = self.cut(stack, tokens, self.lengths[stack])
                sequence = con = 0.0
                for rank, count in zip(ranks, parts, strict=True):
                    if count:
                        line, other = self.line("sequence", rank, stack), self.line("con", rank, stack)
                        sequence = max(sequence, line[0] + line[1] * count)
                        con = max(con, other[0] + other[1] * count)
                found.append((sequence, con, self.ring_s(ranks, parts, stack)))
            if len(self._tokens) > 200_000:
                self._tokens.clear()
            self._tokens[key] = found
        return found

    def tokens_s(self, ranks: Ranks, tokens: Parts, second: Sequence[int]) -> float:
        """Return the seconds of connections, sequence-parallel feed-forward networks and collectives in all layers."""
        total = 0.0
        rows = zip(self.tokens_parts_s(ranks, tokens), self.layers, second, self.rings(second), strict=True)
        for (sequence, con, ring), layers, q, rings in rows:
            total += q * sequence + layers * con + rings * ring
        return total

    def hop(self, source: int, destination: int, stack: int) -> Line:
        """Return the line over tokens of a message from rank to rank."""
        key = source, destination, stack
        if key not in self._hops:
            link = self.cluster.link(source, destination)
            self._hops[key] = link.latency_s, self.stacks[stack].hidden_bytes / link.bytes_per_s
        return self._hops[key]

    def ring_s(self, ranks: Ranks, tokens: Parts, stack: int) -> float:
        """Return T_AG + T_RS of one stack's layer (times.all_gather_s, times.reduce_scatter_s)."""
        n = len(ranks)
        if n < 2:
            return 0.0
        hops = [self.hop(rank, ranks[(i + 1) % n], stack) for i, rank in enumerate(ranks)]
        adds = [self.line("add", ranks[(i + 1) % n], stack) for i in range(n)]
        if n > MOST_IN_LISTS:
            sent, hop, add = np.array(tokens), np.array(hops), np.array(adds)
            gather = np.where(sent > 0, hop[:, :1] + hop[:, 1:] * sent, 0.0)
            return ring_chain_s(gather, 0) + ring_chain_s(gather + np.where(sent > 0, add[:, :1] + add[:, 1:] * sent, 0.0), 1)
        gathered = [[hop[0] + hop[1] * count if count else 0.0 for count in tokens] for hop in hops]
        summed = [
            [seconds + add[0] + add[1] * count if count else 0.0 for seconds, count in zip(row, tokens, strict=True)]
            for row, add in zip(gathered, adds, strict=True)
        ]
        return ring_chain_s(gathered, 0) + ring_chain_s(summed, 1)

    def ring_bound_s(self, ranks: Ranks, tokens: Parts, stack: int) -> float:
        """Return a lower bound of ring_s, exact with equal links: the busiest link's time, or the slowest tile's journey."""
        n = len(ranks)
        if n < 2:
            return 0.0
        key = ranks, stack
        if key not in self._links:
            hops = [self.hop(rank, ranks[(i + 1) % n], stack) for i, rank in enumerate(ranks)]
            adds = [self.line("add", ranks[(i + 1) % n], stack) for i in range(n)]
            summed = [(hop[0] + add[0], hop[1] + add[1]) for hop, add in zip(hops, adds, strict=True)]
            # The tile of position i never takes the link that leads to i in an all-gather, nor the one from i in a reduce-scatter.
            self._links[key] = [
                ([*lines[offset:], *lines[:offset]], sum(line[0] for line in lines), sum(line[1] for line in lines))
                for lines, offset in ((hops, n - 1), (summed, 0))
            ]
        total, senders = sum(tokens), n - tokens.count(0)
        bound = 0.0
        for lines, latency, each in self._links[key]:
            slowest = 0.0
            for count, (fixed, slope) in zip(tokens, lines, strict=True):
                busy = fixed * (senders - (count > 0)) + slope * (total - count)
                slowest = max(slowest, busy, latency - fixed + (each - slope) * count if count else 0.0)
            bound += slowest
        return bound

    def tokens_bound_s(self, ranks: Ranks, tokens: Parts, second: Sequence[int]) -> float:
        """Return a lower bound of tokens_s, found in less time."""
        total = 0.0
        for stack, (layers, q, rings) in enumerate(zip(self.layers, second, self.rings(second), strict=True)):
            parts = self.cut(stack, tokens, self.lengths[stack])
            total += rings * self.ring_bound_s(ranks, parts, stack)
            total += layers * max(self.line("con", rank, stack)[1] * count for rank, count in zip(ranks, parts, strict=True))
            if q:
                total += q * max(self.line("sequence", rank, stack)[1] * count for rank, count in zip(ranks, parts, strict=True))
        return total

    def seconds(self, ranks: Ranks, units: Parts, columns: Parts, tokens: Parts, second: Sequence[int]) -> float:
        """Return Eq. 9: T_scheme-1 + T_scheme-2."""
        return self.units_s(ranks, units) + self.columns_s(ranks, columns, second) + self.tokens_s(ranks, tokens, second)

    def room(self, ranks: Ranks) -> list[float]:
        """Return the bytes that each position has for attention and feed-forward weights."""
        # Rounding a second stack's cut may cost a unit and a column more.
        slack = self.unit_bytes + sum(self.column_bytes) * max(self.layers) if self.unlike else 0
        return [
            self.memory.budget_bytes(self.cluster, rank)
            - self._working
            - self._layer_bytes
            - self.memory.ends_bytes(self.profile, position)
            - slack
            for position, rank in enumerate(ranks)
        ]

    def feed_forward_bytes(self, second: Sequence[int]) -> tuple[float, float, float]:
        """Return the bytes of a column where there are tokens, of a column where there are none, and of all scheme-2 layers in full."""
        first = sum((layers - q) * nbytes for layers, q, nbytes in zip(self.layers, second, self.column_bytes, strict=True))
        other = sum(q * nbytes for q, nbytes in zip(second, self.column_bytes, strict=True))
        return first, first + other, other * self.num_columns

    def holds(self, tokens: Parts) -> tuple[bool, ...]:
        """Return which positions hold scheme-2 layers' feed-forward networks in full."""
        return tuple(self.memory.full_everywhere or count > 0 for count in tokens)

    def plan(self, method: str, ranks: Ranks, units: Parts, columns: Parts, tokens: Parts, second: Sequence[int]) -> InferencePlan:
        """Return the plan; scheme 2 goes to the first layers of each stack."""
        schemes: list[int] = []
        for layers, q in zip(self.layers, second, strict=True):
            schemes += [2] * q + [1] * (layers - q)
        return InferencePlan(
            method=method,
            paradigm="hybrid",
            ranks=ranks,
            units=units,
            columns=columns,
            shares=tuple(float(count) for count in tokens),
            schemes=tuple(schemes),
            length=self.num_tokens,
        )
