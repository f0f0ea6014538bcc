"""Log-likelihoods of label words and candidates by a model that is given as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from workbench.tasks.prompts.batches import PromptBatch, batch_of, prompt_batches
from workbench.tasks.prompts.encoding import EncodedPrompts, EncodedRow

if TYPE_CHECKING:
    from torch import Tensor

LogitsAt = Callable[[PromptBatch], "Tensor"]
"""A model: gives logits (n, k, V) at the batch's positions; an encoder's head gives (n, 1, classes)."""

BATCH_SIZE = 16


def label_log_likelihoods(logits_at: LogitsAt, encoded: EncodedPrompts, batch_size: int = BATCH_SIZE) -> Tensor:
    """Return (n, classes) float32: log-probabilities of the label words' tokens among the whole vocabulary, rows in the split's order."""
    import torch

    found: Tensor | None = None
    for batch in prompt_batches(encoded, batch_size):
        with torch.inference_mode():
            logits = logits_at(batch)[:, 0].float()
            chosen = logits[:, list(encoded.label_ids)] if encoded.label_ids else logits
            scores = (chosen - logits.logsumexp(dim=1, keepdim=True)).cpu()
        if found is None:
            found = torch.empty(len(encoded), scores.shape[1])
        found[list(batch.indices)] = scores
    assert found is not None, "a split has samples"
    return found


def target_log_likelihoods(
    logits_at: LogitsAt, rows: Sequence[EncodedRow], pad_id: int, batch_size: int = BATCH_SIZE
) -> tuple[Tensor, Tensor]:
    """Return (rows,) float32 sums of the targets' log-likelihoods and (rows,) float32 numbers of targets."""
    import torch

    sums, counts = torch.empty(len(rows)), torch.empty(len(rows))
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].ids))
    for at in range(0, len(order), batch_size):
        mine = order[at : at + batch_size]
        batch = batch_of([rows[index] for index in mine], [0] * len(mine), pad_id, mine)
        with torch.inference_mode():
            logits = logits_at(batch).float()
            chosen = logits.gather(2, batch.targets.to(logits.device)[:, :, None])[:, :, 0] - logits.logsumexp(dim=2)
            shown = batch.target_mask.to(logits.device)
            sums[mine] = torch.where(shown, chosen, 0.0).sum(dim=1).cpu()
            counts[mine] = shown.sum(dim=1).float().cpu()
    return sums, counts
