"""A GGUF file becomes a folder that loads as the model it was made from."""

import json

import numpy as np
import pytest
import torch

from workbench.assets.conversion import NAMES, convert_smollm2
from workbench.models.loading import load_stack, load_tokenizer

LETTERS = "abcdefgh"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave rotary halves, as the public conversion script to GGUF does it."""
    return (
        weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, weights.shape[1])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write_gguf(path, stack):
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    config = stack.config
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "Ġ", *LETTERS, "ab", "1", "2", "12"]
    tokens += [f"unused{number}" for number in range(config.vocab_size - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (config.vocab_size - 3))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages }}")
    names = {
        f"layers.{index}.{theirs}": f"blk.{index}.{ours}"
        for index in range(2)
        for ours, theirs in NAMES["layers"].items()
    }
    names |= {"embedding.embed_tokens": "token_embd", "final": "output_norm"}
    for name, tensor in stack.state_dict().items():
        module = name.removesuffix(".weight")
        weights = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weights = permute(weights, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        writer.add_tensor(f"{names[module]}.weight", np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def converted(tmp_path):
    pytest.importorskip("gguf")
    stack = load_stack("tiny-llama-2")
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    write_gguf(tmp_path / "source" / "model.gguf", stack)
    convert_smollm2(tmp_path / "source", tmp_path / "target")
    return stack, tmp_path / "target"


def test_the_converted_model_gives_the_same_numbers(converted):
    stack, folder = converted
    again = load_stack(str(folder))
    ids, mask = torch.tensor([[5, 300, 9, 700, 41]]), torch.ones(1, 5, dtype=torch.long)
    expected, _ = stack(ids, mask)
    actual, _ = again(ids, mask)
    torch.testing.assert_close(actual, expected, rtol=5e-3, atol=5e-3)  # kept as float16
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 10000.0


def test_the_converted_tokenizer_merges_and_splits_digits(converted):
    tokenizer = load_tokenizer(str(converted[1]))
    tokens = tokenizer.backend.get_vocab()
    (ids,) = tokenizer.encode(["abc 12<|im_end|>"], max_length=16)
    assert ids == [tokens[token] for token in ("ab", "c", "Ġ", "1", "2", "<|im_end|>")]
    assert tokenizer.pad_id == 2 and tokenizer.joins_pairs
