"""Heterogeneity and memory aware HMP planning as printed (Galaxy+, section III-C, Algorithm 1).

What the printed algorithm leaves open, and the choice taken:

1. Line 5 gives fractions of heads, columns and tokens: rounded by largest remainder, the first of equals gets more.
2. "Out-of-memory" (lines 8, 31, 34) is Eq. 8 with P = all layers, both blocks together: while columns move, heads stay.
3. "Overflowing workload" (line 13) is the fewest units or columns whose removal makes the device fit, at most what it has.
4. Free devices (line 9) are those of L with room for one more unit.  What they get (line 15) is rounded by largest remainder; it
   may overload them, which the recursion mends.  They are found once for all devices of line 12.
5. If no device of L is free, nothing is shifted and the partition is returned as it is; line 34 decides.
6. Line 17 lacks a "Return": the recursion's result is returned.
7. Line 16 removes a device from L for good.  Lines 32 and 33 are each given all devices; with one shared list, line 33 could never take
   heads from a device that line 32 emptied of columns.
8. After a rebalance (lines 32-35) P and Q are not set, as `else` (line 36) skips the substitution: all layers keep scheme 1.
   `substitute_after_balance` runs it then too, as what memory is left may still allow it.
9. Line 20 takes the layers from the first on, the encoder's before the decoder's.
10. Line 22 asks every device, also one without tokens: see MemoryRule.full_everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus.memory import HELD, MemoryRule, check_inference, inference_needs
from workbench.planners.galaxy_plus.pricing import price_plan
from workbench.planners.galaxy_plus.times import capacity, checked_ranks, stack_lengths


def algorithm_1(
    profile: InferenceProfile,
    cluster: Cluster,
    *,
    length: int,
    decoder_length: int | None = None,
    ranks: Sequence[int] | None = None,
    memory: MemoryRule = HELD,
    memory_length: int | None = None,
    overlap: bool = True,
    both_ways: bool = False,
    tile_tokens: int = 0,
    substitute: bool = True,
    substitute_after_balance: bool = False,
    capacities: Sequence[float] | None = None,
    method: str = "algorithm_1",
) -> InferencePlan:
    """Return the plan of Algorithm 1; see the module's list for what the paper leaves open.

    substitute: False keeps scheme 1 everywhere (Galaxy).  memory_length: tokens that must fit (default: `length`).
    capacities: V of each of the ranks, instead of Eq. 10.
    Raises PlanError, naming device and bytes, where the printed algorithm exits with Fail (line 35).
    """
    lengths = stack_lengths(profile, length, decoder_length)
    chosen = checked_ranks(profile, cluster, ranks)
    v = [capacity(profile, rank, lengths) for rank in chosen] if capacities is None else list(capacities)
    first = profile.stacks[0]
    parts = _Parts(profile, cluster, chosen, memory, max(length, memory_length or 0), decoder_length)
    parts.units = list(proportional_parts(first.num_units, v))
    parts.columns = list(proportional_parts(first.columns, v))
    parts.shares = tuple(v)
    fits = not parts.out_of_memory(0)
    notes = []
    if not fits:
        everyone = range(len(chosen))
        parts.balance_memory(parts.columns, v, list(everyone))
        parts.balance_memory(parts.units, v, list(everyone))
        check_inference(
            parts.plan(method, 0), profile, cluster, length=parts.length, decoder_length=decoder_length, memory=memory
        )  # lines 34-35
        notes.append("heads and columns were shifted to devices with more memory")
    second = 0
    if substitute and (fits or substitute_after_balance):
        while second < profile.num_layers and not parts.out_of_memory(second + 1):
            second += 1
    found = parts.plan(method, second)
    return InferencePlan(
        method=method,
        paradigm="hybrid",
        ranks=found.ranks,
        units=found.units,
        columns=found.columns,
        shares=found.shares,
        schemes=found.schemes,
        overlap=overlap,
        both_ways=both_ways,
        tile_tokens=tile_tokens,
        length=length,
        predicted_s=price_plan(found, profile, cluster, length=length, decoder_length=decoder_length).total_s,
        notes=tuple(notes),
    )


class _Parts:
    """The partitions while they move."""

    def __init__(
        self,
        profile: InferenceProfile,
        cluster: Cluster,
        ranks: tuple[int, ...],
        memory: MemoryRule,
        length: int,
        decoder_length: int | None,
    ) -> None:
        self.profile, self.cluster, self.ranks, self.memory = profile, cluster, ranks, memory
        self.length, self.decoder_length = length, decoder_length
        self.units: list[int] = []
        self.columns: list[int] = []
        self.shares: tuple[float, ...] = ()

    def plan(self, method: str, second: int) -> InferencePlan:
        return InferencePlan(
            method=method,
            paradigm="hybrid",
            ranks=self.ranks,
            units=tuple(self.units),
            columns=tuple(self.columns),
            shares=self.shares,
            schemes=(2,) * second + (1,) * (self.profile.num_layers - second),
            length=self.length,
        )

    def spare_bytes(self, second: int = 0) -> list[int]:
        needs = inference_needs(
            self.plan("algorithm_1", second), self.profile, length=self.length, decoder_length=self.decoder_length, memory=self.memory
        )
        return [self.memory.budget_bytes(self.cluster, rank) - needs[rank].total_bytes for rank in self.ranks]

    def out_of_memory(self, second: int) -> bool:
        return min(self.spare_bytes(second)) < 0

    def balance_memory(self, part: list[int], v: Sequence[float], left: list[int]) -> None:
        """Shift what overflows in one partition to devices with room (lines 7-17); `part` is changed in place."""
        spare = self.spare_bytes()
        over = [d for d in left if spare[d] < 0]
        free = [d for d in left if spare[d] >= self._piece_bytes(part)]
        if not over or not free:
            return
        for d in over:
            waiting = self._overflow(part, d)
            for f, count in zip(free, proportional_parts(waiting, [v[f] for f in free]), strict=True):
                part[f] += count
            part[d] -= waiting
            left.remove(d)
        self.balance_memory(part, v, left)

    def _piece_bytes(self, part: list[int]) -> int:
        """Return the bytes of one unit or one column in all layers under scheme 1."""
        stacks = self.profile.stacks
        if part is self.columns:
            return sum(shape.num_layers * shape.column_bytes * shape.columns for shape in stacks) // stacks[0].columns
        return sum(shape.num_layers * shape.attention_bytes for shape in stacks) // stacks[0].num_units

    def _overflow(self, part: list[int], d: int) -> int:
        """Return the fewest pieces that device d must give for its memory to be enough, at most all it has."""
        spare = self.spare_bytes()[d]
        return min(part[d], -(spare // self._piece_bytes(part))) if spare < 0 else 0
