"""The dual-forwarding model in an exported program: 2q copies of theta in one buffer (P-RGE, section 3.3, Algorithm 2).

Each call recovers the last noise from the copies, applies the last step with its scalars, perturbs again and computes
all losses.
Copies and losses are ordered by sign, [+1 ... +q, -1 ... -q], so that the buffer is split only once.  One-sided, theta
itself is first: [0, +1 ... +q].

The backbone is written in operations that XNNPACK supports, so that all layers form one XNNPACK part instead of dozens.
Norms: XNNPACK has no mean over the last dimension, but a product with a vector of 1/d computes it.  Attention: XNNPACK
does not broadcast heads, but grouped queries can be rows of the same product; the causal mask is added as numbers, once
for all layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.methods.p_rge.inference_engine.config import EngineConfig
from workbench.methods.p_rge.zeroth_order.causal_model import CausalModel
from workbench.models.family import FULL, epsilon_of
from workbench.models.layer_inputs import LayerContext, call_layer, embed, rotary_tables

_ATTENTION = "workbench_inference_engine"
MASKED = -1e9
"""Added to masked scores.  -inf would be exact, but gives NaN where kernels subtract it from itself."""


class ProductNorm(nn.Module):
    """LayerNorm, or RMSNorm if `centers` is False, with means computed as products.  weight, bias: (d,), bias may be
    None.
    """

    share: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, epsilon: float, *, centers: bool) -> None:
        super().__init__()
        self.register_buffer("share", torch.full((1, len(weight)), 1 / len(weight)))
        self.register_buffer("weight", weight.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.epsilon, self.centers = epsilon, centers

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed x, (..., d)."""
        if self.centers:
            x = x - F.linear(x, self.share)
        y = x * torch.rsqrt(F.linear(x * x, self.share) + self.epsilon) * self.weight
        return y if self.bias is None else y + self.bias


def exportable(model: CausalModel) -> CausalModel:
    """Return a copy of a model that shares its weights and is rewritten for export.

    Raises ConfigError if the model is not a complete causal one in float32 with LoRA-FA.
    """
    stage = model.backbone
    if not (stage.family.is_causal and model.is_first and model.is_last):
        raise _refused("a whole decoder-only model", type(next(iter(stage.layers.values()))).__name__)
    if set(stage.patterns) != {FULL}:
        raise _refused("a model whose layers attend to all earlier tokens", "one with windows")
    if model.config.technique != "lora_fa":
        raise _refused("a model with LoRA-FA", f"technique '{model.config.technique}'")
    if model.dtype != torch.float32 or any(type(module).__name__.startswith("Quantized") for module in model.modules()):
        raise _refused("a model in float32 without quantization", f"a quantized model, or one in {model.dtype}")
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for module in list(copied.modules()):
        for name, child in module.named_children():
            norm = _norm_of(child, adds_one=stage.family.norm_adds_one)
            if norm is not None:
                module.register_module(name, norm)
    return copied


def _norm_of(module: Any, *, adds_one: bool) -> ProductNorm | None:
    if type(module) is nn.LayerNorm and module.weight is not None:
        return ProductNorm(module.weight, module.bias, module.eps, centers=True)
    if type(module).__name__.endswith("RMSNorm"):
        weight = module.weight + 1 if adds_one else module.weight
        return ProductNorm(weight, None, epsilon_of(module), centers=False)
    return None


