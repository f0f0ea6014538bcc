"""Form batches of prompts from seed and step, compute their share of padding (P-RGE, Fig. 2 and 5), and words' log-likelihoods."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from workbench.core.errors import ConfigError
from workbench.tasks.prompts.encoding import EncodedPrompts, EncodedRow
from workbench.tasks.tokenize import by_length, padded_length

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBatch:
    """input_ids, attention_mask: (n, t) int64, padded on the right.

    targets: (n, k) int64, the tokens to predict.  positions: (n, k) int64, the positions whose last hidden states predict them.
    target_mask: (n, k) bool, False where a row has fewer targets (targets and positions are then 0).  A row's loss is the mean over its
    targets.  decoder_ids: (n, s) int64 for an encoder-decoder, whose positions refer to the decoder; None for others.  labels: (n,) int64,
    classes or correct candidates; they are the targets of an encoder's separate head.  indices: of the rows in their split.
    choices: (c,) int64, the tokens over which the loss is computed; None: the whole vocabulary.
    """

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    positions: Tensor
    target_mask: Tensor
    labels: Tensor
    indices: tuple[int, ...]
    decoder_ids: Tensor | None = None
    choices: Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)


def step_indices(num_samples: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Return the samples of training step `step` (from 0): batch_size of them, from concatenated seeded permutations.

    Lengths are ignored, as in the paper (section 3.1).  A batch at the end of an epoch continues with the next epoch's first samples.
    Raises ConfigError if there are no samples or batch_size is below 1.
    """
    if num_samples < 1:
        raise ConfigError("Mini-batches of an empty dataset were asked for.", "There are 0 samples.", "Give data.")
    if batch_size < 1:
        raise ConfigError(f"Mini-batches of {batch_size} samples were asked for.", "That is none.", "Raise batch_size.")
    first = step * batch_size
    return [_permutation(num_samples, seed, at // num_samples)[at % num_samples] for at in range(first, first + batch_size)]


@lru_cache(maxsize=4)
def _permutation(num_samples: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_samples))
    random.Random(f"prompts {seed} {epoch}").shuffle(order)  # strings are hashed with SHA-512, the same on every machine
    return tuple(order)


def training_batch(encoded: EncodedPrompts, batch_size: int, seed: int, step: int) -> PromptBatch:
    """Return the batch of a training step: step_indices() as tensors."""
    return collate_prompts(encoded, step_indices(len(encoded), batch_size, seed, step))


def prompt_batches(encoded: EncodedPrompts, batch_size: int) -> Iterator[PromptBatch]:
    """Yield all rows once (see by_length)."""
    for indices in by_length(encoded.lengths, batch_size):
        yield collate_prompts(encoded, indices)


def collate_prompts(encoded: EncodedPrompts, indices: Sequence[int], *, length: int | None = None) -> PromptBatch:
    """Return the rows at `indices` as one batch.

    length: None pads to the longest row, rounded up to a multiple of 8 (1 in the paper); a number pads to it.
    Raises ConfigError if `indices` is empty or a row is longer than `length`.
    """
    if not indices:
        raise ConfigError("A batch of 0 samples was asked for.", "There is nothing to pad to.", "Leave it out.")
    rows = [encoded.rows[index] for index in indices]
    if length is not None and (too_long := [index for index in indices if len(encoded.rows[index].ids) > length]):
        tokens = len(encoded.rows[too_long[0]].ids)
        raise ConfigError(f"Padding to {length} tokens was asked for.", f"Sample {too_long[0]} has {tokens}.", "Raise the length.")
    labels = [encoded.labels[index] for index in indices]
    return batch_of(rows, labels, encoded.pad_id, indices, length=length, choices=encoded.choices)


def batch_of(
    rows: Sequence[EncodedRow],
    labels: Sequence[int],
    pad_id: int,
    indices: Sequence[int],
    *,
    length: int | None = None,
    choices: Sequence[int] = (),
) -> PromptBatch:
    """Convert rows to tensors.  All rows must be for the same kind of model."""
    import torch

    width = padded_length([len(row.ids) for row in rows]) if length is None else length
    num_targets = max(len(row.targets) for row in rows)
    has_decoder = bool(rows[0].decoder_ids)
    return PromptBatch(
        input_ids=torch.tensor([[*row.ids, *[pad_id] * (width - len(row.ids))] for row in rows]),
        attention_mask=torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows]),
        targets=torch.tensor([[*row.targets, *[0] * (num_targets - len(row.targets))] for row in rows]),
        positions=torch.tensor(
            [[row.first_position + at if at < len(row.targets) else 0 for at in range(num_targets)] for row in rows]
        ),
        target_mask=torch.tensor([[at < len(row.targets) for at in range(num_targets)] for row in rows]),
        labels=torch.tensor(labels),
        indices=tuple(indices),
        decoder_ids=_padded_decoder(rows, pad_id) if has_decoder else None,
        choices=torch.tensor(choices) if choices else None,
    )  # fmt: skip


