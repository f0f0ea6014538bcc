"""Batches without their padding: P-RGE's batches are drawn whatever the lengths, and half of a batch of 16 is padding (appendix C)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.core.packing import packing_pays


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The N tokens of E rows that are no padding, end to end: one row of a pass instead of E.

    keep: (E, t) bool.  firsts: (E,) int64, where each row begins.  positions: (1, N) int64, of each token in its own row.
    """

    keep: Tensor
    firsts: Tensor
    positions: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, width: int) -> Packing | None:
        """Return the packing of rows (E, t) padded on the right, None where it does not pay for a model of this width."""
        count, length = attention_mask.shape
        lengths = attention_mask.sum(dim=1)
        if not packing_pays(int(lengths.sum()), count, length, width):
            return None
        keep = attention_mask.bool()
        positions = torch.arange(length, device=keep.device).expand(count, length)[keep]
        return cls(keep=keep, firsts=lengths.cumsum(dim=0) - lengths, positions=positions[None])

    def pack(self, rows: Tensor) -> Tensor:
        """Return (1, N, d) of padded rows (E, t, d)."""
        return rows[self.keep][None]

    def mask(self) -> Tensor | None:
        """Return who attends to whom, (1, 1, N, N) bool: a token to those of its own row up to itself.  None for a single row."""
        if len(self.keep) == 1:
            return None
        row = self.keep.nonzero()[:, 0]
        return ((row[:, None] == row[None]) & torch.ones(len(row), len(row), dtype=torch.bool, device=row.device).tril())[None, None]
