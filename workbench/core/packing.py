"""When a batch is computed without its padding: the rows' tokens end to end, as one row.  Pure, so that all devices decide alike."""

from __future__ import annotations

from collections.abc import Sequence

LEAST_SAVING = 0.1
"""Share of a padded batch that must be padding: rows of one length take the kernels' faster way, without a mask."""


def packing_pays(tokens: int, rows: int, length: int) -> bool:
    """Return whether `rows` rows padded to `length` are better computed as their `tokens` tokens alone."""
    return tokens <= (1 - LEAST_SAVING) * rows * length


def computed_length(lengths: Sequence[int], padded: int) -> int:
    """Return for how many tokens a row is computed, on average and rounded up.

    lengths: of the rows, in tokens.  padded: to what they would be padded.
    """
    tokens = sum(lengths)
    return -(-tokens // len(lengths)) if packing_pays(tokens, len(lengths), padded) else padded
