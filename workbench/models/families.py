"""Table of the supported model families, one entry each: where embeddings and layers are, and how to call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

from workbench.core.errors import ConfigError

POSITION_OFFSET = 2
"""The first rows of BART's and OPT's position tables do not belong to any position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The inputs of a layer that are the same for all layers of a batch.

    mask: (n, 1, t, t) bool, True where a query may attend; None if it may attend everywhere that its family allows.
    rotary: cosines and sines, (1, t, head size) each; None for families without rotary positions.
    position_bias: (1, heads, t, t), added to the attention scores; None for families without it.
    memory: (n, t, d), the encoder's output for decoder layers.  memory_mask: (n, 1, s, t) bool, None without padding.
    """

    mask: Tensor | None
    rotary: tuple[Tensor, Tensor] | None = None
    position_bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One stack of layers.

    layers, final, position_bias: paths in the base model ('' if the family has none; a checkpoint may lack the final
    norm).
    embedding: modules by role, as paths; modules missing from a checkpoint are left out.
    weights: a layer's projections by role (query, key, value or all three in one, output, up, down, gate), as paths.
    gated_weights: the same for checkpoints whose layers have a module at the path `gate`.
    norms: paths of a layer's norms, in the order of its blocks (attention, cross-attention, feed-forward).
    """

    layers: str
    embedding: Mapping[str, str]
    norms: tuple[str, ...]
    final: str = ""
    position_bias: str = ""
    weights: Mapping[str, str]
    gated_weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Part):
    """The structure of one Hugging Face architecture: its only stack or its encoder, and properties of the whole model.

    rotary: path of the module that makes the tables of rotary positions, '' if there is none.
    is_pre_norm: whether a block's norm comes before it or after the residual addition; the name of a setting if this
    varies.
    activation: the setting that names the feed-forward network's activation function.
    has_head_bias: whether the language model head has a bias ('final_logits_bias').
    scales_attention: whether scores are divided by the square root of the head size.
    reads_images: whether input_ids are an image's patches.
    stored_names: substrings of parameter names that checkpoint files spell differently, replaced in this order.
    """

    rotary: str = ""
    is_causal: bool = False
    is_pre_norm: bool | str = False
    activation: str = "activation_function"
    has_head_bias: bool = False
    has_token_types: bool = False
    scales_attention: bool = True
    reads_images: bool = False
    stored_names: Mapping[str, str] = field(default_factory=dict)
    decoder: Part | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)


def _attention(path: str, *names: str, prefix: str = "") -> dict[str, str]:
    """Return the paths of an attention's projections: names of query, key, value and output, after a path prefix."""
    return {
        f"{prefix}{role}": path + name for role, name in zip(("query", "key", "value", "output"), names, strict=True)
    }


def _t5(stack: str, feed_forward: int) -> dict[str, Any]:
    """Return the paths of one of T5's stacks.  feed_forward: index of the feed-forward network in a layer."""
    path = f"layer.{feed_forward}.DenseReluDense"
    attention = _attention("layer.0.SelfAttention.", *"qkvo")
    if feed_forward == 2:
        attention |= _attention("layer.1.EncDecAttention.", *"qkvo", prefix="cross_")
    return {
        "layers": f"{stack}.block",
        "embedding": {"words": f"{stack}.embed_tokens"},
        "norms": tuple(f"layer.{place}.layer_norm" for place in range(feed_forward + 1)),
        "final": f"{stack}.final_layer_norm",
        "position_bias": f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias",
        "weights": attention | {"up": f"{path}.wi", "down": f"{path}.wo"},
        "gated_weights": attention | {"gate": f"{path}.wi_0", "up": f"{path}.wi_1", "down": f"{path}.wo"},
    }


def _bart_embedding(stack: str) -> dict[str, str]:
    return {
        "words": f"{stack}.embed_tokens",
        "positions": f"{stack}.embed_positions",
        "norm": f"{stack}.layernorm_embedding",
    }


