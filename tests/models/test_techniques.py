"""Full fine-tuning, LoRA and Adapters: what is trained, how it begins, that stages are parts of the whole, what is saved of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from workbench.models.hub import locate
from workbench.models.loading import load_stack
from workbench.models.stack import LayerStack
from workbench.models.technique_saving import TrainedDescription, load_trained, save_trained, set_trained
from workbench.models.techniques import TechniqueConfig, TechniqueStage

FAMILIES = ("bert", "distilbert", "gpt2", "llama", "opt", "vit", "t5", "bart")
TECHNIQUES = ("full", "lora", "adapters")


def config_for(stack: LayerStack, technique: str, **changes: object) -> TechniqueConfig:
    settings = {"technique": technique, "hidden_size": stack.hidden_size, "num_layers": stack.num_layers, "bottleneck": 8}
    return TechniqueConfig(**settings | changes)


def inputs_of(stack: LayerStack) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids, mask, _ = stack.stage(0, 1).make_inputs(4, 17 if stack.family.reads_images else 8)
    return ids, mask


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_stages_are_parts_of_the_whole(family: str, technique: str) -> None:
    """Any cut: the same names, the same initial weights, the same logits; every trained parameter of the last stage gets a gradient."""
    stack = load_stack(f"tiny-{family}")
    config, (ids, mask) = config_for(stack, technique), inputs_of(stack)
    whole = TechniqueStage(copy.deepcopy(stack.stage(0, stack.num_layers)), config)
    parts = [TechniqueStage(copy.deepcopy(stack.stage(start, stop)), config) for start, stop in ((0, 2), (2, 4), (4, 6))]
    union = {name: parameter for part in parts for name, parameter in part.trained().items()}
    assert set(union) == set(whole.trained())
    for name, parameter in whole.trained().items():
        torch.testing.assert_close(union[name], parameter, rtol=0, atol=0)
    hidden = ids
    for part in parts:
        hidden, last = part(hidden, mask)
    samples = torch.arange(4)
    logits = parts[-1].logits(last, mask, samples, 3)
    torch.testing.assert_close(logits, whole.logits(whole(ids, mask)[1], mask, samples, 3), rtol=1e-5, atol=1e-6)
    logits.square().sum().backward()
    assert not [name for name, parameter in parts[-1].trained().items() if parameter.grad is None]


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_and_adapters_begin_at_the_backbone(family: str) -> None:
    """B is zero, so LoRA begins exactly there; an adapter begins near the identity."""
    stack = load_stack(f"tiny-{family}")
    ids, mask = inputs_of(stack)
    with torch.no_grad():
        expected = stack(ids, mask)[0]
        for technique, tolerance in (("lora", 1e-6), ("adapters", 1e-2)):
            model = TechniqueStage(copy.deepcopy(stack.stage(0, stack.num_layers)), config_for(stack, technique))
            torch.testing.assert_close(model(ids, mask)[1], expected, rtol=tolerance, atol=tolerance)
            for name, parameter in model.trained().items():
                if name.startswith("adapters.") or ".lora_B." in name:
                    parameter.add_(0.1)
            assert not torch.allclose(model(ids, mask)[1], expected, atol=1e-3)


def test_what_each_technique_trains() -> None:
    """Full: all. LoRA: r (in + out) for queries and values.  Adapters: two bottlenecks and two norms in each layer.  All: the head."""
    stack = load_stack("tiny-bert")
    trained = {}
    for technique in TECHNIQUES:
        model = TechniqueStage(copy.deepcopy(stack.stage(0, 6)), config_for(stack, technique))
        trained[technique] = sum(parameter.numel() for parameter in model.trained().values())
    head = 32 * 2 + 2
    assert trained["full"] == sum(parameter.numel() for parameter in stack.parameters()) + head
    assert trained["lora"] == 6 * 2 * 8 * (32 + 32) + head
    assert trained["adapters"] == 6 * 2 * (2 * 32 * 8 + 8 + 32 + 2 * 32) + head
    without = TechniqueStage(stack.stage(0, 6), config_for(stack, "adapters", train_norms=False))
    assert sum(parameter.numel() for parameter in without.trained().values()) == trained["adapters"] - 6 * 2 * 2 * 32


def test_dropout_is_the_heads_alone() -> None:
    """It depends on sample and epoch; evaluation has none; LoRA's own is drawn only if asked for."""
    stack = load_stack("tiny-bert")
    (ids, mask), samples = inputs_of(stack), torch.arange(4)
    model = TechniqueStage(copy.deepcopy(stack.stage(0, 6)), config_for(stack, "lora", dropout=0.5))
    _, last = model(ids, mask)
    assert torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 0))
    assert not torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 1))
    model.eval()
    assert torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 1))
    noisy = TechniqueStage(copy.deepcopy(stack.stage(0, 6)), config_for(stack, "lora", lora_dropout=0.5))
    for name, parameter in noisy.trained().items():
        if ".lora_B." in name:
            torch.nn.init.ones_(parameter)
    assert not torch.equal(noisy(ids, mask)[1], noisy(ids, mask)[1])
    noisy.eval()
    assert torch.equal(noisy(ids, mask)[1], noisy(ids, mask)[1])