@contextmanager
def engine_attention(model: CausalModel) -> Iterator[None]:
    """Make a model's layers call `attention` while they are traced."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attention)
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    attention_configs = [config for config in configs.values() if hasattr(config, "_attn_implementation")]
    before = [config._attn_implementation for config in attention_configs]
    try:
        for config in attention_configs:
            config._attn_implementation = _ATTENTION
        yield
    finally:
        for config, name in zip(attention_configs, before, strict=True):
            config._attn_implementation = name


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention output, (n, t, heads, s), computed with three-dimensional products.

    query: (n, heads, t, s).  key, value: (n, groups, t, s), each group read by heads / groups heads.  attention_mask:
    (t, t), added.
    """
    count, heads, length, size = query.shape
    groups = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    rows = query.reshape(count * groups, heads // groups * length, size)
    scores = torch.bmm(rows, key.reshape(count * groups, length, size).transpose(1, 2)) * scale
    if attention_mask is not None:
        scores = (scores.view(count * groups, heads // groups, length, length) + attention_mask).view(scores.shape)
    context = torch.bmm(torch.softmax(scores, dim=-1), value.reshape(count * groups, length, size))
    return context.view(count, heads, length, size).transpose(1, 2), None


def _refused(requirement: str, actual: str) -> ConfigError:
    return ConfigError(
        "A program of the inference engine was asked for.",
        f"It needs {requirement}; this is {actual}.",
        "Load such a model.",
    )


STATE = "copies"
"""The buffer's name in all methods, which share it by this name.

No argument's name may contain it: such an argument would start with its exported values and accept no others.
"""


class TrainStep(nn.Module):
    """One training step.  model: a model rewritten for export.  copies: (P, D) float32, 2q or q + 1 of theta."""

    copies: Tensor
    shares: Tensor
    mask: Tensor
    rotary: tuple[Tensor, Tensor] | None

    def __init__(self, model: CausalModel, config: EngineConfig, copies: Tensor) -> None:
        super().__init__()
        self.model, self.config = model, config
        head: Any = model.head
        self.head = head.of_tokens(config.choices) if config.choices else head
        self.register_buffer(STATE, copies)
        length = config.sequence_length
        self.register_buffer("shares", torch.full((1, 1, len(copies)), 1 / len(copies)), persistent=False)
        self.register_buffer("mask", torch.full((length, length), MASKED).triu(1), persistent=False)
        self.rotary = None
        positions = torch.arange(length)[None]
        tables = rotary_tables(model.backbone.rotary, torch.zeros(1, length, 1), positions, FULL)
        if tables is not None:
            self.register_buffer("cosines", tables[0], persistent=False)
            self.register_buffer("sines", tables[1], persistent=False)
            self.rotary = tables

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor,
        positions: Tensor,
        target_weights: Tensor,
        gradients: Tensor,
        learning_rate: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        """Apply the last step and return the losses (P,) float32 of the new copies.

        input_ids: (E, t) int64.  targets, positions: (E, k) int64; a target is a token, or its index among the choices
        if there are any.
        target_weights: (E k, 1) float32, the negative share of each target in the loss.
        gradients: (q,) g_i of the last step.  learning_rate: (1,), the last step's.  noise: (q, D), None to draw it
        here.
        """
        config, queries = self.config, self.config.queries
        has_base = config.rule.has_base
        if has_base:
            perturbation, middle = self.copies[1:] - self.copies[:1], self.copies[None, :1]
        else:
            perturbation = (self.copies[:queries] - self.copies[queries:]) * 0.5
            # The mean over all copies, so that rounding does not make their centres drift apart.
            middle = torch.bmm(self.shares, self.copies[None])
        scale = (gradients * learning_rate * (1 / (config.epsilon * queries))).view(1, 1, queries)
        theta = (middle - torch.bmm(scale, perturbation[None])).view(1, -1)
        if noise is None:
            noise = torch.randn((queries, perturbation.shape[1]))
        fresh = noise * config.epsilon
        copies = torch.cat([theta, theta + fresh] if has_base else [theta + fresh, theta - fresh])
        self.copies.copy_(copies)
        return self.losses(copies, input_ids, targets, positions, target_weights)

    def losses(
        self, copies: Tensor, input_ids: Tensor, targets: Tensor, positions: Tensor, target_weights: Tensor
    ) -> Tensor:
        """Return the loss (P,) for each of P copies (P, D) of theta."""
        stage, parts = self.model.backbone, copies.shape[0]
        self.model.trainables.bind(copies)
        assert stage.embedding is not None
        hidden = embed(stage.family, stage.config, stage.embedding, input_ids).repeat(parts, 1, 1)
        context = LayerContext(mask=self.mask, rotary=self.rotary)
        for layer in stage.layers.values():
            hidden = call_layer(layer, hidden, context)
        places = positions.repeat(parts, 1)[:, :, None].expand(-1, -1, hidden.shape[-1])
        hidden = hidden.gather(1, places)
        logits = self.head(hidden if stage.final is None else stage.final(hidden))
        log_likelihoods = F.log_softmax(logits, dim=-1).gather(2, targets.repeat(parts, 1)[:, :, None])
        return torch.mm(log_likelihoods.view(parts, -1), target_weights).view(parts)


class _State(nn.Module):
    copies: Tensor

    def __init__(self, copies: Tensor) -> None:
        super().__init__()
        self.register_buffer(STATE, copies)


class ReadState(_State):
    """Returns the copies."""

    def forward(self) -> Tensor:
        """Return (P, D)."""
        return self.copies.clone()


class WriteState(_State):
    """Sets the copies."""

    def forward(self, values: Tensor) -> Tensor:
        """Set the buffer to (P, D).  Returns its first value, because a method must return something."""
        self.copies.copy_(values)
        return values[0, :1].clone()
