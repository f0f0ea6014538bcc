"""The perturbed copies of theta with which the passes of a step compute, made layer by layer (P-RGE, section 3.2)."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from workbench.methods.p_rge.options import Execution
from workbench.methods.p_rge.zeroth_order.directions import Draw, Shape
from workbench.methods.p_rge.zeroth_order.step_log import ZerothOrderConfig
from workbench.methods.p_rge.zeroth_order.trainables import Trainables

Part = tuple[int, int]
"""(index of the query among the requested ones; which of its perturbed parts)."""


def passes_of(execution: Execution, num_queries: int, perturbed: int = 2) -> list[list[Part]]:
    """Return the parts of each pass of a step.  All passes have the same number of parts.

    perturbed: the perturbed copies of theta for each query.
    """
    queries, each = range(num_queries), range(perturbed)
    if execution == "sequential":
        return [[(query, part)] for query in queries for part in each]
    if execution == "outer":
        return [[(query, part) for query in queries] for part in each]
    if execution == "inner":
        return [[(query, part) for part in each] for query in queries]
    return [[(query, part) for query in queries for part in each]]


class Perturbation:
    """theta + sign * epsilon * direction for each part of a group of passes that go through each layer together.

    queries: the number of each query in the step.  passes: the parts of each pass.  config.copies: 'kept' makes all
    copies at once (a value of theta for each part in memory) instead of a layer's when the first pass reaches it.  A
    query's direction is drawn once for all passes.
    With the estimator 'jvp' a copy is theta, and the direction its tangent.
    """

    def __init__(
        self,
        trainables: Trainables,
        config: ZerothOrderConfig,
        step: int,
        queries: Sequence[int],
        passes: Sequence[Sequence[Part]],
        dtype: torch.dtype,
    ) -> None:
        assert trainables.flat is not None
        self._trainables, self._theta, self._epsilon = trainables, trainables.flat, config.epsilon
        self._kept, self._dtype, self._is_dual = config.copies == "kept", dtype, config.rule.tangent
        self._sizes = [len(parts) for parts in passes]
        seeds, directions = config.seeds(step, queries), config.directions(step)
        self._places: list[tuple[Draw | None, list[tuple[int, int, int]]]] = []
        for index in sorted({query for parts in passes for query, _ in parts}):
            places = [
                (number, row, config.rule.sign(queries[index], part))
                for number, parts in enumerate(passes)
                for row, (query, part) in enumerate(parts)
                if query == index
            ]
            draws = any(sign for _, _, sign in places)
            self._places.append((trainables.draw(seeds[index], directions) if draws else None, places))
        self._ranges = trainables.ranges
        width = (
            trainables.num_values
            if self._kept
            else max((last - first for first, last, _ in self._ranges.values()), default=0)
        )
        self._scratch = torch.empty(width)
        self._copies = [torch.empty(size, width, dtype=dtype) for size in self._sizes]
        self._tangents = [torch.empty_like(copies) for copies in self._copies] if self._is_dual else []
        self._layer: int | None = None
        if self._kept:
            self._make(0, width, trainables.shapes)

    def enter(self, number: int, layer: int) -> None:
        """Bind a pass's copies for a layer.  Layers come in stack order; the first pass to reach one makes the copies
        for all passes.
        """
        if self._kept:
            self._bind(number, 0)
            return
        first, last, shapes = self._ranges.get(layer, (0, 0, ()))
        if layer != self._layer:
            self._make(first, last, shapes)
            self._layer = layer
        self._bind(number, first)

    def _bind(self, number: int, first: int) -> None:
        copies = self._copies[number]
        if self._is_dual:
            copies = forward_ad.make_dual(copies.clone(), self._tangents[number].clone())
        self._trainables.bind(copies, first)

    def _make(self, first: int, last: int, shapes: Sequence[Shape]) -> None:
        width = last - first
        drawn, theta = self._scratch[:width], self._theta[first:last]
        for draw, places in self._places:
            if draw is None:
                drawn.zero_()
            else:
                draw.fill(drawn, shapes)
            for number, row, sign in places:
                copy = self._copies[number][row, :width]
                if self._is_dual:
                    copy.copy_(theta)
                    self._tangents[number][row, :width] = drawn
                else:
                    torch.add(theta, drawn, alpha=sign * self._epsilon, out=copy)


@cache
def _load_rules() -> None:
    """Load PyTorch's rules of derivatives before they are needed, because it warns of itself while it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")


@contextmanager
def differentiating() -> Iterator[None]:
    """Carry derivatives along with values, in forward mode (Baydin et al., section 2.1).

    The attention is computed by its definition, because the fused kernels carry no derivatives.
    """
    _load_rules()
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH), torch.enable_grad():
        yield
