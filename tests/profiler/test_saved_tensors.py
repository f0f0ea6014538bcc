"""The bytes that layer_shapes counts are those that PyTorch's autograd keeps, dropout on, for T5 and BART."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.profiler.analytic import TechniqueSizes, layer_costs
from workbench.profiler.descriptions import MODELS

BATCH, TOKENS, TARGET = 2, 64, 8
SIZES = {"hidden": 64, "num_layers": 4, "heads": 4, "feed_forward": 256, "vocab": 100}


def counted(name, technique, **sizes):
    model = replace(MODELS[name], **SIZES, target_tokens=TARGET, positions=72 if name == "BART-Large" else 0)
    costs = layer_costs(model, technique, batch=BATCH, sequence_length=TOKENS, sizes=TechniqueSizes(**sizes))
    return sum(cost.context_bytes(BATCH, TOKENS) for cost in costs)


def kept(model):
    """The bytes that autograd keeps of a step, parameters left out; on the meta device, with dropout's mask as a GPU
    keeps it."""
    import torch

    params = {param.untyped_storage()._cdata for param in model.parameters()}
    results, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in params:
            results[storage._cdata] = storage.nbytes()
            alive.append(tensor)  # a storage's address must not be used again meanwhile
        return tensor

    with torch.device("meta"):
        tokens = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        labels = torch.zeros(BATCH, TARGET, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.train()(input_ids=tokens, labels=labels, use_cache=False)
    return sum(results.values())


def build(name):
    import torch
    import transformers

    with torch.device("meta"):
        if name == "T5-Base":
            config = transformers.T5Config(
                d_model=SIZES["hidden"],
                num_layers=SIZES["num_layers"],
                num_heads=SIZES["heads"],
                d_kv=SIZES["hidden"] // SIZES["heads"],
                d_ff=SIZES["feed_forward"],
                vocab_size=SIZES["vocab"],
                dropout_rate=0.1,
                decoder_start_token_id=0,
                pad_token_id=0,
                attn_implementation="eager",
            )
            return transformers.T5ForConditionalGeneration(config)
        config = transformers.BartConfig(
            d_model=SIZES["hidden"],
            encoder_layers=SIZES["num_layers"],
            decoder_layers=SIZES["num_layers"],
            encoder_attention_heads=SIZES["heads"],
            decoder_attention_heads=SIZES["heads"],
            encoder_ffn_dim=SIZES["feed_forward"],
            decoder_ffn_dim=SIZES["feed_forward"],
            vocab_size=SIZES["vocab"],
            max_position_embeddings=70,
            dropout=0.1,
            attention_dropout=0.1,
            activation_dropout=0.1,
            attn_implementation="eager",
        )
        return transformers.BartForConditionalGeneration(config)


@pytest.fixture(autouse=True)
def masks_of_one_byte(monkeypatch):
    """On a CPU dropout keeps a float mask; GPUs, which the paper measured, keep bool."""
    import torch

    def dropout(tensor, p=0.5, training=True, inplace=False):
        return torch.native_dropout(tensor, p, True)[0] if training and p else tensor

    monkeypatch.setattr(torch.nn.functional, "dropout", dropout)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["T5-Base", "BART-Large"])
def test_full_fine_tuning(name):
    assert counted(name, "full") == pytest.approx(kept(build(name)), rel=0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_lora(dropout):
    import peft
    import torch

    config = peft.LoraConfig(r=4, target_modules=["q", "v"], lora_dropout=dropout)
    model = build("T5-Base")
    with torch.device("meta"):
        model = peft.get_peft_model(model, config)
    ours = counted("T5-Base", "lora", lora_rank=4, lora_dropout=dropout > 0)
    assert ours == pytest.approx(kept(model), rel=0.05)
