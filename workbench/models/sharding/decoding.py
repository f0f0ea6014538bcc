"""One further token on a device's own units or columns (the paper stops at the latency of a token; this makes text of them)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.models.sharding.attention import rotate, split_heads
from workbench.models.sharding.held import HeldBlock
from workbench.models.sharding.layout import Block, StackLayout
from workbench.models.sharding.positions import Positions
from workbench.models.sharding.run import Step


def decode_attention(block: Block, part: StackLayout, held: HeldBlock, hidden: Tensor, step: Step, positions: Positions) -> Tensor:
    """Return the partial product (n, 1, d) of a self-attention, which adds to the cache, or a cross-attention, which reads it."""
    if not held.count:
        return torch.zeros_like(hidden)
    projected = F.linear(hidden, held.inputs[0], held.biases[0])
    if block.kind == "cross_attention":
        (queries,) = split_heads(projected, (held.count,), part.head_size)
        keys, values = step.cache.whole(block.number)
        mask = step.memory_padding
    else:
        heads = held.count * part.group_size
        if step.rotary is not None:
            projected = rotate(projected, heads + held.count, step.rotary, part.head_size)
        queries, keys, values = split_heads(projected, (heads, held.count, held.count), part.head_size)
        keys, values = step.cache.extend(block.number, keys, values)
        mask = positions.step_mask(block, held.ranges, step)
    # A group's queries all see the same keys: they stand in for tokens.
    queries = queries.reshape(len(hidden), held.count, -1, part.head_size)
    context = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=block.scale)
    return F.linear(context.reshape(len(hidden), 1, -1), held.output)


def decode_columns(held: HeldBlock, own: int, hidden: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the partial product (n, 1, d) of the first `own` of the columns that are held; more stand behind under scheme 2."""
    if not own:
        return torch.zeros_like(hidden)
    matrix, bias = held.inputs[0], held.biases[0]
    tops = range(0, len(matrix), held.count)  # gate and up, or up alone
    parts = [F.linear(hidden, matrix[top : top + own], None if bias is None else bias[top : top + own]) for top in tops]
    first = activation(parts[0])
    return F.linear(first if len(parts) == 1 else first * parts[1], held.output[:, :own])