_BART_SELF = _attention("self_attn.", "q_proj", "k_proj", "v_proj", "out_proj") | {"up": "fc1", "down": "fc2"}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        layers="encoder.layer",
        embedding={"embeddings": "embeddings"},
        norms=("attention.output.LayerNorm", "output.LayerNorm"),
        activation="hidden_act",
        has_token_types=True,
        weights=_attention("attention.", "self.query", "self.key", "self.value", "output.dense")
        | {"up": "intermediate.dense", "down": "output.dense"},
        tiny={"num_attention_heads": 4, "intermediate_size": 64},
    ),
    "distilbert": Family(
        layers="transformer.layer",
        embedding={"embeddings": "embeddings"},
        norms=("sa_layer_norm", "output_layer_norm"),
        activation="activation",
        weights=_attention("attention.", "q_lin", "k_lin", "v_lin", "out_lin") | {"up": "ffn.lin1", "down": "ffn.lin2"},
        tiny={"num_attention_heads": 4, "hidden_dim": 64},
    ),
    "gpt2": Family(
        layers="h",
        embedding={"wte": "wte", "wpe": "wpe"},
        norms=("ln_1", "ln_2"),
        final="ln_f",
        is_causal=True,
        is_pre_norm=True,
        weights={"query_key_value": "attn.c_attn", "output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        tiny={"num_attention_heads": 4, "n_inner": 64},
    ),
    "llama": Family(
        layers="layers",
        embedding={"embed_tokens": "embed_tokens"},
        norms=("input_layernorm", "post_attention_layernorm"),
        final="norm",
        rotary="rotary_emb",
        is_causal=True,
        is_pre_norm=True,
        activation="hidden_act",
        weights=_attention("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
        | {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
        tiny={
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
            "max_position_embeddings": 512,
        },
    ),
    "opt": Family(
        layers="decoder.layers",
        embedding={
            "words": "decoder.embed_tokens",
            "positions": "decoder.embed_positions",
            "project_in": "decoder.project_in",
        },
        norms=("self_attn_layer_norm", "final_layer_norm"),
        final="decoder.final_layer_norm",
        is_causal=True,
        is_pre_norm="do_layer_norm_before",
        weights=_BART_SELF,
        tiny={"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "vit": Family(
        layers="layers",
        embedding={"embeddings": "embeddings"},
        norms=("layernorm_before", "layernorm_after"),
        final="layernorm",
        is_pre_norm=True,
        activation="hidden_act",
        reads_images=True,
        stored_names={
            "layers.": "encoder.layer.",
            ".attention.q_proj.": ".attention.attention.query.",
            ".attention.k_proj.": ".attention.attention.key.",
            ".attention.v_proj.": ".attention.attention.value.",
            ".attention.o_proj.": ".attention.output.dense.",
            ".mlp.fc1.": ".intermediate.dense.",
            ".mlp.fc2.": ".output.dense.",
        },
        weights=_attention("attention.", "q_proj", "k_proj", "v_proj", "o_proj") | {"up": "mlp.fc1", "down": "mlp.fc2"},
        tiny={"num_attention_heads": 4, "intermediate_size": 64, "image_size": 8, "patch_size": 2, "num_channels": 1},
    ),
    "t5": Family(
        **_t5("encoder", 1),
        is_pre_norm=True,
        activation="dense_act_fn",
        scales_attention=False,
        decoder=Part(**_t5("decoder", 2)),
        tiny={"num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
    ),
    "bart": Family(
        layers="encoder.layers",
        embedding=_bart_embedding("encoder"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        has_head_bias=True,
        weights=_BART_SELF,
        decoder=Part(
            layers="decoder.layers",
            embedding=_bart_embedding("decoder"),
            norms=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
            weights=_BART_SELF | _attention("encoder_attn.", "q_proj", "k_proj", "v_proj", "out_proj", prefix="cross_"),
        ),
        tiny={
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "decoder_start_token_id": 3,
            # A random head with the usual deviation of 0.02 could hardly distinguish words, whatever its input.
            "init_std": 0.2,
        },
    ),
}


def family_of(model_type: str) -> Family:
    """Return the table entry of a Hugging Face model type.  Raises ConfigError for an unsupported type."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"A model of the family '{model_type}' was asked for.",
            f"Known families are {', '.join(FAMILIES)}.",
            "Choose another model, or add an entry to workbench/models/families.py: where its embedding, layers "
            "and final norm are, "
            "how one layer is called, and which of a layer's modules project.",
        )
    return FAMILIES[model_type]


def layer_paths(part: Part, layer: nn.Module) -> Mapping[str, str]:
    """Return the paths of a layer's projections by role, for this checkpoint's variant (gated or not)."""
    names = {name for name, _ in layer.named_modules()}
    return part.gated_weights if part.gated_weights and part.gated_weights["gate"] in names else part.weights


def words_of(modules: Any) -> Any:
    """Return the word embedding from a mapping of embedding modules or paths by role."""
    return next(module for role, module in modules.items() if role in ("words", "embed_tokens", "wte"))


def embed_words(modules: Any, ids: Tensor) -> Tensor:
    """Return b_0 (n, t, d) of token ids (n, t), using the embedding modules of the family.

    OPT-350m's word embedding is narrower than d and is projected up.  GPT-2, OPT and BART add learned positions, and
    BART normalises.
    Llama and T5 apply positions in the attention.
    """
    hidden = words_of(modules)(ids)
    if "project_in" in modules:
        hidden = modules["project_in"](hidden)
    for role, offset in (("positions", POSITION_OFFSET), ("wpe", 0)):
        if role in modules:
            table: Any = modules[role].weight
            hidden = hidden + table[offset : offset + ids.shape[1]]
    return modules["norm"](hidden) if "norm" in modules else hidden


def embed_image(embeddings: Any, patches: Tensor) -> Tensor:
    """Reassemble an image from its patches and call ViT's embedding.

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
