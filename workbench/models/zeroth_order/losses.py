"""Losses of each part of a batch: cross-entropy at the positions of the label words, over the whole vocabulary (P-RGE, Appendix D.2).

If a batch has `choices`, only over the label words, as in MeZO for classification (Malladi et al., NeurIPS 2023).
P-RGE's batches are drawn regardless of length, so half of a batch of 16 is padding (Appendix C): decoders compute without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.packing import pack_length, packs_of

MAX_LOGITS = 1 << 22
"""Number of logits computed at a time: 16 MB."""


PromptLike = Any
"""A batch with the fields of tasks.prompts.PromptBatch, except that labels and indices may be missing."""


def word_losses(
    hidden: Tensor,
    batch: PromptLike,
    num_parts: int,
    norm: Callable[[Tensor], Tensor],
    head: Any,
    packing: Packing | None = None,
) -> Tensor:
    """Return (P,) float32: the mean over a part's samples of the mean loss over their target tokens.

    hidden: (P*E, t, d), or (P*R, N, d) with a packing, before the norm, which is applied only to the required rows.  head: a products.Head,
    or a quantized one.
    """
    count = len(batch.targets)
    sample, column = batch.target_mask.nonzero(as_tuple=True)
    position = batch.positions[sample, column]
    if packing is None:
        rows = hidden.view(num_parts, count, *hidden.shape[1:])[:, sample, position]
    else:
        rows = hidden.view(num_parts, -1, hidden.shape[-1])[:, packing.firsts[sample] + position]
    target = batch.targets[sample, column].repeat(num_parts)
    losses = _cross_entropy(norm(rows).flatten(0, 1), target, head, batch.choices).view(num_parts, -1)
    weight = 1 / (batch.target_mask.sum(dim=1) * count)
    return losses @ weight[sample]


def word_logits(hidden: Tensor, batch: PromptLike, norm: Callable[[Tensor], Tensor], head: Any, packing: Packing | None = None) -> Tensor:
    """Return (n, k, V) float32 for one part's hidden states (n, t, d), or (R, N, d) with a packing."""
    if packing is None:
        rows = hidden.gather(1, batch.positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
    else:
        rows = hidden.flatten(0, 1)[packing.firsts[:, None] + batch.positions]
    return head(norm(rows)).float()


def class_losses(logits: Tensor, batch: PromptLike) -> Tensor:
    """Return the cross-entropy (P,) float32 for logits (P, E, outputs)."""
    parts, count, _ = logits.shape
    classes = batch.targets[:, 0].repeat(parts)
    return F.cross_entropy(logits.flatten(0, 1), classes, reduction="none").view(parts, count).mean(dim=1)


def _cross_entropy(rows: Tensor, target: Tensor, head: Any, choices: Tensor | None) -> Tensor:
    """Return the cross-entropy (m,) float32 for normed hidden states (m, d), computing a few rows of logits at a time."""
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    if choices is not None:
        target = (target[:, None] == choices).long().argmax(dim=1)

    def loss(some: Tensor, wanted: Tensor) -> Tensor:
        logits = head(some) if choices is None else head(some)[:, choices]
        return F.cross_entropy(logits.float(), wanted, reduction="none")

    return torch.cat([loss(some, wanted) for some, wanted in zip(rows.split(size), target.split(size), strict=True)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The real tokens of E rows, concatenated into R packs of N tokens: a pass has R rows instead of E.

    source: (R, N) int64, each token's index among the E * t padded ones.  row: (R, N) int64, the row it comes from, -1 for a pack's
    padding.  positions: (R, N) int64, its position in that row.  firsts: (E,) int64, index of each row's first token among the R * N.
    """

    source: Tensor
    row: Tensor
    positions: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor, width: int) -> Packing | None:
        """Return the packing of rows (E, t) padded on the right.  None if it does not pay off for a model of this width."""
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
        """Return (R, N), the number of packs and their length."""
        return self.row.shape[0], self.row.shape[1]

    def pack(self, rows: Tensor) -> Tensor:
        """Pack padded rows (E, t, d) into (R, N, d)."""
        return rows.flatten(0, 1)[self.source]

    def filled(self, length: int) -> Packing:
        """Return the packing with packs of `length` tokens, at least N.  The added tokens belong to no row, and `firsts` is unchanged."""
        more = (0, length - self.row.shape[1])
        return replace(self, source=F.pad(self.source, more), row=F.pad(self.row, more, value=-1), positions=F.pad(self.positions, more))

    def mask(self) -> Tensor | None:
        """Return the attention mask, (R, 1, N, N) bool: a token attends to its own row up to itself.  None if each row has its own pack."""
        if len(self.row) == len(self.firsts):
            return None
        length = self.row.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.row.device).tril()
        return ((self.row[:, :, None] == self.row[:, None]) & causal)[:, None]
