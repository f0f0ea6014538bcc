"""Losses of each part of a batch: cross-entropy where the label words stand, over the whole vocabulary (P-RGE, Appendix D.2).

Or among the label words alone, as MeZO takes it for classifications (Malladi et al., NeurIPS 2023), where a batch has `choices`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.zeroth_order.packing import Packing

MAX_LOGITS = 1 << 22
"""Logits that are computed at a time: 16 MB."""


class PromptLike(Protocol):
    """What a batch of prompts must have.

    For models that predict no words k is 1, and targets are the classes.
    """

    @property
    def input_ids(self) -> Tensor:
        """Token ids (n, t)."""
        ...

    @property
    def decoder_ids(self) -> Tensor | None:
        """What a decoder reads (n, s); None unless the model has one.  Positions are then its."""
        ...

    @property
    def attention_mask(self) -> Tensor:
        """(n, t), 1 for real tokens, padding on the right."""
        ...

    @property
    def targets(self) -> Tensor:
        """(n, k) int64, the token ids to predict."""
        ...

    @property
    def positions(self) -> Tensor:
        """(n, k) int64, the position whose hidden state predicts each."""
        ...

    @property
    def target_mask(self) -> Tensor:
        """(n, k) bool, which of them are real."""
        ...

    @property
    def choices(self) -> Tensor | None:
        """(c,) int64, the tokens among which the loss is, every target one of them; None: the whole vocabulary."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A batch as PromptLike has it."""

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None


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
