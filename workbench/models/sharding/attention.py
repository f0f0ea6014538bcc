"""Attention of a device's own units: heads, or groups of heads that share keys and values (Galaxy+ Eq. 1, second line)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.sharding.held import HeldBlock
from workbench.models.sharding.layout import Block, StackLayout
from workbench.models.sharding.run import Step


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


def decode_attention(block: Block, part: StackLayout, held: HeldBlock, hidden: Tensor, step: Step, mask: Tensor | None) -> Tensor:
    """Return the partial product (n, 1, d) of a self-attention, which adds to the cache, or a cross-attention, which reads it.

    mask: what the attention hides or adds.
    """
    if not held.count:
        return torch.zeros_like(hidden)
    projected = F.linear(hidden, held.inputs[0], held.biases[0])
    if block.kind == "cross_attention":
        (queries,) = split_heads(projected, (held.count,), part.head_size)
        keys, values = step.cache.whole(block.number)
    else:
        heads = held.count * part.group_size
        if step.rotary is not None:
            projected = rotate(projected, heads + held.count, step.rotary, part.head_size)
        queries, keys, values = split_heads(projected, (heads, held.count, held.count), part.head_size)
        keys, values = step.cache.extend(block.number, keys, values)
    # A group's queries all see the same keys: they stand in for tokens.
    queries = queries.reshape(len(hidden), held.count, -1, part.head_size)
    context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=block.scale)
    return F.linear(context.reshape(len(hidden), 1, -1), held.output)
