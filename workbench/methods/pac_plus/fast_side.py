"""Hand-written forward and backward pass of the side network: the same results as autograd in less time (PAC+, section
IV-A).

At d / r = 48 channels a step has hundreds of operations of some tens of microseconds each.  Autograd's bookkeeping,
copies and launches cost as much as the matmuls.  Here tokens are packed (only attention scores see padding), each
matmul adds its weight gradient in place, attention is plain batched matmuls, and a tap is projected in the dtype in
which the cache stores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.models.matmul import processor
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.models.side_layers import TOKEN_KINDS, Packing, SideHead, SideLayer, TapProjection

_aten = torch.ops.aten

Normed = tuple[Tensor, Tensor, Tensor]
"""A layer norm's result (N, w), and the mean and inverse standard deviation (N, 1) for its backward pass."""


@dataclass(slots=True)
class _LayerContext:
    """Saved tensors for a layer's backward pass.  N packed tokens, w = d / r, h heads."""

    difference: Tensor  # (N, w): W_down b - a
    mixed: Tensor  # (N, w)
    first_norm: Normed
    heads: Tensor  # (3, n * h, t, w / h): queries, keys, values
    probabilities: Tensor  # (n * h, t, t)
    attended: Tensor  # (N, w)
    between: Tensor  # (N, w)
    second_norm: Normed
    expanded: Tensor  # (rounded N, 4 w), before the activation; 0 after the last token
    activated: Tensor  # (rounded N, 4 w)

    @property
    def nbytes(self) -> int:
        """Return the total bytes."""
        norms = [norm[0] for norm in (self.first_norm, self.second_norm)]
        tensors = (
            self.difference,
            self.mixed,
            self.heads,
            self.probabilities,
            self.attended,
            self.between,
            self.expanded,
            self.activated,
        )
        return sum(tensor.nbytes for tensor in (*tensors, *norms))


@dataclass(slots=True)
class FastContext:
    """Saved tensors for `backward`: the batch's packing and taps, each layer's lambda and intermediate results."""

    packing: Packing
    taps: Sequence[Tensor]
    mixes: list[float]
    layers: list[_LayerContext]

    @property
    def nbytes(self) -> int:
        """Return the bytes stored between the two passes, without the taps."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(slots=True)
class HeadContext:
    """Saved tensors for the head's backward pass.  pooled: (n, w), a leaf of the autograd graph of the loss."""

    packing: Packing
    side: Tensor
    norm: Normed
    pooled: Tensor


def unsupported(adapter: ParallelAdapterStage) -> str:
    """Return why an adapter has no fast path.  '' if it has one."""
    config = adapter.config
    if config.num_encoder_layers is not None:
        return "it is an encoder-decoder"
    if adapter.last is not None and (not isinstance(adapter.last, SideHead) or config.kind in TOKEN_KINDS):
        return "its head does not pool"
    if any(parameter.device.type != "cpu" or parameter.dtype != torch.float32 for parameter in adapter.parameters()):
        return "it is not of float32 on a CPU"
    return ""


def multiplies_bfloat16() -> bool:
    """Return whether this processor has bfloat16 matmul instructions; without them bfloat16 is many times slower than
    float32.
    """
    capabilities = processor()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


