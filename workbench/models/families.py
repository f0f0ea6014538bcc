"""Table of the supported model families: one entry each.

A family is added by its entry.  If it needs more than family.py can declare, family.py is where that is added.
"""

from __future__ import annotations

from typing import Any

from workbench.core.errors import ConfigError
from workbench.models.family import Family, Gguf, Part


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


def _gpt2_score_scale(config: Any, head_size: int, layer: int) -> float:
    """Return the factor of the scores: GPT-2 can omit the scaling, or also divide by the layer's number."""
    scale = head_size**-0.5 if config.scale_attn_weights else 1.0
    return scale / (layer + 1) if config.scale_attn_by_inverse_layer_idx else scale


_BART_SELF = _attention("self_attn.", "q_proj", "k_proj", "v_proj", "out_proj") | {"up": "fc1", "down": "fc2"}

_BERT: dict[str, Any] = {
    "layers": "encoder.layer",
    "embedding": {"embeddings": "embeddings"},
    "norms": ("attention.output.LayerNorm", "output.LayerNorm"),
    "activation": "hidden_act",
    "has_pooler": True,
    "weights": _attention("attention.", "self.query", "self.key", "self.value", "output.dense")
    | {"up": "intermediate.dense", "down": "output.dense"},
    "tiny": {"num_attention_heads": 4, "intermediate_size": 64},
}
_LLAMA: dict[str, Any] = {
    "layers": "layers",
    "embedding": {"embed_tokens": "embed_tokens"},
    "norms": ("input_layernorm", "post_attention_layernorm"),
    "final": "norm",
    "rotary": "rotary_emb",
    "is_causal": True,
    "is_pre_norm": True,
    "activation": "hidden_act",
    "weights": _attention("self_attn.", "q_proj", "k_proj", "v_proj", "o_proj")
    | {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    "tiny": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
    },
}
"""Common settings of decoders, which differ from them in a few places."""
_GGUF_LLAMA = Gguf(architecture="llama", interleaves_rotary=True, has_output_bias=True)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")

