"""Perturbed copies of theta for a group of passes: of all its values at once, or of one layer after another (P-RGE, section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.models.zeroth_order import noise
from workbench.models.zeroth_order.config import Execution
from workbench.models.zeroth_order.trainables import Trainables

Part = tuple[int, int]
"""(query, its number among those asked for; sign, 1 or -1)."""


def passes_of(execution: Execution, num_queries: int) -> list[list[Part]]:
    """Return which parts each pass of a step computes: all passes have as many parts."""
    queries = range(num_queries)
    if execution == "sequential":
        return [[(query, sign)] for query in queries for sign in (1, -1)]
    if execution == "outer":
        return [[(query, sign) for query in queries] for sign in (1, -1)]
    if execution == "inner":
        return [[(query, 1), (query, -1)] for query in queries]
    return [[(query, sign) for query in queries for sign in (1, -1)]]


class Perturbation:
    """theta + sign * epsilon * noise for each part of a group of passes that go through each layer together.

    seeds: of the queries.  passes: their parts.  kept: make all copies at once (2q d values in memory) instead of a layer's from the
    master copy when the first pass comes to it.  A query's noise is drawn once, whatever passes need it.
    """

    def __init__(
        self,
        trainables: Trainables,
        seeds: Sequence[int],
        passes: Sequence[Sequence[Part]],
        *,
        epsilon: float,
        dtype: torch.dtype,
        kept: bool,
    ) -> None:
        assert trainables.flat is not None
        self._trainables, self._theta, self._epsilon, self._kept = trainables, trainables.flat, epsilon, kept
        used = sorted({query for parts in passes for query, _ in parts})
        self._generators = {query: trainables.generator(seeds[query]) for query in used}
        self._places = {
            query: [(number, row, sign) for number, parts in enumerate(passes) for row, (own, sign) in enumerate(parts) if own == query]
            for query in used
        }
        self._ranges = trainables.ranges
        width = trainables.num_values if kept else max((last - first for first, last, _ in self._ranges.values()), default=0)
        self._scratch = torch.empty(width)
        self._copies = [torch.empty(len(parts), width, dtype=dtype) for parts in passes]
        self._layer: int | None = None
        if kept:
            self._make(0, width, trainables.sizes)

    def enter(self, number: int, layer: int) -> None:
        """Bind what a pass computes a layer with.  Layers come in stack order; the first pass to come makes the copies of all."""
        if self._kept:
            self._trainables.bind(self._copies[number])
            return
        first, last, sizes = self._ranges.get(layer, (0, 0, ()))
        if layer != self._layer:
            self._make(first, last, sizes)
            self._layer = layer
        self._trainables.bind(self._copies[number], first)

    def _make(self, first: int, last: int, sizes: Sequence[int]) -> None:
        width = last - first
        drawn, theta = self._scratch[:width], self._theta[first:last]
        for query, generator in self._generators.items():
            noise.fill(drawn, generator, sizes)
            for number, row, sign in self._places[query]:
                torch.add(theta, drawn, alpha=sign * self._epsilon, out=self._copies[number][row, :width])
