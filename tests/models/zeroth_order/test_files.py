"""Models of files: heads of every kind, and stages that read their own weights only."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from workbench.methods.p_rge.zeroth_order import (
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    save_for_peft,
)
from workbench.models.lora import import_peft
from workbench.models.quantization import QuantizationConfig

from .prompts import perturb, prompts

SMALL = {"vocab_size": 1400, "max_position_embeddings": 64}
MODELS = {
    # OPT-350m's words are narrower than its layers; Llama's head may be a matrix of its own; GPT-2's is its word
    # embedding.
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            ffn_dim=64,
            num_attention_heads=4,
            word_embed_proj_dim=16,
            do_layer_norm_before=False,
            **SMALL,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            num_attention_heads=4,
            tie_word_embeddings=False,
            **SMALL,
        )
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=1400, n_positions=64)),
}


@pytest.mark.parametrize(
    "quantization", [None, QuantizationConfig(storage="int8", block_size=32)], ids=["float32", "int8"]
)
@pytest.mark.parametrize("family", MODELS)
def test_heads_and_stages_of_files_are_those_of_transformers(family, quantization, tmp_path):
    torch.manual_seed(0)
    published = MODELS[family]().eval()
    published.save_pretrained(tmp_path)
    batch, config = prompts(), TrainableConfig(rank=4)
    model = load_causal_model(str(tmp_path), config, quantization=quantization)
    with torch.no_grad():
        logits = published(batch.input_ids, attention_mask=batch.attention_mask).logits[
            torch.arange(3)[:, None], batch.positions
        ]
    tolerance = 1e-4 if quantization is None else 2e-2
    torch.testing.assert_close(model.logits_at(batch), logits, rtol=tolerance, atol=tolerance)
    estimate = ZerothOrderConfig(queries=1, epsilon=0.1)
    expected, states = Prge(model, estimate).losses(batch, 0), None
    for start in (0, 1):
        stage = load_causal_model(str(tmp_path), config, span=(start, start + 1), quantization=quantization)
        values = {name for name, _ in stage.named_parameters()} | {name for name, _ in stage.named_buffers()}
        assert not any(name.startswith(f"backbone.layers.{1 - start}.") for name in values)
        states = Prge(stage, estimate).forward_stage(states, batch, 0, [0])
    torch.testing.assert_close(Prge(stage, estimate).arranged(states, 1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)  # peft asks transformers for it
@pytest.mark.parametrize(
    ("family", "technique", "projections"),
    [
        ("llama", "lora_fa", "query_value"),
        ("gpt2", "lora", "query_value"),
        ("opt", "lora_fa", "query_value"),
        ("llama", "lora_fa", "all"),
        ("gpt2", "lora", "all"),
    ],
)
def test_peft_alone_reads_what_was_trained(family, technique, projections, tmp_path):
    """Over the base that the adapter itself names; other techniques than LoRA's leave nothing for peft."""
    torch.manual_seed(0)
    MODELS[family]().eval().save_pretrained(tmp_path / "base")
    batch, config = prompts(), TrainableConfig(technique=technique, projections=projections, rank=4, alpha=12)
    model = load_causal_model(str(tmp_path / "base"), config)
    perturb(model, seed=3, alpha=0.3)
    assert save_for_peft(tmp_path / "adapter", model, name=str(tmp_path / "base")).task == "CAUSAL_LM"
    adapted = import_peft().AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        logits = adapted(batch.input_ids, attention_mask=batch.attention_mask).logits[
            torch.arange(3)[:, None], batch.positions
        ]
    torch.testing.assert_close(model.logits_at(batch), logits, rtol=1e-4, atol=1e-4)
    vera = load_causal_model(str(tmp_path / "base"), TrainableConfig(technique="vera"))
    assert save_for_peft(tmp_path / "other", vera, name=str(tmp_path / "base")) is None
    assert not (tmp_path / "other").exists()