@pytest.mark.parametrize("technique", TECHNIQUES)
def test_saved_and_loaded_it_predicts_the_same(technique: str, tmp_path: Path) -> None:
    stack = load_stack("tiny-gpt2")
    config, (ids, mask) = config_for(stack, technique), inputs_of(stack)
    model = TechniqueStage(stack.stage(0, 6), config)
    with torch.no_grad():
        for number, parameter in enumerate(model.trained().values()):
            parameter.add_(0.01 * (number + 1))
    save_trained(tmp_path, model, TrainedDescription(config=config, model="tiny-gpt2", task="sentiment", max_length=64))
    loaded, description = load_trained(tmp_path)
    assert description.config == config
    model.eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, mask)[1], model(ids, mask)[1])
    with pytest.raises(Exception, match=r"trained parameter .* It is missing"):
        set_trained(model, {})


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, called by peft
def test_peft_reads_a_saved_lora(tmp_path: Path) -> None:
    """PeftModel over the plain Hugging Face model gives our hidden states, so the names and the scale are peft's."""
    from peft import PeftModel
    from transformers import AutoModel

    name = "all-MiniLM-L6-v2"
    stack = load_stack(name)
    config = config_for(stack, "lora", lora_alpha=32.0)
    model = TechniqueStage(stack.stage(0, stack.num_layers), config)
    with torch.no_grad():
        for number, (path, parameter) in enumerate(model.trained().items()):
            if ".lora_B." in path:
                parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(number))
    save_trained(tmp_path, model, TrainedDescription(config=config, model=name, task="sentiment", max_length=64))
    plain = AutoModel.from_pretrained(locate(name), add_pooling_layer=False)
    ids, mask = torch.randint(1000, 2000, (3, 9)), torch.ones(3, 9, dtype=torch.int64)
    model.eval()
    with torch.no_grad():
        before = plain.eval()(input_ids=ids, attention_mask=mask).last_hidden_state
        theirs = PeftModel.from_pretrained(plain, tmp_path).eval()(input_ids=ids, attention_mask=mask).last_hidden_state
        ours = model(ids, mask)[1]
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, ours, atol=1e-2)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, called by peft
def test_lora_names_of_an_encoder_decoder_are_pefts(tmp_path: Path) -> None:
    """Decoder layers count from 0 there."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    stack = load_stack("tiny-t5")
    config = config_for(stack, "lora")
    model = TechniqueStage(stack.stage(0, 6), config)
    save_trained(tmp_path, model, TrainedDescription(config=config, model="tiny-t5", task="sentiment", max_length=64))
    shape = {"d_model": 32, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": 100}
    theirs = get_peft_model(AutoModel.from_config(AutoConfig.for_model("t5", **shape)), LoraConfig(r=8, target_modules=["q", "v"]))
    ours = load_file(tmp_path / "adapter_model.safetensors")
    expected = get_peft_model_state_dict(theirs)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: tensor.shape for name, tensor in expected.items()}
