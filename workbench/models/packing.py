"""Pack a batch's tokens without padding, with matching indices for the rows of attention heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Indices of the N real tokens in a padded batch (n, t).  All indices are row numbers for index_select.

    tokens: (N,) index of each real token among n * t.  share: (n, N) float32, each row computes the mean over a sample's tokens.
    to_heads: (3 * n * h * t,) maps rows (N, 3, h) to (3, n, h, t); padding reads token 0's row.
    to_padded_heads: (n * h * t,) maps rows (N + 1, h) to (n, h, t); padding reads token N's row, which the caller keeps zero.
    from_heads: (N * h,) maps rows (n, h, t) to (N, h).  from_all_heads: (N * 3 * h,) maps rows (3, n, h, t) to (N, 3, h).
    score_bias: (n * h, 1 or t, t), 0 where a query may attend and -inf elsewhere; None if it may attend everywhere.
    """

    count: int
    length: int
    tokens: Tensor
    share: Tensor
    to_heads: Tensor
    to_padded_heads: Tensor
    from_heads: Tensor
    from_all_heads: Tensor
    score_bias: Tensor | None

    @classmethod
    def of(cls, attention_mask: Tensor, heads: int, *, is_causal: bool) -> Packing:
        """Return the packing of a mask (n, t), 1 for real tokens.

        This uses numpy, whose calls take a fifth of the time of torch's for arrays of this size.
        """
        real = attention_mask.numpy().astype(bool)
        count, length = real.shape
        tokens = np.flatnonzero(real)
        sample, place = np.divmod(tokens, length)
        number = np.zeros(count * length, dtype=np.int64)
        number[tokens] = np.arange(len(tokens))
        number = number.reshape(count, 1, length)  # index of the token at each position, 0 for padding
        head, part = np.arange(heads), np.arange(3)
        in_heads = (sample[:, None] * heads + head) * length + place[:, None]  # (N, h)
        share = np.zeros((count, len(tokens)), dtype=np.float32)
        share[sample, np.arange(len(tokens))] = (1 / real.sum(axis=1, dtype=np.float32))[sample]
        return cls(
            count=count,
            length=length,
            tokens=torch.from_numpy(tokens),
            share=torch.from_numpy(share),
            to_heads=_flat(number * (3 * heads) + part[:, None, None, None] * heads + head[:, None]),
            to_padded_heads=_flat(np.where(real[:, None], number, len(tokens)) * heads + head[:, None]),
            from_heads=_flat(in_heads),
            from_all_heads=_flat(part[:, None] * (count * heads * length) + in_heads[:, None]),
            score_bias=_score_bias(real, heads, is_causal=is_causal),
        )

    @property
    def num_tokens(self) -> int:
        """Return N, the number of real tokens."""
        return len(self.tokens)

    def pack(self, padded: Tensor) -> Tensor:
        """Pack (n, t, c) into (N, c)."""
        return padded.reshape(self.count * self.length, -1).index_select(0, self.tokens)

    def unpack(self, packed: Tensor) -> Tensor:
        """Unpack (N, c) into (n, t, c), zero where padded."""
        padded = packed.new_zeros(self.count * self.length, packed.shape[1])
        return padded.index_copy_(0, self.tokens, packed).view(self.count, self.length, -1)


def _flat(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(rows.reshape(-1))


def _score_bias(real: np.ndarray, heads: int, *, is_causal: bool) -> Tensor | None:
    if not is_causal and real.all():
        return None
    may_look = real[:, None]  # (n, 1, t)
    if is_causal:
        # Padding is on the right, so every query, even a padded one, may attend to the first token: no row is -inf throughout.
        may_look = may_look & np.tri(real.shape[1], dtype=bool)
    bias = np.where(may_look, np.float32(0), np.float32("-inf"))
    return torch.from_numpy(np.repeat(bias, heads, axis=0))
