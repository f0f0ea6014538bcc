"""Batches without their padding: P-RGE's batches are drawn whatever the lengths, and half of a batch of 16 is padding (appendix C)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.packing import pack_length, packs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The tokens of E rows that are no padding, end to end in R packs of N: R rows of a pass instead of E.

    source: (R, N) int64, each token's place among the E * t of the padded rows.  row: (R, N) int64, which row it is of, -1 where a pack
    is filled up.  positions: (R, N) int64, in its own row.  firsts: (E,) int64, where each row begins among the R * N.
    """

    source: Tensor
    row: Tensor
    positions: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, width: int) -> Packing | None:
        """Return the packing of rows (E, t) padded on the right, None where it does not pay for a model of this width."""
        length = attention_mask.shape[1]
        lengths = [int(tokens) for tokens in attention_mask.sum(dim=1)]
        packs = packs_of(lengths, length, width)
        if packs is None:
            return None
        longest = pack_length(packs, lengths)
        shape = len(packs), longest
        source, positions = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
        row, firsts = torch.full(shape, -1), torch.zeros(len(lengths), dtype=torch.int64)
        for pack, rows in enumerate(packs):
            at = 0
            for one in rows:
                span, within = slice(at, at + lengths[one]), torch.arange(lengths[one])
                source[pack, span], row[pack, span], positions[pack, span] = one * length + within, one, within
                firsts[one] = pack * longest + at
                at += lengths[one]
        device = attention_mask.device
        return cls(source=source.to(device), row=row.to(device), positions=positions.to(device), firsts=firsts.to(device))

    @property
    def shape(self) -> tuple[int, int]:
        """Return (R, N)."""
        return self.row.shape[0], self.row.shape[1]

    def pack(self, rows: Tensor) -> Tensor:
        """Return (R, N, d) of padded rows (E, t, d)."""
        return rows.flatten(0, 1)[self.source]

    def filled(self, length: int) -> Packing:
        """Return the packing with packs of `length` tokens, at least N; what is added belongs to no row.  `firsts` stays as it is."""
        more = (0, length - self.row.shape[1])
        return replace(self, source=F.pad(self.source, more), row=F.pad(self.row, more, value=-1), positions=F.pad(self.positions, more))

    def mask(self) -> Tensor | None:
        """Return who attends to whom, (R, 1, N, N) bool: a token to its own row up to itself.  None where each row has its own pack."""
        if len(self.row) == len(self.firsts):
            return None
        length = self.row.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.row.device).tril()
        return ((self.row[:, :, None] == self.row[:, None]) & causal)[:, None]
