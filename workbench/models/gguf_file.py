"""Write a model as a GGUF file, which llama.cpp and transformers (`gguf_file=`) read.

Names and layout are those of llama.cpp's own converter; a family's entry has its particulars (Gguf).  Weights
are float32 or float16, norms and biases float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.files import whole_file
from workbench.models.families import FAMILIES
from workbench.models.family import FULL, Gguf, patterns_of, window_of
from workbench.models.tokenizer import TextTokenizer

GgufType = Literal["float32", "float16"]
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_SPACE, _UNMERGED = "\u2581", -1000.0
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    "|".join((_ENGLISH, r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", _SPACES)): "llama-bpe",
    "|".join((_ENGLISH, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", _SPACES)): "qwen2",
    "|".join((_CASES, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)): "tekken",
}
"""llama.cpp's names of how byte-level tokenizers split text: of Llama 3, of Qwen 2 and 3, and of Mistral since 2024."""


def require_gguf(name: str, config: Any, tokenizer: TextTokenizer) -> Gguf:
    """Return how a model is written.  Raises ConfigError for one that cannot be, because of its family, its
    configuration or its tokenizer.
    """
    request, todo = f"'{name}' as a GGUF file was asked for.", "Export a folder, and convert that with llama.cpp."
    gguf = FAMILIES[config.model_type].gguf
    if gguf is None:
        problem = f"Of its family, {config.model_type}, no GGUF is written here."
        supported = ", ".join(name for name, family in FAMILIES.items() if family.gguf is not None)
        raise ConfigError(request, problem, f"Choose one of {supported}, or export a folder.")
    described = _tokenizer_json(tokenizer)
    if described["model"]["type"] != "BPE":
        raise ConfigError(request, "Its tokenizer is not BPE, the only kind that is written here.", todo)
    if not _has_pieces(described) and not _pre_tokenizer(described):
        problem = "How its tokenizer splits text has no name here, and a file without it would be read as other tokens."
        raise ConfigError(request, problem, todo)
    for part, setting in _unusual(config, gguf).items():
        raise ConfigError(request, f"{part} ({setting}), which is not written here.", todo)
    return gguf


def _unusual(config: Any, gguf: Gguf) -> dict[str, Any]:
    """Return what a file could not say of a model, with its value."""
    traits: dict[str, Any] = {}
    ropes = _ropes(config)
    for rope in ropes.values():
        if rope.get("rope_type", "default") != "default":
            traits["Its positions are scaled"] = rope["rope_type"]
    if (activation := getattr(config, FAMILIES[config.model_type].activation)) != gguf.activation:
        traits["Its activation is unusual"] = activation
    if getattr(config, "attention_bias", False) and not gguf.has_output_bias:
        traits["Its attention has biases"] = "attention_bias"
    if gguf.window_pattern:
        kinds = patterns_of(config, config.num_hidden_layers)
        if kinds != [kinds[0] if (n + 1) % gguf.window_pattern else FULL for n in range(len(kinds))]:
            traits["Its layers attend in an unusual order"] = kinds
        if (local := ropes.get("sliding_attention", {}).get("rope_theta", 10000.0)) != 10000.0:
            traits["Its windows turn heads in an unusual way"] = local
        if config.query_pre_attn_scalar != config.head_dim:
            traits["Its scores have an unusual scale"] = config.query_pre_attn_scalar
    return traits


