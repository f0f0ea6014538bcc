"""The inputs of a layer: embedded tokens or patches, and for each pattern of attention its mask and position tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from workbench.core.errors import ConfigError
from workbench.models.family import FULL, POSITION_OFFSET, Family, patterns_of, window_of, words_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The inputs of a layer that are the same for all layers with one pattern of attention.

    mask: (1 or n, 1, t, t) bool, True where a query may attend; None if it may attend everywhere that its family
    allows.
    rotary: cosines and sines, (1 or n, t, head size) each; None for families without rotary positions.
    position_bias: (1, heads, t, t), added to the attention scores; None for families without it.
    memory: (n, t, d), the encoder's output for decoder layers.  memory_mask: (n, 1, s, t) bool, None without padding.
    """

    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None = None
    position_bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


Contexts = Mapping[str, LayerContext]
"""The context of each pattern of attention in a stack."""


def tensors_of(contexts: Contexts) -> list[Tensor]:
    """Return all tensors of some contexts."""
    tensors = list[Tensor | None]()
    for context in contexts.values():
        tensors += [context.mask, context.position_bias, context.memory, context.memory_mask, *(context.rotary or ())]
    return [tensor for tensor in tensors if tensor is not None]


def call_layer(layer: nn.Module, hidden: Tensor, context: LayerContext) -> Tensor:
    """Return a layer's output (n, t, d).  The layer is called with those context fields that are not None."""
    named = {
        "position_embeddings": context.rotary,
        "position_bias": context.position_bias,
        "encoder_hidden_states": context.memory,
        "encoder_attention_mask": context.memory_mask,
    }
    output = layer(
        hidden, attention_mask=context.mask, **{name: value for name, value in named.items() if value is not None}
    )
    return output[0] if isinstance(output, tuple) else output


def near_mask(length: int, window: int, *, is_causal: bool, device: Any = None) -> Tensor | None:
    """Return (t, t) bool, True where a query may attend within a window, and with causality not to later tokens.

    None if the window (0: none) hides nothing.
    """
    if not window or length <= window + (not is_causal):
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=device)
    return mask.tril().triu(1 - window) if is_causal else mask.tril(window).triu(-window)


def padding_mask(attention_mask: Tensor, *, is_causal: bool, window: int = 0) -> Tensor | None:
    """Return (1 or n, 1, 1 or t, t) bool, True where a query may attend.  None without padding and window.

    attention_mask: (n, t), 1 for real tokens.  window: as in near_mask.
    """
    length, device = attention_mask.shape[1], attention_mask.device
    near = near_mask(length, window, is_causal=is_causal, device=device)
    if bool(attention_mask.all()):
        return None if near is None else near[None, None]
    mask = attention_mask.bool()[:, None, None, :]
    if near is not None:
        # Padding far behind the text sees no real token.  It attends to itself, so that it stays a number.
        return mask & near | torch.eye(length, dtype=torch.bool, device=device)
    return mask & torch.ones(length, length, dtype=torch.bool, device=device).tril() if is_causal else mask


def rotary_tables(rotary: Any, hidden: Tensor, positions: Tensor, pattern: str) -> tuple[Tensor, Tensor] | None:
    """Return the cosines and sines (n, t, head size) of positions (n, t) for a pattern of attention.  None without a
    module.

    rotary: transformers' module, which has its own frequencies for each pattern in some families.
    """
    if rotary is None:
        return None
    kind = {"layer_type": pattern} if hasattr(rotary, "layer_types") else {}
    return rotary(hidden, position_ids=positions, **kind)


def contexts_of(
    config: Any,
    rotary: nn.Module | None,
    hidden: Tensor,
    positions: Tensor,
    mask: Callable[[int], Tensor | None],
    position_bias: Tensor | None = None,
) -> Contexts:
    """Return the context of each pattern of a single stack or an encoder.

    positions: (n, t) int64.  mask: window (see near_mask) -> LayerContext.mask.
    """
    return {
        pattern: LayerContext(
            mask=mask(window_of(config, pattern)),
            rotary=rotary_tables(rotary, hidden, positions, pattern),
            position_bias=position_bias,
        )
        for pattern in set(patterns_of(config, 1))
    }


