"""Momentum of steps along low-rank directions (LOZO-M): Chen et al., arXiv:2410.07698, section 4.

Of a matrix (m, n) only N (m, r) is stored, next to the seed of V:
N <- beta N + (1 - beta) / q sum of g_i U_i, and theta <- theta - learning_rate N V^T.  When the subspace changes from V
to W, N V^T V / n -> N V^T W / n is the same momentum in the new one, because W^T W / n is nearly the identity.  A
vector has no factors, so its momentum has the vector's size.  All of it follows from the seeds and scalars of a log.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.methods.p_rge.zeroth_order.directions import Directions, Draw, Shape


class LowRankMomentum:
    """The momentum of all parameters of a stage.

    preceding: shapes of the parameters of earlier pipeline stages, as Directions.draw takes them.  factors: N of each
    matrix, or the momentum of a vector; empty before the first step.
    """

    def __init__(self, shapes: Sequence[Shape], preceding: Sequence[Shape]) -> None:
        self._shapes, self._preceding = tuple(shapes), tuple(preceding)
        self._directions = Directions()
        self.factors: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes that remain between steps."""
        return sum(4 * factor.numel() for factor in self.factors)

    def step(self, seeds: Sequence[int], gradients: Sequence[float], directions: Directions) -> list[Tensor]:
        """Take up a step; return the direction of each parameter, in its shape.

        gradients: g_i, the factor of each seed's direction.
        """
        assert directions.momentum is not None
        if not self.factors:
            self._directions = directions
        before = self._shared(self._directions)
        now = before if directions == self._directions else self._shared(directions)
        means = self._means(seeds, gradients, directions)
        if not self.factors:
            self.factors = [torch.zeros_like(mean) for mean in means]
        moves = []
        for index, (mean, old, new) in enumerate(zip(means, before, now, strict=True)):
            factor = self.factors[index]
            if old is not None and new is not None and old is not new:
                factor = factor @ (old.T @ new) / len(new)
            factor = directions.momentum * factor + (1 - directions.momentum) * mean
            self.factors[index] = factor
            moves.append(factor if new is None else factor @ new.T)
        self._directions = directions
        return moves

    def _shared(self, directions: Directions) -> list[Tensor | None]:
        """Return V of every matrix, None for a vector."""
        draw = directions.draw(0, self._preceding)
        return [draw.factors(shape)[1] for shape in self._shapes]

    def _means(self, seeds: Sequence[int], gradients: Sequence[float], directions: Directions) -> list[Tensor]:
        """Return the mean of g_i U_i over the seeds, of every parameter."""
        draws: list[Draw] = [directions.draw(seed, self._preceding) for seed in seeds]
        means = []
        for shape in self._shapes:
            factors = [draw.factors(shape)[0] for draw in draws]
            means.append(sum_of(factors, gradients) / len(seeds))
        return means


def sum_of(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return the sum of tensors, each times its factor, in their order."""
    total = torch.zeros_like(tensors[0])
    for tensor, factor in zip(tensors, factors, strict=True):
        total.add_(tensor, alpha=factor)
    return total
