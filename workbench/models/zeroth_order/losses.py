"""Losses of each part of a batch: cross-entropy where the label words stand, over the whole vocabulary (P-RGE, Appendix D.2).

Or among the label words alone, as MeZO takes it for classifications (Malladi et al., NeurIPS 2023), where a batch has `choices`.
P-RGE's batches are drawn whatever the lengths, and half of a batch of 16 is padding (Appendix C): decoders compute without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.core.packing import pack_length, packs_of

MAX_LOGITS = 1 << 22
"""Logits that are computed at a time: 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A batch of prompts.

    input_ids: (n, t).  attention_mask: (n, t), 1 for real tokens, padding on the right.
    targets: (n, k) int64, the token ids to predict; for models that predict no words k is 1, and targets are the classes.
    positions: (n, k) int64, the position whose hidden state predicts each.  target_mask: (n, k) bool, which of them are real.
    decoder_ids: what a decoder reads (n, s), None unless the model has one.  Positions are then its.
    choices: (c,) int64, the tokens among which the loss is, every target one of them; None: the whole vocabulary.
    """

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None


PromptLike = Any
"""A batch that has what Prompts has."""


class Head(Protocol):
    """A language model head.  weight: (V, d), a tensor or a stored one."""

    weight: Any

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., d)."""
        ...


def word_losses(
    hidden: Tensor,
    batch: PromptLike,
    num_parts: int,
    norm: Callable[[Tensor], Tensor],
    head: Head,
    packing: Packing | None = None,
) -> Tensor:
    """Return (P,) float32: the mean over a part's samples of the mean over their target tokens.

    hidden: (P*E, t, d), or (P*R, N, d) of a packing, before the norm, which needs only the rows that are read.
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


def word_logits(hidden: Tensor, batch: PromptLike, norm: Callable[[Tensor], Tensor], head: Head, packing: Packing | None = None) -> Tensor:
    """Return (n, k, V) float32 of one part's hidden states (n, t, d), or (R, N, d) of a packing."""
    if packing is None:
        rows = hidden.gather(1, batch.positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
    else:
        rows = hidden.flatten(0, 1)[packing.firsts[:, None] + batch.positions]
    return head(norm(rows)).float()


def class_losses(logits: Tensor, batch: PromptLike) -> Tensor:
    """Return (P,) float32 cross-entropy of logits (P, E, outputs)."""
    parts, count, _ = logits.shape
    classes = batch.targets[:, 0].repeat(parts)
    return F.cross_entropy(logits.flatten(0, 1), classes, reduction="none").view(parts, count).mean(dim=1)


def shifted(targets: Tensor, target_mask: Tensor, start_id: int) -> Tensor:
    """Return what a decoder reads to predict targets (n, k): the start token and all of them but the last."""
    known = targets.masked_fill(~target_mask, 0)[:, :-1]
    return torch.cat([known.new_full((len(known), 1), start_id), known], dim=1)


def _cross_entropy(rows: Tensor, target: Tensor, head: Head, choices: Tensor | None) -> Tensor:
    """Return (m,) float32 of normed hidden states (m, d), a few rows of logits at a time."""
    size = max(1, MAX_LOGITS // head.weight.shape[0])
    if choices is not None:
        target = (target[:, None] == choices).long().argmax(dim=1)

    def loss(some: Tensor, wanted: Tensor) -> Tensor:
        logits = head(some) if choices is None else head(some)[:, choices]
        return F.cross_entropy(logits.float(), wanted, reduction="none")

    return torch.cat([loss(some, wanted) for some, wanted in zip(rows.split(size), target.split(size), strict=True)])


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
