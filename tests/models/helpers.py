"""Small inputs for the tests of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.adapter_config import ParallelAdapterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallBatch:
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    sample_ids: Tensor

    def rows(self, first: int, end: int) -> SmallBatch:
        """Return some of the samples, padded as in the whole."""
        return SmallBatch(
            input_ids=self.input_ids[first:end],
            attention_mask=self.attention_mask[first:end],
            labels=self.labels[first:end],
            sample_ids=self.sample_ids[first:end],
        )


def small_batch(lengths=(11, 7, 2, 9, 11, 5, 8, 3), seed=0, first_id=0) -> SmallBatch:
    generator = torch.Generator().manual_seed(seed)
    count, width = len(lengths), max(lengths)
    mask = (torch.arange(width)[None] < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(4, 1400, (count, width), generator=generator) * mask
    labels = torch.randint(0, 2, (count,), generator=generator)
    return SmallBatch(input_ids=ids, attention_mask=mask, labels=labels, sample_ids=torch.arange(first_id, first_id + count))


def small_config(stack, **changes) -> ParallelAdapterConfig:
    settings = {"reduction": 4, "dropout": 0.1, "is_causal": stack.is_causal, "seed": 3} | changes
    return ParallelAdapterConfig(hidden_size=stack.hidden_size, num_layers=stack.num_layers, **settings)
