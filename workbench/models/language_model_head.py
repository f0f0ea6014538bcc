"""The frozen language model head of an encoder-decoder, which reads up(side) + b_L in sequence-to-sequence (PAC+, section IV-A)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.products import linear


class LanguageModelHead(nn.Module):
    """weight: (V, d), as a rule the word embedding itself.  bias: (V,) or None.  scale: of the hidden state (T5: d ** -0.5)."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, *, bias: Tensor | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.register_buffer("bias", bias)
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., d)."""
        return linear((hidden * self.scale).to(self.weight.dtype), self.weight, self.bias)

    def of_tokens(self, tokens: Sequence[int]) -> LanguageModelHead:
        """Return the head that predicts some tokens alone, c logits in their order."""
        chosen = list(tokens)
        return LanguageModelHead(
            self.weight.detach()[chosen].clone(), bias=None if self.bias is None else self.bias[chosen].clone(), scale=self.scale
        )


def head_scale(config: Any) -> float:
    """Return what a model multiplies its last hidden state by before its head."""
    return config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0


def head_of(model: Any) -> LanguageModelHead:
    """Return the head of a Hugging Face encoder-decoder; of its base model, which has none, the word embedding."""
    lm_head = getattr(model, "lm_head", None)
    weight = model.get_input_embeddings().weight if lm_head is None else lm_head.weight
    bias = getattr(model, "final_logits_bias", None)
    return LanguageModelHead(weight, bias=None if bias is None else bias[0], scale=head_scale(model.config))


def no_head(name: str) -> ConfigError:
    """Return the error of a model that has no decoder to read."""
    return ConfigError(
        f"Sequence-to-sequence on '{name}' was asked for.",
        "It has one stack of layers, no encoder and decoder.",
        "Choose a T5 or BART model, or another kind of target.",
    )
