"""Model folders: every path gives transformers' numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.model_folders import PATHS, Spoil, batch_for, forward_only, sharded, tensors, whole, write
from workbench.models.families import FAMILIES


def another(name: str, like: str) -> Spoil:
    """Return what adds a tensor of the shape of another one."""
    return tensors(
        lambda found: found | {name: torch.randn(next(found[key].shape for key in found if key.endswith(like)))}
    )


def reference(folder: Path, ids: Tensor, mask: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return transformers' last hidden states, and its logits if the model has a head."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    maker = AutoModelForSeq2SeqLM if family.decoder else AutoModelForCausalLM if family.is_causal else AutoModel
    model = maker.from_pretrained(folder, attn_implementation="sdpa").eval()
    given: dict[str, Any] = {"attention_mask": mask, "output_hidden_states": True}
    if family.reads_images:
        pixels = ids[:, 1:].reshape(-1, 4, 4, 1, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(-1, 1, 8, 8)
        return model(pixels / 127.5 - 1).last_hidden_state, None
    if targets is not None:
        result = model(input_ids=ids, decoder_input_ids=targets, **given)
        return result.decoder_hidden_states[-1], result.logits
    result = model(input_ids=ids, **given)
    return result.hidden_states[-1], result.logits if family.is_causal else None


WINDOWS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
ODD: dict[str, tuple[str, dict[str, Any], Spoil | None]] = {
    **{f"{family} as it is": (family, {}, None) for family in FAMILIES},
    "bert: gelu_new, wide": ("bert", {"hidden_act": "gelu_new", "intermediate_size": 200}, None),
    "bert: one token type": ("bert", {"type_vocab_size": 1}, None),
    "gpt2: untied": ("gpt2", {"tie_word_embeddings": False}, None),
    "gpt2: tied, a head of its own in the file": ("gpt2", {}, another("lm_head.weight", "wte.weight")),
    "gpt2: not scaled": ("gpt2", {"scale_attn_weights": False}, None),
    "gpt2: scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}, None),
    "llama: tied": ("llama", {"tie_word_embeddings": True}, None),
    "llama: untied": ("llama", {"tie_word_embeddings": False}, None),
    "llama: tied, a head of its own in the file": (
        "llama",
        {"tie_word_embeddings": True},
        another("lm_head.weight", "embed_tokens.weight"),
    ),
    "llama: without groups, long positions": (
        "llama",
        {
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
            | {"original_max_position_embeddings": 8},
        },
        None,
    ),
    "llama: one group, biases, wide heads": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
        None,
    ),
    "roberta: other sizes": ("roberta", {"vocab_size": 1499, "hidden_act": "relu"}, None),
    "modernbert: biases, narrow windows": (
        "modernbert",
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 4},
        None,
    ),
    "mistral: window shorter than the text, wide heads": ("mistral", {"sliding_window": 4, "head_dim": 12}, None),
    "mistral: no window": ("mistral", {"sliding_window": None}, None),
    "qwen2: tied, one group, windows in two layers": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "use_sliding_window": True,
            "sliding_window": 3,
            "layer_types": WINDOWS,
        },
        None,
    ),
    "qwen3: biases, odd vocabulary, long positions": (
        "qwen3",
        {
            "attention_bias": True,
            "vocab_size": 1493,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            },
        },
        None,
    ),
    "smollm3: biases, other layers without positions, windows": (
        "smollm3",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "no_rope_layers": [0, 1, 0, 1],
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": WINDOWS,
        },
        None,
    ),
    "granite: tied, biases": ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, None),
    "phi3: one group, window, half of a head turns": (
        "phi3",
        {
            "num_key_value_heads": 1,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        None,
    ),
    "phi: norms of heads, one group": ("phi", {"qk_layernorm": True, "num_key_value_heads": 1}, None),
    "gpt_neox: one block after the other, tied": (
        "gpt_neox",
        {"use_parallel_residual": False, "tie_word_embeddings": True},
        None,
    ),
    "gpt_neox: without biases, whole heads turn": (
        "gpt_neox",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
        None,
    ),
    "olmo2: one group, biases": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}, None),
    "gemma3: untied, one group, narrow windows, long positions": (
        "gemma3_text",
        {
            "tie_word_embeddings": False,
            "num_key_value_heads": 1,
            "sliding_window": 3,
            "query_pre_attn_scalar": 9,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        None,
    ),
    "opt: untied": ("opt", {"tie_word_embeddings": False}, None),
    "opt: norms behind, narrow words": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}, None),
    "opt: without biases and norm weights": (
        "opt",
        {"enable_bias": False, "layer_norm_elementwise_affine": False},
        None,
    ),
    "vit: without biases": ("vit", {"qkv_bias": False, "hidden_act": "gelu_new"}, None),
    "t5: untied": ("t5", {"tie_word_embeddings": False}, None),
    "t5: gated, other head size": ("t5", {"feed_forward_proj": "gated-gelu", "d_kv": 16}, None),
    "t5: gated, untied": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, None),
    "t5: tied, encoder words of their own in the file": (
        "t5",
        {},
        another("encoder.embed_tokens.weight", "shared.weight"),
    ),
    "bart: untied": ("bart", {"tie_word_embeddings": False}, None),
    "bart: other stacks": (
        "bart",
        {"decoder_attention_heads": 8, "decoder_ffn_dim": 96, "activation_function": "quick_gelu"},
        None,
    ),
    "bart: stacks of other lengths": ("bart", {"encoder_layers": 1, "decoder_layers": 3}, None),
    "bart: scaled": ("bart", {"scale_embedding": True, "activation_function": "relu"}, None),
}


@torch.no_grad()
@pytest.mark.parametrize("case", ODD)
def test_every_path_gives_transformers_numbers(case: str, tmp_path: Path) -> None:
    family, changes, spoil = ODD[case]
    folder = write(tmp_path, family, **changes)
    if spoil is not None:
        spoil(folder)
    batch = batch_for(family)
    expected, logits = reference(folder, *batch)
    real = batch[1].bool() if batch[2] is None else torch.ones_like(batch[2], dtype=torch.bool)

    def assert_equal(found: Tensor, wanted: Tensor, what: str) -> None:
        error = (found[real] - wanted[real]).abs().max() / wanted[real].abs().max()
        assert error < 1e-5, f"{what}: {error:.1e}"

    for what, path in PATHS.items():
        if expected.shape[-1] == 32:  # transformers gives OPT-350m's hidden states behind their projection
            assert_equal(path(str(folder), *batch), expected, what)
    if logits is not None:
        assert_equal(sharded(str(folder), *batch, what="all"), logits, "sharded head")
        assert_equal(forward_only(str(folder), *batch), logits, "forward-only head")


def test_pairs_with_one_token_type(tmp_path: Path) -> None:
    """All tokens are of type 0, as transformers has it when no types are given."""
    folder = write(tmp_path, "bert", type_vocab_size=1)
    ids, mask, _ = batch_for("bert")
    expected, _ = reference(folder, ids, mask, None)
    second = torch.cat([ids[:, :4], ~ids[:, 4:]], dim=1)
    torch.testing.assert_close(
        whole(str(folder), second, mask, None)[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=1e-6
    )
