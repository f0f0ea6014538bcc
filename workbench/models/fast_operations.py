"""The operations of which FastSide is made: each adds its weights' gradients where they are kept, and compiles little.

oneDNN, behind GELU and products of bfloat16, compiles a kernel for every new shape and keeps a thousand of them, a quarter of a
megabyte each: hundreds of MB, where every batch has another number of tokens.  So these operations see rows rounded up to few sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_aten = torch.ops.aten


@dataclass(slots=True)
class Normed:
    """A layer norm's result (N, w), and the mean and inverse deviation (N, 1) that its backward pass needs."""

    output: Tensor
    mean: Tensor
    inverse_deviation: Tensor


def rounded(num_rows: int) -> int:
    """Return the next of few sizes: multiples of a sixteenth of the power of two above, and of 16; at most an eighth larger from 128 on."""
    step = max(16, 1 << (num_rows - 1).bit_length() >> 4) if num_rows else 16
    return -(-num_rows // step) * step


def grad_of(parameter: Tensor) -> Tensor:
    """Return where a parameter's gradient is added up."""
    assert parameter.grad is not None
    return parameter.grad


def empty_with_zeros_behind(num_rows: int, width: int) -> Tensor:
    """Return (rounded rows, width), of which those behind `num_rows` are zero and the others are to be written."""
    made = torch.empty(rounded(num_rows), width)
    made[num_rows:].zero_()
    return made


def with_rounded_rows(rows: Tensor) -> Tensor:
    """Return the rows with zeros behind them."""
    return F.pad(rows, (0, 0, 0, rounded(len(rows)) - len(rows)))


def project(tap: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return W_down b, (N, w) float32, the product in the tap's own type."""
    if tap.dtype == bias.dtype:
        return torch.addmm(bias, tap, weight.t())
    return torch.mm(tap, weight.t()).to(bias.dtype).add_(bias)


def outer(gradient: Tensor, tap: Tensor, weight_sum: Tensor, bias_sum: Tensor) -> None:
    """Write the gradients of a projection's weight (w, d) and bias (w,)."""
    torch.sum(gradient, dim=0, out=bias_sum)
    if tap.dtype == gradient.dtype:
        torch.mm(gradient.t(), tap, out=weight_sum)
    else:
        weight_sum.copy_(torch.mm(with_rounded_rows(gradient.to(tap.dtype)).t(), tap))


def linear_forward(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Return (N, out) of inputs (N, in)."""
    return torch.addmm(linear.bias, inputs, linear.weight.t())


def linear_backward(linear: nn.Linear, gradient: Tensor, inputs: Tensor, out: Tensor | None = None) -> Tensor:
    """Add the gradients of weight and bias, and return that of the inputs."""
    grad_of(linear.weight).addmm_(gradient.t(), inputs)
    grad_of(linear.bias).add_(gradient.sum(dim=0))
    return torch.mm(gradient, linear.weight, out=out)


def norm_forward(norm: nn.LayerNorm, inputs: Tensor) -> Normed:
    """Return the normed inputs (N, w), with what the backward pass needs."""
    return Normed(*_aten.native_layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps))


def norm_backward(norm: nn.LayerNorm, normed: Normed, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Add the gradients of weight and bias, and return that of the inputs."""
    result, weight, bias = _aten.native_layer_norm_backward(
        gradient, inputs, norm.normalized_shape, normed.mean, normed.inverse_deviation, norm.weight, norm.bias, [True, True, True]
    )
    grad_of(norm.weight).add_(weight)
    grad_of(norm.bias).add_(bias)
    return result


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return scaled and masked scores (n * h, t, t)."""
    scale = query.shape[-1] ** -0.5
    if bias is None:
        return torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    return torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
