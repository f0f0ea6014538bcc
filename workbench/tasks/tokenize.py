"""Tokenized splits, and batches padded to their own longest sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from workbench.core.errors import ConfigError
from workbench.tasks.task import Split

if TYPE_CHECKING:
    from torch import Tensor


class Encoder(Protocol):
    """What a tokenizer must do."""

    pad_id: int

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int) -> list[list[int]]:
        """Return the token ids of each text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedSplit:
    """Token ids of every sample, ragged.  labels: int for classification, float for regression.

    sample_ids: stable numbers of the samples in the whole task, whatever subset is taken.
    """

    ids: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...] | tuple[float, ...]
    sample_ids: tuple[int, ...]
    pad_id: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each sample."""
        return tuple(len(ids) for ids in self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """input_ids, attention_mask: (n, t) int64, padded on the right.  labels: (n,) int64 or float32.  sample_ids: (n,) int64.

    indices: where the samples are in their split.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    sample_ids: Tensor
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)


def tokenize(split: Split, encoder: Encoder, *, max_length: int) -> TokenizedSplit:
    """Return a split's token ids, each sample cut at max_length tokens.  Raises ConfigError if the split is empty."""
    if not split.texts:
        raise ConfigError("An empty split was to be tokenized.", "It has 0 samples.", "Give data.")
    ids = encoder.encode(split.texts, split.pairs, max_length=max_length)
    return TokenizedSplit(
        ids=tuple(tuple(sample) for sample in ids), labels=split.labels, sample_ids=split.sample_ids, pad_id=encoder.pad_id
    )


def padded_length(lengths: Sequence[int], pad_to_multiple: int = 8) -> int:
    """Return the length that a batch of these lengths is padded to."""
    return -(-max(lengths) // pad_to_multiple) * pad_to_multiple


def collate(split: TokenizedSplit, indices: Sequence[int], pad_to_multiple: int = 8, length: int | None = None) -> Batch:
    """Return the samples at `indices` as one batch.

    length: None pads to the longest sample, rounded up; a number pads to it (pieces of a mini-batch must agree on it).
    Raises ConfigError if `indices` is empty or a sample is longer than `length`.
    """
    import torch

    if not indices:
        raise ConfigError("A batch of 0 samples was asked for.", "There is nothing to pad to.", "Leave it out.")
    width = padded_length([len(split.ids[index]) for index in indices], pad_to_multiple) if length is None else length
    input_ids = torch.full((len(indices), width), split.pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(indices), width), dtype=torch.int64)
    for row, index in enumerate(indices):
        ids = split.ids[index]
        if len(ids) > width:
            raise ConfigError(f"Padding to {width} tokens was asked for.", f"Sample {index} has {len(ids)}.", "Raise the length.")
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention_mask[row, : len(ids)] = 1
    is_regression = isinstance(split.labels[0], float)
    return Batch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=torch.tensor([split.labels[index] for index in indices], dtype=torch.float32 if is_regression else torch.int64),
        sample_ids=torch.tensor([split.sample_ids[index] for index in indices], dtype=torch.int64),
        indices=tuple(indices),
    )


def evaluation_batches(split: TokenizedSplit, batch_size: int = 64, pad_to_multiple: int = 8) -> Iterator[Batch]:
    """Yield the whole split in batches of similar length, the longest first (a memory error comes at once or not at all)."""
    order = sorted(range(len(split)), key=lambda index: -len(split.ids[index]))
    for at in range(0, len(order), batch_size):
        yield collate(split, order[at : at + batch_size], pad_to_multiple)
