"""A model's shape, known without its weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from workbench.models.stack import LayerStack

UNLIMITED_LENGTH = 512
"""Length for models without a limit, such as those with relative positions.  T5 was trained on this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model's shape.

    num_layers: of both stacks in an encoder-decoder.  num_encoder_layers: of its encoder, None for a single stack.
    embedding_parameters: before the layers; decoder_embedding_parameters: between an encoder-decoder's two stacks.  Shared word embeddings
    are counted once, with the first stack; T5's position tables count as embedding.
    num_key_value_heads: fewer than num_heads with grouped-query attention.  is_gated: two up projections (Llama's SwiGLU).
    shares_words: whether an encoder-decoder's two stacks share one word embedding.
    """

    name: str
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    feed_forward_size: int
    vocabulary_size: int
    max_length: int
    is_causal: bool
    is_gated: bool
    embedding_parameters: int
    num_encoder_layers: int | None = None
    decoder_embedding_parameters: int = 0
    shares_words: bool = False


def facts_of(name: str, model: Any) -> ModelFacts:
    """Return the facts of a Hugging Face base model, which may be on the meta device."""
    config, stack = model.config, LayerStack(model)
    paths = stack.layer_paths(0)
    # GPT-2's Conv1D stores (in, out), Linear stores (out, in): the side that differs from d is the feed-forward size.
    up: Any = stack.layers[0].get_submodule(paths["up"])
    images: Any = model.get_submodule("embeddings") if stack.family.reads_images else None
    longest = getattr(config, "max_position_embeddings", None) if images is None else images.position_embeddings.shape[1]
    return ModelFacts(
        name=name,
        family=config.model_type,
        num_layers=stack.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        feed_forward_size=up.weight.numel() // config.hidden_size,
        vocabulary_size=getattr(config, "vocab_size", 0),
        max_length=longest or UNLIMITED_LENGTH,
        is_causal=stack.is_causal,
        is_gated="gate" in paths,
        embedding_parameters=_count((stack.embedding, stack.position_bias)),
        num_encoder_layers=stack.num_encoder_layers,
        decoder_embedding_parameters=_count((stack.decoder_embedding, stack.decoder_position_bias), without=stack.embedding),
        shares_words=stack.shares_words,
    )


def _count(modules: Iterable[nn.Module | None], *, without: nn.Module | None = None) -> int:
    left_out = set() if without is None else {id(parameter) for parameter in without.parameters()}
    found = {id(parameter): parameter.numel() for module in modules if module is not None for parameter in module.parameters()}
    return sum(count for key, count in found.items() if key not in left_out)
