"""Standard normal noise from a query's seed: the same values whoever draws them, all at once or a layer at a time (Algorithm 1, line 6).

The definition: one torch.Generator for each query, normals drawn parameter after parameter in stack order, each in pieces of at most
2^20 values.  On processors of another kind the last bit may differ, as logarithm and cosine do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

PIECE = 1 << 20
"""Values drawn at a time: what is in flight stays in the cache, and full parameters need no noise as large as a word embedding."""


def generator_of(seed: int) -> torch.Generator:
    """Return a query's generator at its beginning."""
    return torch.Generator().manual_seed(seed)


def pieces(generator: torch.Generator, size: int) -> Iterator[tuple[slice, Tensor]]:
    """Return the noise of a parameter of `size` values: where each piece belongs, and the piece, which the next overwrites."""
    scratch = torch.empty(min(size, PIECE))
    for at in range(0, size, PIECE):
        piece = scratch[: min(PIECE, size - at)]
        yield slice(at, at + len(piece)), piece.normal_(generator=generator)


def fill(out: Tensor, generator: torch.Generator, sizes: Sequence[int]) -> None:
    """Draw the noise of the next parameters into out (sum of sizes,), float32."""
    at = 0
    for size in sizes:
        for first in range(at, at + size, PIECE):
            out[first : min(first + PIECE, at + size)].normal_(generator=generator)
        at += size


def skip(generator: torch.Generator, sizes: Sequence[int]) -> None:
    """Draw the noise of the next parameters and forget it: another device holds them."""
    for size in sizes:
        for _ in pieces(generator, size):
            pass
