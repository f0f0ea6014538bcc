"""Models that are trained by forward passes, by name: backbone, head and what is trained; a pipeline stage reads its own weights only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workbench.core.allocator import keep_freed_memory
from workbench.models.families import family_of, words_of
from workbench.models.language_model_head import LanguageModelHead, head_of
from workbench.models.loading import (
    load_language_model_head,
    load_model,
    load_stage,
    load_tokenizer,
    model_config,
    model_from_config,
    stored_weights,
)
from workbench.models.partial_loading import parameters_on_meta
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import LayerStack, module_at
from workbench.models.zeroth_order.causal_model import CausalModel
from workbench.models.zeroth_order.config import TrainableConfig
from workbench.models.zeroth_order.injection import sizes_of


class ProjectedHead(nn.Module):
    """A head behind the matrix that leads from OPT-350m's layers back to its narrower words."""

    def __init__(self, projection: nn.Module, head: LanguageModelHead) -> None:
        super().__init__()
        self.projection, self.head = projection, head

    @property
    def weight(self) -> Any:
        """Return the head's weight."""
        return self.head.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., d)."""
        return self.head(self.projection(hidden))

    def of_tokens(self, tokens: Sequence[int]) -> ProjectedHead:
        """Return the head that predicts some tokens alone."""
        return ProjectedHead(self.projection, self.head.of_tokens(tokens))


def load_causal_model(
    name: str, config: TrainableConfig, *, quantization: QuantizationConfig | None = None, dtype: torch.dtype = torch.float32
) -> CausalModel:
    """Return a whole model with trainable values put in.

    quantization: of the frozen backbone.  dtype: of weights and activations without it.
    This process keeps freed memory from then on (see keep_freed_memory).
    Raises ConfigError and MissingDataError as load_stack does, and ConfigError as CausalModel and quantize do.
    """
    stack, head = load_backbone(name, dtype)
    return _made(stack.stage(0, stack.num_layers), head, config, quantization)


def load_causal_stage(
    name: str,
    start: int,
    stop: int,
    config: TrainableConfig,
    *,
    quantization: QuantizationConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> CausalModel:
    """Return layers [start, stop) of a model, with the embedding or the head if they begin or end it; options as in load_causal_model.

    Its trainable values, their noise and the frozen matrices are those of the whole model's layers.
    """
    skeleton = _skeleton(name)
    stage = load_stage(name, start, stop, dtype, after_layer=None if quantization is None else lambda layer: quantize(layer, quantization))
    head = _stage_head(name, dtype) if stop == skeleton.num_layers else None
    model = _made(stage, head, config, quantization)
    if start and config.technique != "full":
        model.trainables.preceding = sizes_of(skeleton.stage(0, start), config)
    return model


def load_backbone(name: str, dtype: torch.dtype = torch.float32) -> tuple[LayerStack, nn.Module | None]:
    """Return a model's stack and its language model head, None if it predicts no words.  Raises as load_stack does."""
    model = load_model(name, dtype)
    family = family_of(model.config.model_type)
    separator_id = load_tokenizer(name).separator_id if family.has_token_types else None
    stack = LayerStack(model.base_model, separator_id=separator_id)
    if not family.is_causal and family.decoder is None:
        return stack, None
    head: nn.Module = head_of(model)
    projection = module_at(model.base_model, "decoder.project_out") if model.config.model_type == "opt" else None
    return stack, head if projection is None else ProjectedHead(projection, head)


def _made(stage: Any, head: nn.Module | None, config: TrainableConfig, quantization: QuantizationConfig | None) -> CausalModel:
    keep_freed_memory()
    # Together, because a head that is the word embedding stays so.
    frozen = nn.ModuleList([stage] if head is None else [stage, head]).requires_grad_(False)
    if quantization is not None:
        quantize(frozen, quantization)
    return CausalModel(stage, None if head is None else frozen[1], config)


def _skeleton(name: str) -> LayerStack:
    """Return a model's stack without the memory for its weights."""
    with parameters_on_meta():
        return LayerStack(model_from_config(model_config(name)))


def _stage_head(name: str, dtype: torch.dtype) -> nn.Module | None:
    """Return a model's language model head, read alone where its files allow it."""
    config = model_config(name)
    family = family_of(config.model_type)
    if family.decoder is not None:
        return load_language_model_head(name, dtype)
    if not family.is_causal:
        return None
    tensors = stored_weights(name)
    words = words_of(family.embedding)
    # A head of its own in the files is the head, whatever the configuration ties: so transformers reads it.
    names = ["lm_head.weight"]
    if config.tie_word_embeddings:
        names += [f"{words}.weight", f"model.{words}.weight", f"transformer.{words}.weight"]
    found = next((tensors[own] for own in names if own in tensors), None) if tensors else None
    if found is None or found.shape != (config.vocab_size, config.hidden_size):
        return load_backbone(name, dtype)[1]
    return LanguageModelHead(found.read(dtype))
