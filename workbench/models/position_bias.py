"""T5's relative positions: one table for a whole stack, which every pipeline stage needs (Raffel et al., JMLR 2020, section 2.1)."""

from __future__ import annotations

import math

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
        buckets = distance_buckets(
            at[None, :] - at[:, None], self.table.num_embeddings, is_causal=self.is_causal, max_distance=self.max_distance
        )
        return self.table(buckets).permute(2, 0, 1)[None]


def distance_buckets(distance: Tensor, num_buckets: int, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return the bucket of each distance (key's position minus query's), int64.

    Half of the buckets of a direction hold one distance each, the other half grow with the logarithm up to max_distance.
    Without causality one half of all buckets is for keys behind the query.
    """
    if is_causal:
        first = torch.zeros_like(distance)
        distance = (-distance).clamp(min=0)
    else:
        num_buckets //= 2
        first = (distance > 0).long() * num_buckets
        distance = distance.abs()
    exact = num_buckets // 2
    # clamp: the logarithm of zero is never used, but its conversion to an integer is undefined.
    share = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return first + torch.where(distance < exact, distance, far)