class FastSide:
    """The layers of a ParallelAdapterStage without autograd, and the per-token part of its head.

    Gradients are added to the parameters' `grad`, which is created if missing.
    """

    def __init__(self, adapter: ParallelAdapterStage, *, in_bfloat16: bool | None = None) -> None:
        """in_bfloat16: multiply bfloat16 taps directly; False converts them to float32; None decides by the processor's
        instructions.

        Raises ValueError for an adapter that has no fast path (see `unsupported`).
        """
        reason = unsupported(adapter)
        if reason:
            raise ValueError(f"there is no fast path for this adapter: {reason}")
        self._in_bfloat16 = multiplies_bfloat16() if in_bfloat16 is None else in_bfloat16
        self._layers: list[SideLayer] = list(adapter.layers.values())
        self._first = adapter.first
        self._last = adapter.last if isinstance(adapter.last, SideHead) else None
        self._projections: list[TapProjection] = [layer.down for layer in self._layers]
        if self._first is not None:
            self._projections.insert(0, self._first)
        self._heads, self._is_causal = adapter.config.heads, adapter.config.is_causal
        for parameter in adapter.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def packing(self, attention_mask: Tensor) -> Packing:
        """Return the packing of a batch with the mask (n, t), 1 for real tokens."""
        return Packing.of(attention_mask, self._heads, is_causal=self._is_causal)

    @torch.no_grad()
    def forward(self, side: Tensor | None, taps: Sequence[Tensor], packing: Packing) -> tuple[Tensor, FastContext]:
        """Return the side output (N, w) and the saved tensors for `backward`.

        side: the previous stage's side output (N, w), None in the first stage.  taps: (N, d) each, b_0 first in the
        first stage.
        """
        # float32 matmuls compile no kernels.
        taps = [
            _with_rounded_rows(tap) if self._in_bfloat16 and tap.dtype == torch.bfloat16 else tap.float()
            for tap in taps
        ]
        weights, biases = self._folded(taps[0].dtype)
        tokens = packing.num_tokens
        projected = (
            _project(tap, weight, bias)[:tokens] for tap, weight, bias in zip(taps, weights, biases, strict=True)
        )
        side = next(projected) if side is None else side
        mixes = torch.stack([layer.mix for layer in self._layers]).tolist()
        contexts = []
        for layer, mix, down in zip(self._layers, mixes, projected, strict=True):
            side, context = self._layer_forward(layer, side, down.sub_(side), mix, packing)
            contexts.append(context)
        return side, FastContext(packing, taps, mixes, contexts)

    @torch.no_grad()
    def backward(self, context: FastContext, gradient: Tensor) -> Tensor | None:
        """Backpropagate the side output's gradient (N, w), adding to the parameters' gradients.  Returns the gradient
        of the side input.

        None in the first stage.
        """
        width, hidden = self._projections[0].weight.shape
        weight_sums = torch.empty(len(self._projections), width, hidden)
        bias_sums = torch.empty(len(self._projections), width)
        index = len(self._projections)
        for layer, mix, layer_context in zip(
            reversed(self._layers), reversed(context.mixes), reversed(context.layers), strict=True
        ):
            index -= 1
            gradient = self._layer_backward(layer, layer_context, gradient, context.packing)
            # A sum of products, because `dot` accumulates rounding errors.
            _grad_of(layer.mix).add_((gradient * layer_context.difference).sum())
            _outer(gradient, context.taps[index], weight_sums[index], bias_sums[index])
            weight_sums[index] *= mix
            bias_sums[index] *= mix
            gradient = gradient.mul_(1 - mix)
        if self._first is not None:
            _outer(gradient, context.taps[0], weight_sums[0], bias_sums[0])
        self._unfold(weight_sums, bias_sums)
        return None if self._first is not None else gradient

    def head(
        self, side: Tensor, last_tap: Tensor, packing: Packing, sample_ids: Tensor, epoch: int
    ) -> tuple[Tensor, HeadContext]:
        """Return the logits (n, num_outputs), with autograd back to the pooled features, and the saved tensors for
        `head_backward`.

        side: (N, w), last_tap: (N, d), sample_ids: (n,) int64, as in SideHead.
        """
        head = self._last
        assert head is not None, "this stage has no head"
        with torch.no_grad():
            norm = _norm_forward(head.norm, side)
            last = (torch.mm(packing.share, last_tap.to(side.dtype)) - head.mean) * head.inverse_std
            pooled = torch.mm(packing.share, norm[0])
        logits = head.finish(pooled.requires_grad_(), last, sample_ids, epoch)
        return logits, HeadContext(packing, side, norm, pooled)

    @torch.no_grad()
    def head_backward(self, context: HeadContext) -> Tensor:
        """Return the gradient of the side output (N, w), after autograd has computed the gradient of the pooled
        features.
        """
        assert self._last is not None and context.pooled.grad is not None
        gradient = torch.mm(context.packing.share.t(), context.pooled.grad)
        return _norm_backward(self._last.norm, context.norm, context.side, gradient)

    def _folded(self, dtype: torch.dtype) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each projection's weight (w, d) in the taps' dtype and bias (w,), including the standardisation (see
        TapProjection).
        """
        weight = torch.stack([down.weight for down in self._projections])
        weight *= torch.stack([down.inverse_std for down in self._projections])[:, None]
        means = torch.stack([down.mean for down in self._projections])
        bias = torch.stack([down.bias for down in self._projections]) - torch.bmm(weight, means[:, :, None]).squeeze(2)
        return weight.to(dtype).unbind(), bias.unbind()

    def _unfold(self, weight_sums: Tensor, bias_sums: Tensor) -> None:
        """Convert gradients of the folded weights (projections, w, d) and biases (projections, w), and add them to the
        parameters'.
        """
        means = torch.stack([down.mean for down in self._projections])
        weight_sums.baddbmm_(bias_sums[:, :, None], means[:, None], alpha=-1)
        weight_sums *= torch.stack([down.inverse_std for down in self._projections])[:, None]
        for down, weight, bias in zip(self._projections, weight_sums, bias_sums, strict=True):
            _grad_of(down.weight).add_(weight)
            _grad_of(down.bias).add_(bias)

    def _layer_forward(
        self, layer: SideLayer, side: Tensor, difference: Tensor, mix: float, packing: Packing
    ) -> tuple[Tensor, _LayerContext]:
        tokens, width = side.shape
        head_width = width // self._heads
        mixed = torch.add(side, difference, alpha=mix)
        first_norm = _norm_forward(layer.attention_norm, mixed)
        fused = _linear_forward(layer.query_key_value, first_norm[0])
        heads = fused.view(-1, head_width).index_select(0, packing.to_heads).view(3, -1, packing.length, head_width)
        query, key, value = heads.unbind()
        probabilities = torch.softmax(_scores_of(query, key, packing.score_bias), dim=-1)
        weighted = torch.bmm(probabilities, value)
        attended = weighted.view(-1, head_width).index_select(0, packing.from_heads).view(tokens, width)
        between = _linear_forward(layer.attention_output, attended).add_(mixed)
        second_norm = _norm_forward(layer.feed_forward_norm, between)
        expanded = _empty_with_zeros_behind(tokens, layer.expand.out_features)
        torch.addmm(layer.expand.bias, second_norm[0], layer.expand.weight.t(), out=expanded[:tokens])
        activated = F.gelu(expanded)
        output = _linear_forward(layer.contract, activated[:tokens]).add_(between)
        return output, _LayerContext(
            difference, mixed, first_norm, heads, probabilities, attended, between, second_norm, expanded, activated
        )

    def _layer_backward(self, layer: SideLayer, context: _LayerContext, gradient: Tensor, packing: Packing) -> Tensor:
        """Return the gradient of `mixed` (N, w), given the gradient of the layer's output, which is overwritten."""
        tokens, width = gradient.shape
        head_width = width // self._heads
        inner = _empty_with_zeros_behind(tokens, layer.expand.out_features)
        _linear_backward(layer.contract, gradient, context.activated[:tokens], out=inner[:tokens])
        inner = _aten.gelu_backward(inner, context.expanded)[:tokens]
        inner = _linear_backward(layer.expand, inner, context.second_norm[0])
        gradient = _norm_backward(layer.feed_forward_norm, context.second_norm, context.between, inner).add_(gradient)
        # One extra row of zeros for padded queries, so that the tokens they attend to get no gradient from them.
        inner = gradient.new_zeros(tokens + 1, width)
        _linear_backward(layer.attention_output, gradient, context.attended, out=inner[:tokens])
        value_gradient = (
            inner.view(-1, head_width).index_select(0, packing.to_padded_heads).view(-1, packing.length, head_width)
        )
        query, key, value = context.heads.unbind()
        heads = torch.empty_like(context.heads)
        torch.bmm(context.probabilities.transpose(1, 2), value_gradient, out=heads[2])
        scores = torch.bmm(value_gradient, value.transpose(1, 2))
        scores = _aten._softmax_backward_data(scores, context.probabilities, -1, scores.dtype)
        scores *= head_width**-0.5
        torch.bmm(scores, key, out=heads[0])
        torch.bmm(scores.transpose(1, 2), query, out=heads[1])
        fused = heads.view(-1, head_width).index_select(0, packing.from_all_heads).view(tokens, 3 * width)
        inner = _linear_backward(layer.query_key_value, fused, context.first_norm[0])
        return _norm_backward(layer.attention_norm, context.first_norm, context.mixed, inner).add_(gradient)