def layer_contexts(
    family: Family,
    config: Any,
    rotary: nn.Module | None,
    attention_mask: Tensor,
    hidden: Tensor,
    position_bias: nn.Module | None = None,
) -> Contexts:
    """Return the masks and position tables for a batch, by pattern of attention.

    attention_mask: (n, t), 1 for real tokens, padding on the right.  hidden: (n, t, d), which decides dtype and device.
    Without padding the mask is None where no window hides a token, so that the attention kernels can use their faster
    path.
    """
    length = attention_mask.shape[1]

    def mask(window: int) -> Tensor | None:
        padding = padding_mask(attention_mask, is_causal=family.is_causal, window=window)
        return None if padding is None else padding.expand(-1, 1, length, length)

    positions = torch.arange(length, device=hidden.device)[None]
    bias = None if position_bias is None else position_bias(length)
    return contexts_of(config, rotary, hidden, positions, mask, bias)


def decoder_contexts(
    attention_mask: Tensor, states: Tensor, memory: Tensor, position_bias: nn.Module | None
) -> Contexts:
    """Return the context of a decoder's layers: the encoder's output `memory` (n, t, d), its mask, positions of the
    states (n, s, d).

    Targets are padded on the right, where causal attention hides the padding from all real tokens.  The mask therefore
    stays None.
    """
    length, mask = states.shape[1], padding_mask(attention_mask, is_causal=False)
    bias = None if position_bias is None else position_bias(length)
    context = LayerContext(
        mask=None,
        position_bias=bias,
        memory=memory,
        memory_mask=None if mask is None else mask.expand(-1, 1, length, -1),
    )
    return {FULL: context}


def embed(family: Family, config: Any, modules: Any, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return b_0 (n, t, d).  input_ids: (n, t); in families with token types ~id is a token of the second text of a
    pair.  positions: see embed_words.
    """
    if "embeddings" not in modules:
        scale = family.embedding_scale(config)
        hidden = embed_words(modules, input_ids, positions)
        return hidden if scale == 1.0 else hidden * scale
    embeddings = modules["embeddings"]
    if family.reads_images:
        return embed_image(embeddings, input_ids)
    if not family.has_token_types:
        return embeddings(input_ids)
    is_second = input_ids < 0
    # A table with one token type does not distinguish the texts of a pair.
    types = is_second.long().clamp(max=embeddings.token_type_embeddings.num_embeddings - 1)
    return embeddings(torch.where(is_second, ~input_ids, input_ids), token_type_ids=types)


def embed_words(modules: Any, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return embedded token ids (n, t, d) for ids (n, t), using the embedding modules of the family.

    positions: (t,) of the tokens; None: they begin at 0.

    OPT-350m's word embedding is narrower than d and is projected up.  Some families add learned positions, and some
    normalise.  Those with rotary or relative positions apply them in the attention.
    """
    hidden = words_of(modules)(ids)
    if "project_in" in modules:
        hidden = modules["project_in"](hidden)
    for role, offset in (("positions", POSITION_OFFSET), ("wpe", 0)):
        if role in modules:
            rows = slice(offset, offset + ids.shape[1]) if positions is None else positions + offset
            hidden = hidden + modules[role].weight[rows]
    return modules["norm"](hidden) if "norm" in modules else hidden


def embed_image(embeddings: Any, patches: Tensor) -> Tensor:
    """Reassemble an image from its patches and call the vision transformer's embedding.

    patches: (n, t, channels x patch x patch) uint8: the class token's (ignored), the image's, and any padding at the
    end.
    """
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
    # Mean and standard deviation 0.5 of values in [0, 1], as in the training of the published ViT checkpoints.
    hidden = embeddings(pixels.to(projection.weight.dtype) / 127.5 - 1)
    return functional.pad(hidden, (0, 0, 0, patches.shape[1] - hidden.shape[1]))


class PositionBias(nn.Module):
    """T5's relative position bias on each head's attention scores (Raffel et al., JMLR 2020, section 2.1).

    Hugging Face keeps the table in a stack's first layer, which only the first pipeline stage has.
    """

    def __init__(self, table: nn.Embedding, *, is_causal: bool, max_distance: int) -> None:
        super().__init__()
        self.table, self.is_causal, self.max_distance = table, is_causal, max_distance

    def forward(self, length: int) -> Tensor:
        """Return the bias, (1, heads, length, length)."""
        positions = torch.arange(length, device=self.table.weight.device)
        buckets = buckets_of(
            self.table.num_embeddings, positions, length, is_causal=self.is_causal, max_distance=self.max_distance
        )
        return self.table(buckets).permute(2, 0, 1)[None]


def buckets_of(num_buckets: int, queries: Tensor, num_keys: int, *, is_causal: bool, max_distance: int) -> Tensor:
    """Return the bucket of the distance between each query and key, (queries, keys) int64.  queries: (q,) int64, their
    positions.
    """
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(num_keys, device=queries.device) - queries[:, None]
    return T5Attention._relative_position_bucket(distance, not is_causal, num_buckets, max_distance)
