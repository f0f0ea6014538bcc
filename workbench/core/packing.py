"""When a batch is computed without its padding: the rows' tokens end to end, as one row.  Pure, so that all devices decide alike."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_SAVING = 0.1
"""Share of the work that packing must save: rows of one length take the kernels' faster way, without a mask."""
_LINEAR = 6
"""A layer's projections take 24 width^2 operations a token, its attention 4 width for each token of the row: 6 width tokens as much."""


def packing_pays(tokens: int, rows: int, length: int, width: int) -> bool:
    """Return whether `rows` rows padded to `length` are better computed as one row of their `tokens` tokens.

    Projections take less then; attention compares all tokens with each other, also those of different rows.
    width: hidden size of the model; 0 if it cannot.
    """
    if not width:
        return False
    packed, padded = tokens * (_LINEAR * width + tokens), rows * length * (_LINEAR * width + length)
    return packed <= (1 - LEAST_SAVING) * padded


def computed_length(lengths: Sequence[int], padded: int, width: int) -> int:
    """Return for how many tokens a row is computed, on average and rounded up.

    lengths: of the rows, in tokens.  padded: to what they would be padded.  width: see packing_pays.
    """
    tokens = sum(lengths)
    return -(-tokens // len(lengths)) if packing_pays(tokens, len(lengths), padded, width) else padded
