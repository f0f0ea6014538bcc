"""Convert SmolLM2's GGUF file to a Hugging Face folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.core.catalogue import data_folder
from workbench.core.serial import read_toml

NAMES = read_toml(data_folder() / "smollm2.toml")
_CONTROL_TOKEN = 3


def convert_smollm2(source: Path, target: Path) -> None:
    """Convert the only *.gguf in `source` (Llama family, tied embeddings, byte-level BPE) to a Hugging Face folder,
    without torch.

    The GGUF loader of transformers gives the same weights in 16 s, and its tokenizer splits double spaces differently.
    This takes 5 s.
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
            name = f"layers.{layer}.{NAMES['layers'][part]}"
        else:
            name = NAMES["top"][name]
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

    save_file(
        {name: np.ascontiguousarray(weights, dtype=np.float16) for name, weights in tensors.items()},
        target / "model.safetensors",
    )
    config = NAMES["model"] | {name: fields[field] for name, field in NAMES["model_fields"].items()}
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _write_tokenizer(target: Path, fields: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # The original tokenizer splits digits one by one.  The GGUF names that rule ("smollm") but does not define it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(target / "tokenizer.json"))
    config = NAMES["tokenizer"] | {name: fields[field] for name, field in NAMES["tokenizer_fields"].items()}
    config |= {name: tokens[fields[field]] for name, field in NAMES["tokens"].items()}
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