def _ropes(config: Any) -> Mapping[str, Any]:
    """Return the settings of rotary positions by pattern of attention."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope if FULL in rope else {FULL: rope}


def write_gguf(path: Path, name: str, model: Any, tokenizer: TextTokenizer, dtype: GgufType = "float16") -> None:
    """Write a model that generates (Hugging Face's, with its head) as one file.

    Raises ConfigError as require_gguf, WriteError if the file cannot be written.
    """
    from gguf import GGUFWriter, get_tensor_name_map
    from gguf.constants import MODEL_ARCH

    config = model.config
    gguf = require_gguf(name, config, tokenizer)
    names = get_tensor_name_map(MODEL_ARCH[gguf.architecture.upper()], config.num_hidden_layers)
    with whole_file(path) as part:
        writer = GGUFWriter(part, gguf.architecture)
        writer.add_name(Path(name).name)
        _add_shape(writer, config, gguf)
        writer.add_file_type(0 if dtype == "float32" else 1)
        _add_tokenizer(writer, tokenizer, config, gguf)
        for key, tensor in tensors_of(model, gguf).items():
            stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert stored is not None, f"a tensor {key} in {gguf.architecture}"
            is_matrix = tensor.ndim > 1 and dtype == "float16"
            writer.add_tensor(stored, (tensor.half() if is_matrix else tensor.float()).contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def tensors_of(model: Any, gguf: Gguf) -> dict[str, Tensor]:
    """Return the tensors to write by Hugging Face's names: queries and keys interleaved, norms as factors; no tied
    head.
    """
    config, tensors = model.config, {key: value.detach() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if gguf.interleaves_rotary:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for key, tensor in tensors.items():
            for projection, count in heads.items():
                if f".{projection}." in key:
                    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
                    tensors[key] = halves.swapaxes(1, 2).reshape(tensor.shape)
    if FAMILIES[config.model_type].norm_adds_one:
        tensors = {key: value + 1 if key.endswith("norm.weight") else value for key, value in tensors.items()}
    return tensors


def _add_shape(writer: Any, config: Any, gguf: Gguf) -> None:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    windows = [window_of(config, kind) for kind in patterns_of(config, config.num_hidden_layers)]
    # Readers know no windows of these families: the file is right for texts that fit one.
    shortest = 0 if gguf.window_pattern else min(filter(None, windows), default=0)
    writer.add_context_length(min(config.max_position_embeddings, shortest or config.max_position_embeddings))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(float(_ropes(config)[FULL].get("rope_theta", 10000.0)))
    if gguf.window_pattern:
        writer.add_sliding_window(config.sliding_window)
    if gguf.interleaves_rotary:
        writer.add_rope_dimension_count(head_size)


def _add_tokenizer(writer: Any, tokenizer: TextTokenizer, config: Any, gguf: Gguf) -> None:
    described, backend = _tokenizer_json(tokenizer), tokenizer.backend
    added = {token["id"]: token for token in described["added_tokens"]}
    has_pieces = _has_pieces(described)
    texts, kinds = [], []
    for index in range(config.vocab_size):
        text, token = backend.id_to_token(index), added.get(index)
        kind = _NORMAL if token is None else _CONTROL if token["special"] else _USER_DEFINED
        if text is None:
            text, kind = f"[PAD{index}]", _USER_DEFINED
        elif has_pieces and text == f"<0x{text[3:5]}>":
            kind = _BYTE
        elif has_pieces and gguf.window_pattern and len(text) > 1 and not text.strip(_SPACE):
            text, kind = " " * len(text), _USER_DEFINED  # so llama.cpp's converter writes several spaces
        texts.append(text)
        kinds.append(kind)
    merges = [tuple(merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in described["model"]["merges"]]
    if has_pieces:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(texts, kinds, merges))
        writer.add_add_space_prefix(_begins_with_space(described))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(described))
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_pad_token_id(tokenizer.pad_id)
    if tokenizer.end_id is not None:
        writer.add_eos_token_id(tokenizer.end_id)
    begin = backend.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
    if begin is not None:
        writer.add_bos_token_id(begin)
    unknown = backend.token_to_id(tokenizer.special_tokens.get("unk_token", ""))
    if unknown is not None:
        writer.add_unk_token_id(unknown)
    writer.add_add_bos_token(tokenizer.begin_id is not None)
    writer.add_chat_template(tokenizer.whole_template)


def _scores(texts: list[str], kinds: list[int], merges: list[tuple[str, ...]]) -> list[float]:
    """Return the scores by which SentencePiece merges: the earlier a merge makes a token, the higher."""
    ranks: dict[str, float] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge), -float(rank))
    lowest = -float(len(merges))
    return [
        0.0 if kind == _BYTE else ranks.get(text, lowest) if kind == _NORMAL else _UNMERGED
        for text, kind in zip(texts, kinds, strict=True)
    ]


def _has_pieces(described: Mapping[str, Any]) -> bool:
    """Return whether a BPE tokenizer is of SentencePiece's kind, not of bytes."""
    return bool(described["model"].get("byte_fallback"))


def _begins_with_space(described: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer of SentencePiece's kind puts a space before a text."""
    normalizer, splitter = described["normalizer"] or {}, described["pre_tokenizer"] or {}
    kinds = [part["type"] for part in normalizer.get("normalizers", [normalizer] if normalizer else [])]
    return "Prepend" in kinds or splitter.get("prepend_scheme", "never") != "never"


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how text is split before the merges of bytes, '' if it has none."""
    splitter = described["pre_tokenizer"] or {}
    parts = splitter.get("pretokenizers", [splitter])
    match [part.get("type") for part in parts]:
        case ["ByteLevel"] if parts[0]["use_regex"]:
            name = "gpt-2"
        case ["Digits", "ByteLevel"] if parts[0]["individual_digits"] and parts[1]["use_regex"]:
            name = "smollm"
        case ["Split", "ByteLevel"] if not parts[1]["use_regex"]:
            name = _SPLITS.get(parts[0]["pattern"].get("Regex", ""), "")
        case _:
            name = ""
    return "" if name and parts[-1]["add_prefix_space"] else name


def _tokenizer_json(tokenizer: TextTokenizer) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    return described