def _padded_decoder(rows: Sequence[EncodedRow], pad_id: int) -> Tensor:
    import torch

    width = max(len(row.decoder_ids) for row in rows)
    return torch.tensor([[*row.decoder_ids, *[pad_id] * (width - len(row.decoder_ids))] for row in rows])


LogitsAt = Callable[[PromptBatch], "Tensor"]
"""A model: returns logits (n, k, V) at the batch's positions; an encoder's head returns (n, 1, classes)."""


def label_log_likelihoods(logits_at: LogitsAt, encoded: EncodedPrompts) -> Tensor:
    """Return (n, classes) float32: log-probabilities of the label words' tokens over the whole vocabulary, rows in split order."""
    import torch

    found: Tensor | None = None
    for batch in prompt_batches(encoded, BATCH_SIZE):
        with torch.inference_mode():
            logits = logits_at(batch)[:, 0].float()
            chosen = logits[:, list(encoded.label_ids)] if encoded.label_ids else logits
            scores = (chosen - logits.logsumexp(dim=1, keepdim=True)).cpu()
        if found is None:
            found = torch.empty(len(encoded), scores.shape[1])
        found[list(batch.indices)] = scores
    assert found is not None, "a split has samples"
    return found


def target_log_likelihoods(logits_at: LogitsAt, rows: Sequence[EncodedRow], pad_id: int) -> tuple[Tensor, Tensor]:
    """Return (rows,) float32 sums of the targets' log-likelihoods, and (rows,) float32 numbers of targets."""
    import torch

    sums, counts = torch.empty(len(rows)), torch.empty(len(rows))
    for mine in by_length([len(row.ids) for row in rows], BATCH_SIZE):
        batch = batch_of([rows[index] for index in mine], [0] * len(mine), pad_id, mine)
        with torch.inference_mode():
            logits = logits_at(batch).float()
            chosen = logits.gather(2, batch.targets.to(logits.device)[:, :, None])[:, :, 0] - logits.logsumexp(dim=2)
            shown = batch.target_mask.to(logits.device)
            sums[mine] = torch.where(shown, chosen, 0.0).sum(dim=1).cpu()
            counts[mine] = shown.sum(dim=1).float().cpu()
    return sums, counts


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """share: expected share of padding among a random batch's tokens.  padded_length: expected tokens per sample."""

    batch_size: int
    share: float
    padded_length: float


def padding_statistics(lengths: Sequence[int], batch_sizes: Iterable[int]) -> list[PaddingRow]:
    """Return one row for each batch size E, for batches of E random samples padded to their longest.

    The values are exact, without sampling: the m-th shortest of n samples is the longest in C(m - 1, E - 1) of C(n, E) batches.
    Raises ConfigError for E below 1 or above n.
    """
    ordered = sorted(lengths)
    return [_row(ordered, batch_size) for batch_size in batch_sizes]


def _row(ordered: Sequence[int], batch_size: int) -> PaddingRow:
    count = len(ordered)
    if not 1 <= batch_size <= count:
        raise ConfigError(
            f"The padding in batches of {batch_size} samples was asked for.", f"There are {count} samples.", "Choose from 1 to that."
        )
    mean = sum(ordered) / count
    expected, share = 0.0, batch_size / count  # C(n - 1, E - 1) / C(n, E), for the longest sample
    for rank in range(count, batch_size - 1, -1):
        expected += share * ordered[rank - 1]
        share *= (rank - batch_size) / (rank - 1) if rank > 1 else 0.0
    return PaddingRow(batch_size=batch_size, share=max(0.0, 1 - mean / expected), padded_length=expected)
