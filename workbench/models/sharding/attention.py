"""Attention of a device's own units: heads, or groups of heads that share keys and values (Galaxy+ Eq. 1, second line)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.position_bias import distance_buckets


def split_heads(projected: Tensor, parts: tuple[int, ...], head_size: int) -> tuple[Tensor, ...]:
    """Return views (n, heads, t, head size) of a projection (n, t, sum of parts x head size)."""
    count, length, _ = projected.shape
    return projected.view(count, length, -1, head_size).transpose(1, 2).split(parts, dim=1)


def rotate(projected: Tensor, num_rotated: int, rotary: tuple[Tensor, Tensor], head_size: int) -> Tensor:
    """Return a projection whose first `num_rotated` heads are turned by their positions (Llama), the others as they were.

    projected: (n, t, heads x head size).  rotary: cosines and sines, (1 or n, t, 1, head size).
    """
    cos, sin = rotary
    count, length, width = projected.shape
    heads = projected.view(count, length, width // head_size, head_size)
    turning = heads[:, :, :num_rotated]
    half = head_size // 2
    turned = torch.empty_like(heads)
    turned[:, :, num_rotated:] = heads[:, :, num_rotated:]
    torch.mul(turning, cos, out=turned[:, :, :num_rotated])
    turned[:, :, :num_rotated, :half].addcmul_(turning[..., half:], sin[..., :half], value=-1)
    turned[:, :, :num_rotated, half:].addcmul_(turning[..., :half], sin[..., half:])
    return turned.view(count, length, width)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, *, is_causal: bool, scale: float) -> Tensor:
    """Return (n, queries, heads x head size) of queries (n, heads, q, head size) and keys, values (n, units, k, head size)."""
    context = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return context.transpose(1, 2).reshape(context.shape[0], context.shape[2], -1)


def position_bias(table: Tensor, queries: Tensor, num_keys: int, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return what T5 adds to the scores, (1, heads, queries, keys).

    table: (buckets, heads).  queries: (q,) int64, their positions.  Under causality keys behind the query get -inf.
    """
    distance = torch.arange(num_keys)[None, :] - queries[:, None]
    buckets = distance_buckets(distance, len(table), is_causal=is_causal, max_distance=max_distance)
    bias = table[buckets].permute(2, 0, 1)[None]
    if is_causal:
        bias = bias.masked_fill(distance > 0, -math.inf)
    return bias.contiguous()
