"""The model families that can be seen as a layer stack: one table entry each, nothing else to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from workbench.core.errors import ConfigError
from workbench.models.family_parts import (
    Call,
    Embed,
    LayerContext,
    call_bart_decoder,
    call_llama,
    call_masked,
    call_t5,
    embed_bart,
    embed_bert,
    embed_distilbert,
    embed_gpt2,
    embed_llama,
    embed_opt,
    embed_t5,
    embed_vit,
)

__all__ = ["FAMILIES", "Decoder", "Family", "LayerContext", "family_of", "layer_paths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Where the second stack of an encoder-decoder is in the base model; fields as in Family."""

    layers: str
    embedding: Mapping[str, str]
    embed: Embed
    call: Call
    final: str = ""
    position_bias: str = ""
    weights: Mapping[str, str] = field(default_factory=dict)
    gated_weights: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one Hugging Face architecture is taken apart.

    layers, final, rotary, position_bias: where they are in the base model ('' if there is none; a final norm may be missing there).
    embedding: its modules by role, as paths; those that a checkpoint does not have are left out.
    weights: pieces of a layer by role (query, key, value or all three in one, output, up, down, gate), as paths.
    gated_weights: the same where a checkpoint's layers have the module at the path `gate`, and others do not.
    scales_attention: whether scores are divided by the square root of the head size.
    decoder: of an encoder-decoder, whose encoder the other fields describe.
    reads_images: input_ids are a picture's patches.
    stored_names: parts of parameter names that checkpoint files spell in another way, replaced in this order.
    """

    layers: str
    embedding: Mapping[str, str]
    embed: Embed
    call: Call
    final: str = ""
    rotary: str = ""
    position_bias: str = ""
    is_causal: bool = False
    has_token_types: bool = False
    scales_attention: bool = True
    reads_images: bool = False
    stored_names: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    gated_weights: Mapping[str, str] = field(default_factory=dict)
    decoder: Decoder | None = None
    tiny: Mapping[str, Any] = field(default_factory=dict)


_T5_SELF = {role: f"layer.0.SelfAttention.{name}" for role, name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))}
_T5_CROSS = {
    f"cross_{role}": f"layer.1.EncDecAttention.{name}" for role, name in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
}
_BART_SELF = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "up": "fc1",
    "down": "fc2",
}


def _t5_feed_forward(place: int) -> tuple[dict[str, str], dict[str, str]]:
    path = f"layer.{place}.DenseReluDense"
    plain = {"up": f"{path}.wi", "down": f"{path}.wo"}
    return plain, {"gate": f"{path}.wi_0", "up": f"{path}.wi_1", "down": f"{path}.wo"}


FAMILIES: dict[str, Family] = {
    "bert": Family(
        layers="encoder.layer",
        embedding={"embeddings": "embeddings"},
        embed=embed_bert,
        call=call_masked,
        has_token_types=True,
        weights={
            "query": "attention.self.query",
            "key": "attention.self.key",
            "value": "attention.self.value",
            "output": "attention.output.dense",
            "up": "intermediate.dense",
            "down": "output.dense",
        },
        tiny={"num_attention_heads": 4, "intermediate_size": 64},
    ),
    "distilbert": Family(
        layers="transformer.layer",
        embedding={"embeddings": "embeddings"},
        embed=embed_distilbert,
        call=call_masked,
        weights={
            "query": "attention.q_lin",
            "key": "attention.k_lin",
            "value": "attention.v_lin",
            "output": "attention.out_lin",
            "up": "ffn.lin1",
            "down": "ffn.lin2",
        },
        tiny={"num_attention_heads": 4, "hidden_dim": 64},
    ),
    "gpt2": Family(
        layers="h",
        embedding={"wte": "wte", "wpe": "wpe"},
        embed=embed_gpt2,
        call=call_masked,
        final="ln_f",
        is_causal=True,
        weights={"query_key_value": "attn.c_attn", "output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        tiny={"num_attention_heads": 4, "n_inner": 64},
    ),
    "llama": Family(
        layers="layers",
        embedding={"embed_tokens": "embed_tokens"},
        embed=embed_llama,
        call=call_llama,
        final="norm",
        rotary="rotary_emb",
        is_causal=True,
        weights={
            "query": "self_attn.q_proj",
            "key": "self_attn.k_proj",
            "value": "self_attn.v_proj",
            "output": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        },
        tiny={"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64},
    ),
    "opt": Family(
        layers="decoder.layers",
        embedding={"words": "decoder.embed_tokens", "positions": "decoder.embed_positions", "project_in": "decoder.project_in"},
        embed=embed_opt,
        call=call_masked,
        final="decoder.final_layer_norm",
        is_causal=True,
        weights=_BART_SELF,
        tiny={"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "vit": Family(
        layers="layers",
        embedding={"embeddings": "embeddings"},
        embed=embed_vit,
        call=call_masked,
        final="layernorm",
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
        weights={
            "query": "attention.q_proj",
            "key": "attention.k_proj",
            "value": "attention.v_proj",
            "output": "attention.o_proj",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
        tiny={"num_attention_heads": 4, "intermediate_size": 64, "image_size": 8, "patch_size": 2, "num_channels": 1},
    ),
    "t5": Family(
        layers="encoder.block",
        embedding={"words": "encoder.embed_tokens"},
        embed=embed_t5,
        call=call_t5,
        final="encoder.final_layer_norm",
        position_bias="encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        scales_attention=False,
        weights=_T5_SELF | _t5_feed_forward(1)[0],
        gated_weights=_T5_SELF | _t5_feed_forward(1)[1],
        decoder=Decoder(
            layers="decoder.block",
            embedding={"words": "decoder.embed_tokens"},
            embed=embed_t5,
            call=call_t5,
            final="decoder.final_layer_norm",
            position_bias="decoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            weights=_T5_SELF | _T5_CROSS | _t5_feed_forward(2)[0],
            gated_weights=_T5_SELF | _T5_CROSS | _t5_feed_forward(2)[1],
        ),
        tiny={"num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
    ),
    "bart": Family(
        layers="encoder.layers",
        embedding={"words": "encoder.embed_tokens", "positions": "encoder.embed_positions", "norm": "encoder.layernorm_embedding"},
        embed=embed_bart,
        call=call_masked,
        weights=_BART_SELF,
        decoder=Decoder(
            layers="decoder.layers",
            embedding={"words": "decoder.embed_tokens", "positions": "decoder.embed_positions", "norm": "decoder.layernorm_embedding"},
            embed=embed_bart,
            call=call_bart_decoder,
            weights=_BART_SELF
            | {f"cross_{role}": path.replace("self_attn", "encoder_attn") for role, path in _BART_SELF.items() if "self_attn" in path},
        ),
        tiny={
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "decoder_start_token_id": 3,
            # A random head of the usual 0.02 could tell no word from another, whatever it reads.
            "init_std": 0.2,
        },
    ),
}


def family_of(model_type: str) -> Family:
    """Return the table entry of a Hugging Face model type.  Raises ConfigError if there is none."""
    if model_type not in FAMILIES:
        raise ConfigError(
            f"A model of the family '{model_type}' was asked for.",
            f"Known families are {', '.join(FAMILIES)}.",
            "Choose another model, or add an entry to workbench/models/families.py: where its embedding, layers and final norm are, "
            "how one layer is called, and which of a layer's modules project.",
        )
    return FAMILIES[model_type]


def layer_paths(part: Family | Decoder, layer: nn.Module) -> Mapping[str, str]:
    """Return the paths of a layer's projections by role, for the variant (gated or not) that this checkpoint has."""
    names = {name for name, _ in layer.named_modules()}
    return part.gated_weights if part.gated_weights and part.gated_weights["gate"] in names else part.weights
