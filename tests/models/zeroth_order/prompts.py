"""Batches of made-up prompts, models that seem to be trained, and what their losses are by definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.families import FAMILIES
from workbench.models.loading import load_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None


def perturb(model, *, seed=99, alpha=0.05) -> None:
    """Move the trained values by noise, as training would: many begin at zero."""
    model.trainables.flat.add_(model.trainables.noise(seed), alpha=alpha)


def prompts(family="llama", *, seed=0, lengths=(11, 7, 9)) -> Prompts:
    """Prompts of unequal lengths, the second with one target instead of two; classes for families that predict no
    words."""
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), max(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 1400, (count, width), generator=generator) * mask
    if not FAMILIES[family].generates:
        if FAMILIES[family].reads_images:
            mask = torch.ones(count, 17, dtype=torch.int64)
            ids = torch.randint(256, (count, 17, 4), generator=generator, dtype=torch.uint8)
        classes, real = torch.randint(0, 3, (count, 1), generator=generator), torch.ones(count, 1, dtype=torch.bool)
        return Prompts(
            input_ids=ids, attention_mask=mask, targets=classes, positions=torch.zeros_like(classes), target_mask=real
        )
    real = torch.arange(2)[None] < torch.where(torch.arange(count) == 1, 1, 2)[:, None]
    targets = torch.randint(4, 1400, (count, 2), generator=generator) * real
    positions, decoder_ids = (torch.tensor(lengths)[:, None] - 2 + torch.arange(2)) * real, None
    if family in ("t5", "bart"):
        start = {"t5": 0, "bart": 3}[family]
        positions, decoder_ids = (
            torch.arange(2) * real,
            torch.cat([torch.full((count, 1), start), targets[:, :1]], dim=1),
        )
    return Prompts(
        input_ids=ids,
        attention_mask=mask,
        targets=targets,
        positions=positions,
        target_mask=real,
        decoder_ids=decoder_ids,
    )


class Naive:
    """A model's loss with LoRA-FA's product merged into its weights, one sample after another: nothing of the package's
    own."""

    def __init__(self, name: str, dtype=torch.float64) -> None:
        self.stack = load_stack(name, dtype, with_head=True)
        self.head = self.stack.language_model_head

    def loss(self, model, values: dict[str, Tensor], batch: Prompts) -> float:
        """model: where A is taken from.  values: B by name, and the head of a model without words."""
        changed = []
        for name, b in values.items():
            if name.startswith("head."):
                continue
            path = name.removesuffix(".B")
            delta = model.backbone.get_submodule(path).a @ b.to(model.dtype)
            projection = self.stack.get_submodule(path)
            delta = delta.T if isinstance(projection, torch.nn.Linear) else delta
            projection.weight += delta
            changed.append((projection.weight, delta))
        try:
            return sum(self._sample(values, batch, row) for row in range(len(batch.targets))) / len(batch.targets)
        finally:
            for weight, delta in changed:
                weight -= delta

    def _sample(self, values, batch, row) -> float:
        length = int(batch.attention_mask[row].sum())
        ids, mask = batch.input_ids[row : row + 1, :length], batch.attention_mask[row : row + 1, :length]
        decoder_ids = None if batch.decoder_ids is None else batch.decoder_ids[row : row + 1]
        hidden = self.stack(ids, mask, decoder_ids)[0][0]
        count = int(batch.target_mask[row].sum())
        if self.head is None:
            logits = hidden.mean(dim=0, keepdim=True) @ values["head.weight"].double() + values["head.bias"].double()
        else:
            logits = self.head(hidden[batch.positions[row, :count]])
        return F.cross_entropy(logits, batch.targets[row, :count]).item()
