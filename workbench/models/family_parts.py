"""How the layers and embeddings of each Hugging Face architecture are called, all in one form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

from workbench.core.errors import ConfigError

POSITION_OFFSET = 2
"""The first rows of BART's and OPT's position tables belong to no position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What every layer of a batch needs beside its input.

    mask: (n, 1, t, t) bool, True where a query may look; None if it may look everywhere its family allows.
    rotary: cosines and sines, (1, t, head size) each; None for families without them.
    position_bias: (1, heads, t, t), added to the attention scores; None for families without it.
    memory: (n, t, d), the encoder's output for a decoder's layers.  memory_mask: (n, 1, s, t) bool, None without padding.
    """

    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None = None
    position_bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


Embed = Callable[[Mapping[str, nn.Module], Tensor, Tensor | None], Tensor]
"""(embedding modules by role, ids (n, t), token types (n, t) or None) -> b_0 (n, t, d)."""

Call = Callable[[nn.Module, Tensor, LayerContext], Tensor]
"""(layer, hidden (n, t, d), context) -> hidden."""


def embed_bert(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    """Call BERT's embedding."""
    return modules["embeddings"](input_ids=ids, token_type_ids=token_types)


def embed_distilbert(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    """Call DistilBERT's embedding."""
    return modules["embeddings"](ids)


def words_of(modules: Mapping[str, nn.Module]) -> Any:
    """Return the word embedding among a stack's embedding modules."""
    return next(module for role, module in modules.items() if role in ("words", "embed_tokens", "wte"))


def embed_words(modules: Mapping[str, nn.Module], ids: Tensor, token_types: Tensor | None) -> Tensor:
    """Look up the words, and do what the family's modules ask for; Llama and T5 have their positions in the attention.

    OPT-350m keeps its words narrower than d and projects them up.  GPT-2, OPT and BART add learned positions, and BART normalises.
    """
    hidden = words_of(modules)(ids)
    if "project_in" in modules:
        hidden = modules["project_in"](hidden)
    for role, offset in (("positions", POSITION_OFFSET), ("wpe", 0)):
        if role in modules:
            table: Any = modules[role].weight
            hidden = hidden + table[offset : offset + ids.shape[1]]
    return modules["norm"](hidden) if "norm" in modules else hidden


def embed_vit(modules: Mapping[str, nn.Module], patches: Tensor, token_types: Tensor | None) -> Tensor:
    """Put a picture together again and call ViT's embedding.

    patches: (n, t, channels x patch x patch) uint8: the class token's (ignored), the picture's, and any padding behind.
    """
    embeddings: Any = modules["embeddings"]
    projection: nn.Conv2d = embeddings.patch_embeddings.projection
    channels, height, width = projection.in_channels, projection.kernel_size[0], projection.kernel_size[1]
    rows, columns = (side // patch for side, patch in zip(embeddings.image_size, (height, width), strict=True))
    if patches.ndim != 3 or patches.shape[1] <= rows * columns or patches.shape[2] != channels * height * width:
        raise ConfigError(
            f"A picture of {rows * columns} patches of {channels * height * width} values was asked for.",
            f"The input is {tuple(patches.shape)}.",
            "Give a task of pictures, such as 'digits', to a model of pictures, and a text to a model of text.",
        )
    grid = patches[:, 1 : 1 + rows * columns].reshape(len(patches), rows, columns, channels, height, width)
    pixels = grid.permute(0, 3, 1, 4, 2, 5).reshape(len(patches), channels, rows * height, columns * width)
    # Mean and deviation 0.5 of values in [0, 1]: what the published ViT checkpoints were trained with.
    hidden = embeddings(pixels.to(projection.weight.dtype) / 127.5 - 1)
    return functional.pad(hidden, (0, 0, 0, patches.shape[1] - hidden.shape[1]))


def call_masked(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    """Call a layer that needs only the mask."""
    return layer(hidden, attention_mask=context.mask)


def call_llama(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    """Call a layer with rotary positions."""
    return layer(hidden, attention_mask=context.mask, position_embeddings=context.rotary)


def call_t5(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    """Call a block of T5's encoder or decoder."""
    return layer(
        hidden,
        attention_mask=context.mask,
        position_bias=context.position_bias,
        encoder_hidden_states=context.memory,
        encoder_attention_mask=context.memory_mask,
    )[0]


def call_bart_decoder(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    """Call a layer of BART's decoder."""
    return layer(hidden, context.mask, context.memory, encoder_attention_mask=context.memory_mask)
