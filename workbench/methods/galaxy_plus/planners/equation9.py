"""Predict the seconds of many hybrid plans quickly, by Eq. 6 + Eq. 7, the objective of Eq. 9 (Galaxy+, III-C)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.inference import InferencePlan
from workbench.core.proportions import proportional_parts
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.terms import (
    LayerTimes,
    Line,
    air_slopes,
    all_gather_s,
    ends_s,
    hop_lines,
    num_blocks,
    ring_s,
    slowest_s,
    star_s,
)


class Cut(NamedTuple):
    """A hybrid plan in the search: the partitions, and the number of scheme-2 layers in each stack, which come first in
    the stack.
    """

    ranks: Ranks
    units: tuple[int, ...]
    columns: tuple[int, ...]
    shares: tuple[float, ...]
    second: tuple[int, ...]


def cut_of(plan: InferencePlan, profile: InferenceProfile) -> Cut:
    """Return the plan's cut."""
    ends = list(accumulate(shape.num_layers for shape in profile.stacks))
    second = tuple(plan.schemes[first:last].count(2) for first, last in zip([0, *ends], ends, strict=False))
    return Cut(plan.ranks, plan.units, plan.columns, plan.shares, second)


class Equation9:
    """Predicts the time of hybrid plans of one profile and cluster by Eq. 6 + Eq. 7; caches each partition, as a move
    changes only one.
    """

    def __init__(self, profile: InferenceProfile, cluster: Cluster, lengths: Sequence[int]) -> None:
        self.profile, self.cluster, self.lengths = profile, cluster, tuple(lengths)
        self.lines = cache(lambda rank, stack: LayerTimes(profile, rank, stack, self.lengths).lines())
        self._ring_lines = cache(self._of_ring)
        self._mha_s, self._tensor_s, self._tokens_s = (
            cache(self._of_units),
            cache(self._of_columns),
            cache(self._of_tokens),
        )

    def __call__(self, cut: Cut) -> float:
        """Return the seconds of all layers: Eq. 9."""
        mha, tensor, tokens = (
            self._mha_s(cut.ranks, cut.units),
            self._tensor_s(cut.ranks, cut.columns),
            self._tokens_s(cut.ranks, cut.shares),
        )
        total_s = 0.0
        for stack, (shape, q) in enumerate(zip(self.profile.stacks, cut.second, strict=True)):
            p, (sequence, con, gather, scatter) = shape.num_layers - q, tokens[stack]
            rings = shape.num_layers * num_blocks(shape) - q
            total_s += (
                shape.num_layers * (mha[stack] + con) + p * tensor[stack] + q * sequence + rings * (gather + scatter)
            )
        return total_s

    def total_s(self, cut: Cut) -> float:
        """Return the seconds of all layers and of both ends: embedding, head, and the transfer of tokens to their
        devices and back, which Eq. 6-7 leave out.
        """
        return self(cut) + self.ways_s(cut) + ends_s(self.profile, cut.ranks[0], self.lengths)

    def ways_s(self, cut: Cut) -> float:
        """Return the seconds to send tokens to their devices and back, and to gather the first stack's output for a
        second.
        """
        total_s = 0.0
        for shape, length in zip(self.profile.stacks, self.lengths, strict=True):
            total_s += star_s(cut.ranks, self.cluster, proportional_parts(length, cut.shares), shape.hidden_bytes)
            if shape.has_cross_attention:
                first = proportional_parts(self.lengths[0], cut.shares)
                total_s += all_gather_s(self.cluster, cut.ranks, first, self.profile.stacks[0].hidden_bytes)
        return total_s

    def _of(self, part: str, ranks: Ranks, stack: int) -> list[Line]:
        return [self.lines(rank, stack)[part] for rank in ranks]

    def _of_units(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MHA) of a layer of each stack."""
        seconds = []
        for stack, shape in enumerate(self.profile.stacks):
            units = proportional_parts(shape.num_units, parts)
            blocks = ("own", "cross")[: num_blocks(shape) - 1]
            seconds.append(sum(slowest_s(self._of(block, ranks, stack), units) for block in blocks))
        return seconds

    def _of_columns(self, ranks: Ranks, parts: tuple[int, ...]) -> list[float]:
        """Return T(MLP), tensor parallel, of a layer of each stack."""
        shapes = enumerate(self.profile.stacks)
        return [
            slowest_s(self._of("tensor", ranks, stack), proportional_parts(shape.columns, parts))
            for stack, shape in shapes
        ]

    def _of_tokens(self, ranks: Ranks, shares: tuple[float, ...]) -> list[tuple[float, float, float, float]]:
        """Return T(MLP), sequence parallel, T(CON), T_AG and T_RS of a layer of each stack."""
        seconds = []
        for stack, length in enumerate(self.lengths):
            tokens = proportional_parts(length, shares)
            sequence, con, hops, adding, airs = self._ring_lines(ranks, stack)
            gather_s, scatter_s = (sum(map(mul, slopes, tokens)) for slopes in airs)
            seconds.append(
                (
                    slowest_s(sequence, tokens),
                    slowest_s(con, tokens),
                    max(ring_s(hops, tokens, 0), gather_s),
                    max(ring_s(adding, tokens, 1), scatter_s),
                )
            )
        return seconds

    def _of_ring(
        self, ranks: Ranks, stack: int
    ) -> tuple[list[Line], list[Line], list[Line], list[Line], tuple[list[float], list[float]]]:
        """Return the lines over tokens of the network, the connections, the hops, and the hops with the receivers'
        additions; and of both collectives the seconds of each token on shared air.
        """
        sequence, con, adds = (self._of(part, ranks, stack) for part in ("sequence", "con", "add"))
        nbytes = self.profile.stacks[stack].hidden_bytes
        gather, scatter = (air_slopes(self.cluster, ranks, nbytes, shift=shift) for shift in (0, 1))
        hops, adding = (hop_lines(self.cluster, ranks, nbytes, added) for added in (None, adds))
        return sequence, con, hops, adding, (gather, scatter)
