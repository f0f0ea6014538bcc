"""Choose the matmul backend for forward passes, x W + b, by the processor.

On x86 PyTorch uses MKL for float32.  On AMD processors with AVX-512, MKL takes two to three times as long as oneDNN,
which PyTorch also includes.  The choice depends only on the processor and on sizes, never on a measurement, so a
resumed run computes the same results.  One such matmul is the frozen language model head of an encoder-decoder, which
reads up(side) + b_L (PAC+, section IV-A).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from workbench.models.families import family_of
from workbench.models.family import module_at

MANTISSA_BITS = 4
"""Significant binary digits in the number of rows passed to oneDNN, which compiles a kernel of about a megabyte for
each number.

Other row counts are padded, by an eighth at most.  A model pads once per pass instead of for each matmul
(`filled_length`).
"""
MOST_PADDING = 0.25
"""A pass's tokens are padded only if this increases them by no larger share."""


class ForwardLinear(nn.Linear):
    """An nn.Linear that computes with `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the output, (..., out), for inputs (..., in)."""
        return linear(inputs, self.weight, self.bias)


def processor() -> dict[str, Any]:
    """Return the processor's name and instructions, as PyTorch reports them; empty for PyTorch 2.10 and older, which do
    not.
    """
    return getattr(torch.cpu, "get_capabilities", dict[str, Any])()


@functools.cache
def prefers_onednn() -> bool:
    """Return whether oneDNN is faster on this machine's processor, as far as PyTorch identifies it."""
    features = processor() if torch.backends.mkldnn.is_available() else {}
    has_operator = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_operator and str(features.get("cpu_name", "")).startswith("AMD") and bool(features.get("avx512_f"))


def matmul_backend() -> str:
    """Return the name of the float32 matmul backend for forward passes."""
    return "oneDNN" if prefers_onednn() and torch.backends.mkldnn.enabled else "PyTorch's choice"


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, (..., out), like F.linear, for (..., in), (out, in) and (out,).  With autograd and for export
    it is F.linear.
    """
    rows = inputs.numel() // max(1, inputs.shape[-1])
    if not rows or weight.dtype != torch.float32 or not _by_onednn(inputs):
        return F.linear(inputs, weight, bias)
    if is_even(rows):
        return _product(inputs, weight, bias)
    step = 1 << rows.bit_length() - MANTISSA_BITS
    filled = F.pad(inputs.reshape(rows, -1), (0, 0, 0, -rows % step))
    return _product(filled, weight, bias)[:rows].view(*inputs.shape[:-1], -1)


def use_fastest(module: nn.Module) -> None:
    """Convert a module's plain linear layers to ForwardLinear.  Weights and names do not change."""
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = ForwardLinear


def is_even(num_rows: int) -> bool:
    """Return whether a number of rows is one of the few (eight between powers of two) that are passed to oneDNN."""
    return num_rows > 0 and num_rows.bit_length() - (num_rows & -num_rows).bit_length() < MANTISSA_BITS


def filled_length(hidden: Tensor) -> int:
    """Return the length to which hidden states (n, t, d) should be padded before the layers: t or slightly more."""
    count, length = hidden.shape[:2]
    if not _by_onednn(hidden):
        return length
    longest = int(length * (1 + MOST_PADDING))
    return next((more for more in range(length, longest + 1) if is_even(count * more)), length)


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return output


def _by_onednn(inputs: Tensor) -> bool:
    if torch.is_grad_enabled() or inputs.dtype != torch.float32 or not inputs.is_cpu or torch.compiler.is_compiling():
        return False
    return prefers_onednn() and bool(torch.backends.mkldnn.enabled)


def _linear_flops(inputs: Any, weight: Any, *rest: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * math.prod(out_shape) * int(inputs[-1])


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
    register_flop_formula(torch.ops.mkldnn._linear_pointwise)(_linear_flops)


class LanguageModelHead(nn.Module):
    """A language model head.

    weight: (V, d), usually the word embedding itself.  bias: (V,) or None.  scale: factor of the hidden state (T5: d **
    -0.5).
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.register_buffer("bias", bias)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) for hidden states (..., d)."""
        return linear((hidden * self.scale).to(self.weight.dtype), self.weight, self.bias)

    def of_tokens(self, tokens: Sequence[int]) -> LanguageModelHead:
        """Return a head that predicts only these tokens: c logits in their order."""
        chosen = list(tokens)
        return LanguageModelHead(
            self.weight.detach()[chosen].clone(),
            bias=None if self.bias is None else self.bias[chosen].clone(),
            scale=self.scale,
        )


class ProjectedHead(nn.Module):
    """The head of OPT-350m: a matrix projects hidden states to its narrower word embedding."""

    def __init__(self, projection: nn.Module, head: LanguageModelHead) -> None:
        super().__init__()
        self.projection, self.head = projection, head

    @property
    def weight(self) -> Any:
        """Return the head's weight."""
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) for hidden states (..., d)."""
        return self.head(self.projection(hidden))

    def of_tokens(self, tokens: Sequence[int]) -> ProjectedHead:
        """Return a head that predicts only these tokens."""
        return ProjectedHead(self.projection, self.head.of_tokens(tokens))


Head = LanguageModelHead | ProjectedHead


def head_bias_of(model: Any) -> Tensor | None:
    """Return the bias (V,) of a Hugging Face model's head, None without one."""
    path = family_of(model.config.model_type).head_bias
    parent, _, name = path.rpartition(".")
    bias = getattr(getattr(model, parent, None) if parent else model, name, None) if path else None
    return None if bias is None else bias.detach().flatten()


def head_of(model: Any) -> Head:
    """Return the head of a Hugging Face model that predicts words.  For a base model without one, return the word
    embedding.
    """
    lm_head = getattr(model, "lm_head", None)
    weight = model.get_input_embeddings().weight if lm_head is None else lm_head.weight
    family = family_of(model.config.model_type)
    bias = head_bias_of(model)
    head = LanguageModelHead(weight, bias=bias, scale=family.head_scale(model.config))
    projection = module_at(model.base_model, family.head_projection)
    return head if projection is None else ProjectedHead(projection, head)
