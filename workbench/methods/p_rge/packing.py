"""Decide when a batch is computed without padding, with several rows packed end to end.  Pure, so that all devices
decide the same.
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_SAVING = 0.1
"""The share of the work that packing must save, because rows of equal length use the kernels' faster path without a
mask."""
_LINEAR = 6
"""A layer's projections take 24 width^2 operations per token, its attention 4 width per token of the row: equal at 6
width tokens."""

Packs = tuple[tuple[int, ...], ...]


def packs_of(lengths: Sequence[int], padded: int, width: int) -> Packs | None:
    """Return the rows of each pack, or None if it is faster to compute the rows one by one, padded to `padded` tokens.

    Projections take less time without padding, but attention compares all tokens of a pack, also those of different
    rows.  Therefore short rows make one pack and long rows several, each padded to the longest pack.
    lengths: the rows' lengths in tokens.  width: hidden size of the model; 0 if the model cannot compute packs.
    """
    if not width:
        return None
    total, longest = sum(lengths), max(lengths)
    # A lower bound on the work of this many packs: numbers of packs whose bound is too high are skipped.
    least = sorted(
        (_work(count, max(longest, -(-total // count)), width), count) for count in range(1, len(lengths) + 1)
    )
    best: tuple[int, int, Packs] | None = None
    for bound, count in least:
        if best is not None and bound > best[0]:
            break
        packs = _filled(lengths, count)
        candidate = (_work(count, pack_length(packs, lengths), width), count, packs)
        best = candidate if best is None else min(best, candidate)
    assert best is not None
    worth = (1 - LEAST_SAVING) * len(lengths) * padded * (_LINEAR * width + padded)
    return best[2] if best[0] <= worth else None


def pack_length(packs: Packs, lengths: Sequence[int]) -> int:
    """Return the tokens of the longest pack, to which the others are padded."""
    return max(sum(lengths[row] for row in pack) for pack in packs)


def computed_length(lengths: Sequence[int], padded: int, width: int) -> int:
    """Return the computed tokens per row, on average and rounded up.  Arguments: see packs_of."""
    packs = packs_of(lengths, padded, width)
    return padded if packs is None else -(-len(packs) * pack_length(packs, lengths) // len(lengths))


def _filled(lengths: Sequence[int], count: int) -> Packs:
    """Return `count` packs of similar length: each row, longest first, joins the shortest pack; rows of a pack stay in
    order.
    """
    packs: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        least = sums.index(min(sums))
        packs[least].append(row)
        sums[least] += lengths[row]
    return tuple(tuple(sorted(pack)) for pack in packs)


def _work(count: int, tokens: int, width: int) -> int:
    return count * tokens * (_LINEAR * width + tokens)
