"""How much of a random batch is padding (P-RGE, Fig. 2 and appendix C, Fig. 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """share: of all tokens of a random batch, how many are padding.  mean_length, padded_length: tokens of a sample, expected."""

    batch_size: int
    share: float
    mean_length: float
    padded_length: float


def padding_statistics(lengths: Sequence[int], batch_sizes: Iterable[int], pad_to_multiple: int = 1) -> list[PaddingRow]:
    """Return one row for each batch size E, of batches of E samples drawn at random and padded to their longest.

    Exact, without drawing: the m-th shortest of n samples is a batch's longest in C(m - 1, E - 1) of C(n, E) batches.
    pad_to_multiple: to which padded lengths are rounded up (ours: 8; the paper's: 1).  Raises ConfigError for E below 1 or above n.
    """
    ordered = sorted(lengths)
    return [_row(ordered, batch_size, pad_to_multiple) for batch_size in batch_sizes]


def _row(ordered: Sequence[int], batch_size: int, pad_to_multiple: int) -> PaddingRow:
    count = len(ordered)
    if not 1 <= batch_size <= count:
        raise ConfigError(
            f"The padding in batches of {batch_size} samples was asked for.", f"There are {count} samples.", "Choose from 1 to that."
        )
    mean = sum(ordered) / count
    expected, share = 0.0, batch_size / count  # C(n - 1, E - 1) / C(n, E), of the longest
    for rank in range(count, batch_size - 1, -1):
        expected += share * (-(-ordered[rank - 1] // pad_to_multiple) * pad_to_multiple)
        share *= (rank - batch_size) / (rank - 1) if rank > 1 else 0.0
    return PaddingRow(batch_size=batch_size, share=max(0.0, 1 - mean / expected), mean_length=mean, padded_length=expected)
