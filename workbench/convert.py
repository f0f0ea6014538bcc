"""Convert a fetched GGUF model to a Hugging Face folder (safetensors and tokenizer.json), once, without torch.

The GGUF loader of transformers takes 15 s and needs one more package; a converted folder loads in under a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}
_CONTROL_TOKEN = 3


def convert_smollm2(source: Path, target: Path) -> None:
    """Read the only *.gguf in `source` (Llama family, tied embeddings, byte-level BPE) and write a model folder.

    Weights become float16.  A 4-bit code times a float16 scale loses less than 2^-11 of its value in float16.
    """
    from gguf import GGUFReader, dequantize

    (path,) = source.glob("*.gguf")
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        name, _, suffix = tensor.name.rpartition(".")
        weights = dequantize(tensor.data, tensor.tensor_type)
        if name.startswith("blk."):
            _, layer, part = name.split(".")
            if part in heads:
                weights = _unpermute(weights, heads[part])
            name = f"layers.{layer}.{_LAYER_NAMES[part]}"
        else:
            name = _TOP_NAMES[name]
        tensors[f"{name}.{suffix}"] = weights
    _write_model(target, fields, tensors)
    _write_tokenizer(target, fields)


def _unpermute(weights: Any, num_heads: int) -> Any:
    # GGUF interleaves the two halves of each head's rotary dimensions; Hugging Face stores them one after the other.
    rows, columns = weights.shape
    return weights.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_model(target: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(weights, dtype=np.float16) for name, weights in tensors.items()}, target / "model.safetensors")
    config = {
        "architectures": ["LlamaModel"],
        "model_type": "llama",
        "dtype": "float16",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(target: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # The original tokenizer splits digits one by one.  The GGUF names that rule ("smollm") but does not define it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(target / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
    }
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
