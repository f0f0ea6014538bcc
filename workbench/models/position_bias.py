"""T5's relative positions: one table for a whole stack, which every pipeline stage needs (Raffel et al., JMLR 2020, section 2.1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PositionBias(nn.Module):
    """What the distance between query and key adds to each head's attention scores.

    Hugging Face keeps the table in a stack's first layer, which only the first pipeline stage has.
    """

    def __init__(self, table: nn.Embedding, *, is_causal: bool, max_distance: int) -> None:
        super().__init__()
        self.table, self.is_causal, self.max_distance = table, is_causal, max_distance

    def forward(self, length: int) -> Tensor:
        """Return (1, heads, length, length)."""
        at = torch.arange(length, device=self.table.weight.device)
        buckets = buckets_of(self.table.num_embeddings, at, length, is_causal=self.is_causal, max_distance=self.max_distance)
        return self.table(buckets).permute(2, 0, 1)[None]


def buckets_of(num_buckets: int, queries: Tensor, num_keys: int, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return the bucket of the distance between each query and key, (queries, keys) int64.  queries: (q,) int64, their positions."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(num_keys, device=queries.device) - queries[:, None]
    return T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)
