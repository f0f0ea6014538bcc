"""Write a model as a GGUF file, which llama.cpp and transformers (`gguf_file=`) read.

Names and layout are those of llama.cpp's own converter: in the Llama architecture the rows of queries and keys are
interleaved by halves of the rotary dimensions.  Weights are float32 or float16, norms and biases float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.core.files import whole_file
from workbench.models.tokenizer import TextTokenizer

GgufType = Literal["float32", "float16"]
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's name of the architecture of each family that can be written."""
_PRE_TOKENIZERS = {"qwen2": "qwen2", "qwen3": "qwen2"}
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def require_gguf(name: str, config: Any, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError for a model that cannot be written, because of its family or its tokenizer."""
    request = f"'{name}' as a GGUF file was asked for."
    if config.model_type not in ARCHITECTURES:
        problem = f"Of its family, {config.model_type}, no GGUF is written here."
        raise ConfigError(request, problem, f"Choose one of {', '.join(ARCHITECTURES)}, or export a folder.")
    model = _tokenizer_json(tokenizer)["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        problem = "Its tokenizer is no byte-level BPE, the only kind that is written here."
        raise ConfigError(request, problem, "Export a folder, and convert that with llama.cpp.")


def write_gguf(path: Path, name: str, model: Any, tokenizer: TextTokenizer, dtype: GgufType = "float16") -> None:
    """Write a model that generates (Hugging Face's, with its head) as one file.

    Raises ConfigError as require_gguf, WriteError if the file cannot be written.
    """
    from gguf import GGUFWriter, get_tensor_name_map
    from gguf.constants import MODEL_ARCH

    config = model.config
    require_gguf(name, config, tokenizer)
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    with whole_file(path) as part:
        writer = GGUFWriter(part, architecture)
        writer.add_name(Path(name).name)
        _add_shape(writer, config, architecture)
        writer.add_file_type(0 if dtype == "float32" else 1)
        _add_tokenizer(writer, tokenizer, config)
        for key, tensor in tensors_of(model, architecture).items():
            stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
            assert stored is not None, f"a tensor {key} in {architecture}"
            is_matrix = tensor.ndim > 1 and dtype == "float16"
            writer.add_tensor(stored, (tensor.half() if is_matrix else tensor.float()).contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def tensors_of(model: Any, architecture: str) -> dict[str, Tensor]:
    """Return the tensors to write by Hugging Face's names, Llama's queries and keys interleaved; no tied head."""
    config, tensors = model.config, {key: value.detach() for key, value in model.state_dict().items()}
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    if architecture == "llama":
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for key, tensor in tensors.items():
            for projection, count in heads.items():
                if f".{projection}." in key:
                    halves = tensor.reshape(count, 2, tensor.shape[0] // count // 2, *tensor.shape[1:])
                    tensors[key] = halves.swapaxes(1, 2).reshape(tensor.shape)
    return tensors


def _add_shape(writer: Any, config: Any, architecture: str) -> None:
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if rope.get("rope_type", "default") != "default":
        problem = f"Its positions are scaled ({rope['rope_type']}), which is not written here."
        raise ConfigError("A GGUF file was asked for.", problem, "Export a folder, and convert that with llama.cpp.")
    if architecture == "llama":
        writer.add_rope_dimension_count(head_size)


def _add_tokenizer(writer: Any, tokenizer: TextTokenizer, config: Any) -> None:
    described, backend = _tokenizer_json(tokenizer), tokenizer.backend
    added = {token["id"]: token for token in described["added_tokens"]}
    texts, kinds = [], []
    for index in range(config.vocab_size):
        text = backend.id_to_token(index)
        texts.append(f"[PAD{index}]" if text is None else text)
        token = added.get(index)
        kinds.append(_NORMAL if token is None else _CONTROL if token["special"] else _USER_DEFINED)
        if text is None:
            kinds[-1] = _USER_DEFINED
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZERS.get(config.model_type) or _pre_tokenizer(described))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(merges))
    writer.add_pad_token_id(tokenizer.pad_id)
    if tokenizer.end_id is not None:
        writer.add_eos_token_id(tokenizer.end_id)
    for add, role in ((writer.add_bos_token_id, "bos_token"), (writer.add_unk_token_id, "unk_token")):
        found = backend.token_to_id(tokenizer.special_tokens.get(role, ""))
        if found is not None:
            add(found)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _pre_tokenizer(described: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how text is split before the merges."""
    split = json.dumps(described["pre_tokenizer"])
    if '"Digits"' in split:
        return "smollm"
    return "llama-bpe" if "{1,3}" in split else "gpt-2"


def _tokenizer_json(tokenizer: TextTokenizer) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(tokenizer.backend.to_str())
    return described