FAMILIES: dict[str, Family] = {
    "bert": Family(
        title="BERT",
        examples="bert-base-uncased, multilingual BERT, all-MiniLM-L6-v2",
        has_token_types=True,
        prunes_by_trace=True,
        **_BERT,
    ),
    "roberta": Family(
        title="RoBERTa",
        examples="FacebookAI/roberta-base, roberta-large",
        positions_behind_padding=True,
        **_BERT,
    ),
    "modernbert": Family(
        title="ModernBERT",
        examples="answerdotai/ModernBERT-base",
        layers="layers",
        embedding={"embeddings": "embeddings"},
        norms=("attn_norm", "mlp_norm"),
        final="final_norm",
        rotary="rotary_emb",
        is_pre_norm=True,
        activation="hidden_activation",
        weights={"query_key_value": "attn.Wqkv", "output": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"},
        tiny={"num_attention_heads": 4, "intermediate_size": 64, "local_attention": 8},
    ),
    "distilbert": Family(
        title="DistilBERT",
        examples="distilbert-base-uncased",
        layers="transformer.layer",
        embedding={"embeddings": "embeddings"},
        norms=("sa_layer_norm", "output_layer_norm"),
        activation="activation",
        weights=_attention("attention.", "q_lin", "k_lin", "v_lin", "out_lin") | {"up": "ffn.lin1", "down": "ffn.lin2"},
        tiny={"num_attention_heads": 4, "hidden_dim": 64},
    ),
    "gpt2": Family(
        title="GPT-2",
        examples="gpt2, gpt2-medium, distilgpt2",
        layers="h",
        embedding={"wte": "wte", "wpe": "wpe"},
        norms=("ln_1", "ln_2"),
        final="ln_f",
        is_causal=True,
        is_pre_norm=True,
        stores_inputs_first=True,
        score_scale=_gpt2_score_scale,
        weights={"query_key_value": "attn.c_attn", "output": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"},
        tiny={"num_attention_heads": 4, "n_inner": 64},
    ),
    "llama": Family(title="Llama", examples="Llama 2 and 3, TinyLlama, SmolLM2-135M", gguf=_GGUF_LLAMA, **_LLAMA),
    "mistral": Family(title="Mistral", examples="mistralai/Mistral-7B-v0.3", gguf=_GGUF_LLAMA, **_LLAMA),
    "qwen2": Family(
        title="Qwen2",
        examples="Qwen/Qwen2-0.5B, Qwen2.5-0.5B",
        gguf=Gguf(architecture="qwen2"),
        **_LLAMA,
    ),
    "qwen3": Family(
        title="Qwen3",
        examples="Qwen/Qwen3-0.6B",
        gguf=Gguf(architecture="qwen3"),
        **_LLAMA | {"head_norms": _HEAD_NORMS, "tiny": _LLAMA["tiny"] | {"head_dim": 16}},
    ),
    "smollm3": Family(
        title="SmolLM3",
        examples="HuggingFaceTB/SmolLM3-3B",
        rotary_layers="no_rope_layers",
        **_LLAMA,
    ),
    "granite": Family(
        title="Granite",
        examples="ibm-granite/granite-3.3-2b-instruct",
        score_scale=lambda config, head_size, layer: config.attention_multiplier,
        residual_scale=lambda config: config.residual_multiplier,
        embedding_scale=lambda config: config.embedding_multiplier,
        head_scale=lambda config: 1 / config.logits_scaling,
        **_LLAMA
        | {
            "tiny": _LLAMA["tiny"]
            | {
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.3,
                "embedding_multiplier": 3.0,
                "logits_scaling": 2.0,
            }
        },
    ),
    "phi3": Family(
        title="Phi-3",
        examples="microsoft/Phi-3-mini-4k-instruct, Phi-4-mini",
        **_LLAMA
        | {
            "weights": {
                "query_key_value": "self_attn.qkv_proj",
                "output": "self_attn.o_proj",
                "gate_up": "mlp.gate_up_proj",
                "down": "mlp.down_proj",
            }
        },
    ),
    "phi": Family(
        title="Phi",
        examples="microsoft/phi-1_5, phi-2",
        layers="layers",
        embedding={"embed_tokens": "embed_tokens"},
        norms=("input_layernorm", "input_layernorm"),
        head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
        final="final_layernorm",
        rotary="rotary_emb",
        is_causal=True,
        is_pre_norm=True,
        parallel=True,
        activation="hidden_act",
        head_bias="lm_head.bias",
        weights=_attention("self_attn.", "q_proj", "k_proj", "v_proj", "dense") | {"up": "mlp.fc1", "down": "mlp.fc2"},
        tiny=_LLAMA["tiny"],
    ),
    "gpt_neox": Family(
        title="GPT-NeoX",
        examples="EleutherAI/pythia-14m to pythia-410m",
        layers="layers",
        embedding={"embed_tokens": "embed_in"},
        norms=("input_layernorm", "post_attention_layernorm"),
        final="final_layer_norm",
        rotary="rotary_emb",
        is_causal=True,
        is_pre_norm=True,
        parallel="use_parallel_residual",
        interleaves_heads=True,
        activation="hidden_act",
        stored_names={"lm_head.": "embed_out."},
        weights={
            "query_key_value": "attention.query_key_value",
            "output": "attention.dense",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
        tiny={"num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 512},
    ),
    "olmo2": Family(
        title="OLMo 2",
        examples="allenai/OLMo-2-0425-1B",
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norms=_HEAD_NORMS,
        **_LLAMA | {"norms": ("", "")},
    ),
    "gemma3_text": Family(
        title="Gemma 3 (text)",
        examples="google/gemma-3-270m, gemma-3-1b-it",
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norms=_HEAD_NORMS,
        norm_adds_one=True,
        gguf=Gguf(architecture="gemma3", activation="gelu_pytorch_tanh", window_pattern=6),
        score_scale=lambda config, head_size, layer: config.query_pre_attn_scalar**-0.5,
        refused={
            "use_bidirectional_attention": "its tokens attend to later ones",
            "attn_logit_softcapping": "its attention scores are capped",
            "final_logit_softcapping": "its logits are capped",
        },
        **_LLAMA
        | {
            "norms": ("input_layernorm", "pre_feedforward_layernorm"),
            "activation": "hidden_activation",
            "tiny": _LLAMA["tiny"]
            | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "sliding_window_pattern": 3},
        },
    ),
    "opt": Family(
        title="OPT",
        examples="facebook/opt-125m to opt-1.3b",
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
        head_projection="decoder.project_out",
        weights=_BART_SELF,
        tiny={"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
    ),
    "vit": Family(
        title="ViT",
        examples="google/vit-base-patch16-224",
        layers="layers",
        embedding={"embeddings": "embeddings"},
        norms=("layernorm_before", "layernorm_after"),
        final="layernorm",
        is_pre_norm=True,
        activation="hidden_act",
        reads_images=True,
        has_pooler=True,
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
        title="T5",
        examples="t5-small to t5-11b, Flan-T5",
        **_t5("encoder", 1),
        is_pre_norm=True,
        activation="dense_act_fn",
        num_layers="num_layers",
        score_scale=lambda config, head_size, layer: 1.0,
        head_scale=lambda config: config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0,
        decoder=Part(**_t5("decoder", 2), num_layers="num_decoder_layers"),
        tiny={"num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
    ),
    "bart": Family(
        title="BART",
        examples="facebook/bart-base, bart-large",
        layers="encoder.layers",
        num_layers="encoder_layers",
        embedding=_bart_embedding("encoder"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        head_bias="final_logits_bias",
        weights=_BART_SELF,
        decoder=Part(
            layers="decoder.layers",
            num_layers="decoder_layers",
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


_UNSUPPORTED = {
    "deberta": "Attention to relative positions",
    "moe": "A mixture of experts",
    "mixtral": "A mixture of experts",
    "mamba": "A state-space model",
    "rwkv": "A state-space model",
    "hybrid": "A hybrid of attention and other layers",
    "lfm2": "A hybrid of attention and other layers",
}
"""Unsupported structures, by parts of model types."""


def family_of(model_type: str) -> Family:
    """Return the table entry of a Hugging Face model type.  Raises ConfigError for an unsupported type."""
    if model_type not in FAMILIES:
        structure = next((name for part, name in _UNSUPPORTED.items() if part in str(model_type)), None)
        reason = "" if structure is None else f"{structure} is not supported. "
        raise ConfigError(
            f"A model of the family '{model_type}' was asked for.",
            f"{reason}Known families are {', '.join(FAMILIES)}.",
            "Choose another model, or add an entry to workbench/models/families.py: where its embedding, layers "
            "and final norm are, and which of a layer's modules project.",
        )
    return FAMILIES[model_type]


def require_carried(config: Any) -> None:
    """Raise ConfigError for a configuration of a known family with a setting that is not supported."""
    for setting, reason in family_of(config.model_type).refused.items():
        if value := getattr(config, setting, None):
            raise ConfigError(
                f"A model of the family '{config.model_type}' with {setting} = {value} was asked for.",
                f"That is not supported: {reason}.",
                "Choose another model of the family.",
            )


def generating_families() -> str:
    """Return the names of the families that predict words, for messages."""
    return ", ".join(family.title for family in FAMILIES.values() if family.generates)