# The operations.  Each adds its weight gradients in place, and compiles few kernels.  oneDNN, used for GELU and
# bfloat16 matmuls,
# compiles a kernel for every new shape and keeps a thousand of them, a quarter of a megabyte each: hundreds of MB if
# every batch has
# another number of tokens.  Therefore these operations round the number of rows up to a few sizes.


def rounded(num_rows: int) -> int:
    """Round up to one of few sizes: multiples of 16 and of 1/16 of the next power of two; at most an eighth larger from
    128 on.
    """
    step = max(16, 1 << (num_rows - 1).bit_length() >> 4) if num_rows else 16
    return -(-num_rows // step) * step


def _grad_of(parameter: Tensor) -> Tensor:
    """Return the tensor in which a parameter's gradient accumulates."""
    assert parameter.grad is not None
    return parameter.grad


def _empty_with_zeros_behind(num_rows: int, width: int) -> Tensor:
    """Return an uninitialized tensor (rounded rows, width) whose rows after `num_rows` are zero."""
    rows = torch.empty(rounded(num_rows), width)
    rows[num_rows:].zero_()
    return rows


def _with_rounded_rows(rows: Tensor) -> Tensor:
    """Return the rows, zero-padded to a rounded number."""
    return F.pad(rows, (0, 0, 0, rounded(len(rows)) - len(rows)))


def _project(tap: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return W_down b, (N, w) float32, computed in the tap's dtype."""
    if tap.dtype == bias.dtype:
        return torch.addmm(bias, tap, weight.t())
    return torch.mm(tap, weight.t()).to(bias.dtype).add_(bias)


def _outer(gradient: Tensor, tap: Tensor, weight_sum: Tensor, bias_sum: Tensor) -> None:
    """Write the gradients of a projection's weight (w, d) and bias (w,)."""
    torch.sum(gradient, dim=0, out=bias_sum)
    if tap.dtype == gradient.dtype:
        torch.mm(gradient.t(), tap, out=weight_sum)
    else:
        weight_sum.copy_(torch.mm(_with_rounded_rows(gradient.to(tap.dtype)).t(), tap))


def _linear_forward(linear: nn.Linear, inputs: Tensor) -> Tensor:
    """Return (N, out) of inputs (N, in)."""
    return torch.addmm(linear.bias, inputs, linear.weight.t())


def _linear_backward(linear: nn.Linear, gradient: Tensor, inputs: Tensor, out: Tensor | None = None) -> Tensor:
    """Add the gradients of weight and bias, and return the gradient of the inputs."""
    _grad_of(linear.weight).addmm_(gradient.t(), inputs)
    _grad_of(linear.bias).add_(gradient.sum(dim=0))
    return torch.mm(gradient, linear.weight, out=out)


def _norm_forward(norm: nn.LayerNorm, inputs: Tensor) -> Normed:
    """Return the normed inputs (N, w), with the saved tensors for the backward pass."""
    return _aten.native_layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _norm_backward(norm: nn.LayerNorm, normed: Normed, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Add the gradients of weight and bias, and return the gradient of the inputs."""
    result, weight, bias = _aten.native_layer_norm_backward(
        gradient, inputs, norm.normalized_shape, *normed[1:], norm.weight, norm.bias, [True, True, True]
    )
    _grad_of(norm.weight).add_(weight)
    _grad_of(norm.bias).add_(bias)
    return result


def _scores_of(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Return scaled and masked scores (n * h, t, t)."""
    scale = query.shape[-1] ** -0.5
    if bias is None:
        return torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    return torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale)
