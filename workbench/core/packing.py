"""When a batch is computed without its padding: several rows' tokens end to end, as packs.  Pure, so that all devices decide alike."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_SAVING = 0.1
"""Share of the work that packing must save: rows of one length take the kernels' faster way, without a mask."""
_LINEAR = 6
"""A layer's projections take 24 width^2 operations a token, its attention 4 width for each token of the row: 6 width tokens as much."""

Packs = tuple[tuple[int, ...], ...]


def packs_of(lengths: Sequence[int], padded: int, width: int) -> Packs | None:
    """Return which rows are computed as one, pack by pack, or None where they are better computed one by one, padded to `padded` tokens.

    Projections take less without padding; attention compares all tokens of a pack, also those of different rows, so that short rows
    make one pack and long ones several, each filled up to the longest.
    lengths: of the rows, in tokens.  width: hidden size of the model; 0 if it cannot.
    """
    if not width:
        return None
    total, longest = sum(lengths), max(lengths)
    # The least work that so many packs could be: numbers of packs whose least is too much are not tried.
    least = sorted((_work(count, max(longest, -(-total // count)), width), count) for count in range(1, len(lengths) + 1))
    best: tuple[int, int, Packs] | None = None
    for bound, count in least:
        if best is not None and bound > best[0]:
            break
        packs = _filled(lengths, count)
        found = (_work(count, pack_length(packs, lengths), width), count, packs)
        best = found if best is None else min(best, found)
    assert best is not None
    worth = (1 - LEAST_SAVING) * len(lengths) * padded * (_LINEAR * width + padded)
    return best[2] if best[0] <= worth else None


def pack_length(packs: Packs, lengths: Sequence[int]) -> int:
    """Return the tokens of the longest pack, to which the others are filled up."""
    return max(sum(lengths[row] for row in pack) for pack in packs)


def computed_length(lengths: Sequence[int], padded: int, width: int) -> int:
    """Return for how many tokens a row is computed, on average and rounded up.  Arguments: see packs_of."""
    packs = packs_of(lengths, padded, width)
    return padded if packs is None else -(-len(packs) * pack_length(packs, lengths) // len(lengths))


def _filled(lengths: Sequence[int], count: int) -> Packs:
    """Return so many packs of about equal sums: the longest row first, each to the pack that has least; rows of a pack in order."""
    packs: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        least = sums.index(min(sums))
        packs[least].append(row)
        sums[least] += lengths[row]
    return tuple(tuple(sorted(pack)) for pack in packs)


def _work(count: int, tokens: int, width: int) -> int:
    return count * tokens * (_LINEAR * width + tokens)
