"""Random directions drawn from seeds: normal, of signs, or of low rank (P-RGE, Algorithm 1, line 6; FZOO; LOZO, section
4).

A query's direction depends only on its seed.  So it is the same wherever it is drawn, all at once or one layer at a
time.  Definition: one torch.Generator for each query; values are drawn parameter after parameter in stack order, each
in pieces of at most PIECE values.  On other kinds of processors the last bit may differ, because logarithm and cosine
do.

Low rank: a matrix (m, n) gets U V^T with normal U (m, r) and V (n, r), a vector normal values.  V is drawn from the
subspace's seed, which stays the same for some steps (LOZO's lazy sampling); the queries of a step share it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.methods.p_rge.estimator_table import DirectionKind

PIECE = 1 << 20
"""Number of values drawn at a time: small enough for the cache, and full fine-tuning needs no noise as large as a word
embedding."""

Shape = tuple[int, ...]


class Directions(NamedTuple):
    """How a step's directions are drawn from the seeds of its queries.

    rank: r of low-rank directions.  subspace: the seed of their V.  momentum: the share of former steps in a step
    along them; None: a step has no momentum.
    """

    kind: DirectionKind = "normal"
    rank: int = 0
    subspace: int = 0
    momentum: float | None = None

    def draw(self, seed: int, preceding: Sequence[Shape] = ()) -> Draw:
        """Return the draw of a query's direction.  preceding: shapes of the parameters before the first to be drawn."""
        draw = Draw(self, seed)
        for shape in preceding:
            draw.skip(shape)
        return draw


NORMAL = Directions()


class Draw:
    """A query's direction, drawn parameter after parameter."""

    def __init__(self, directions: Directions, seed: int) -> None:
        self._directions = directions
        self._own = torch.Generator().manual_seed(seed)
        self._shared = torch.Generator().manual_seed(directions.subspace)

    def pieces(self, shape: Shape) -> Iterator[tuple[slice, Tensor]]:
        """Yield the values of the next parameter: the slice of each piece in its flat values, and the piece (float32),
        which the next one overwrites.
        """
        if self._is_product(shape):
            yield from self._product(shape)
            return
        size = _size(shape)
        scratch = torch.empty(min(size, PIECE))
        for start in range(0, size, PIECE):
            piece = scratch[: min(PIECE, size - start)]
            yield slice(start, start + len(piece)), self._fill(piece)

    def skip(self, shape: Shape) -> None:
        """Go past the next parameter."""
        if self._is_product(shape):
            self._factors(shape)
            return
        for _ in self.pieces(shape):
            pass

    def factors(self, shape: Shape) -> tuple[Tensor, Tensor | None]:
        """Return U (m, r) and V (n, r) of the next parameter (m, n); of a vector its values, and None."""
        if self._is_product(shape):
            return self._factors(shape)
        drawn = torch.empty(_size(shape))
        for place, piece in self.pieces(shape):
            drawn[place] = piece
        return drawn.view(shape), None

    def fill(self, out: Tensor, shapes: Sequence[Shape]) -> None:
        """Draw the values of the next parameters into out (sum of their sizes,), float32."""
        for values, shape in zip(out.split([_size(shape) for shape in shapes]), shapes, strict=True):
            if self._is_product(shape):
                for place, piece in self._product(shape):
                    values[place] = piece
            else:
                for piece in values.split(PIECE):
                    self._fill(piece)

    def _is_product(self, shape: Shape) -> bool:
        return self._directions.kind == "low_rank" and len(shape) == 2

    def _fill(self, piece: Tensor) -> Tensor:
        if self._directions.kind == "rademacher":
            return piece.random_(0, 2, generator=self._own).mul_(2).sub_(1)
        return piece.normal_(generator=self._own)

    def _factors(self, shape: Shape) -> tuple[Tensor, Tensor]:
        rows, columns = shape
        u = torch.empty(rows, self._directions.rank).normal_(generator=self._own)
        return u, torch.empty(columns, self._directions.rank).normal_(generator=self._shared)

    def _product(self, shape: Shape) -> Iterator[tuple[slice, Tensor]]:
        u, v = self._factors(shape)
        step = max(1, PIECE // shape[1])
        for start in range(0, shape[0], step):
            rows = torch.zeros(len(u[start : start + step]), shape[1])
            for index in range(self._directions.rank):
                rows.addcmul_(u[start : start + step, index, None], v[:, index])
            yield slice(start * shape[1], start * shape[1] + rows.numel()), rows.view(-1)


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()
