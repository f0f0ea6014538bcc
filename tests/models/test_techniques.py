"""Full fine-tuning, LoRA and Adapters: what is trained, how it begins, that stages are parts of the whole, what is
saved of it."""

from __future__ import annotations

import copy
import os
import stat
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForTokenClassification

from workbench.core.errors import WorkbenchError
from workbench.models.configuration import model_config, model_facts
from workbench.models.evaluation import answer_scores
from workbench.models.families import FAMILIES
from workbench.models.loading import load_model, load_stack
from workbench.models.lora import import_peft
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.models.saving import TrainedDescription, load_trained, save_tokenizer, save_trained, set_trained
from workbench.models.side_layers import TOKEN_KINDS
from workbench.models.stack import LayerStack
from workbench.models.techniques import TechniqueConfig, TechniqueStage, _TrainedEmbedding, num_trained

from .helpers import technique_config, technique_part

TECHNIQUES = ("full", "lora", "adapters")


def inputs_of(stack: LayerStack) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids, mask, _ = stack.stage(0, 1).make_inputs(4, 17 if stack.family.reads_images else 8)
    return ids, mask


@pytest.mark.parametrize(
    ("family", "technique"),
    [*product(FAMILIES, ("lora", "adapters")), *product(("bert", "gpt2", "t5", "vit"), ("full",))],
)
def test_stages_are_parts_of_the_whole(family: str, technique: str) -> None:
    """Any cut: the same names, the same initial weights, the same logits; every trained parameter of the last stage
    gets a gradient."""
    stack = load_stack(f"tiny-{family}")
    config, (ids, mask) = technique_config(stack, technique), inputs_of(stack)
    reference = technique_part(stack, config)
    parts = [technique_part(stack, config, start, stop) for start, stop in ((0, 2), (2, 4), (4, 6))]
    union = {name: parameter for part in parts for name, parameter in part.trained().items()}
    assert set(union) == set(reference.trained())
    for name, parameter in reference.trained().items():
        torch.testing.assert_close(union[name], parameter, rtol=0, atol=0)
    hidden = ids
    for part in parts:
        hidden, last = part(hidden, mask)
    samples = torch.arange(4)
    logits = parts[-1].logits(last, mask, samples, 3)
    torch.testing.assert_close(
        logits, reference.logits(reference(ids, mask)[1], mask, samples, 3), rtol=1e-5, atol=1e-6
    )
    logits.square().sum().backward()
    assert not [name for name, parameter in parts[-1].trained().items() if parameter.grad is None]


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_weights_are_counted_without_loading_a_model(family: str) -> None:
    stack, facts = load_stack(f"tiny-{family}"), model_facts(f"tiny-{family}")
    for technique in ("full", "lora", "adapters", "serial", "parallel"):
        config = technique_config(stack, technique, num_outputs=3)
        trained = technique_part(stack, config).trained().values()
        assert num_trained(config, facts) == sum(parameter.numel() for parameter in trained), technique


@pytest.mark.parametrize("technique", ["lora", "adapters", "serial", "parallel"])
def test_the_frozen_head_of_words_is_not_counted(technique: str) -> None:
    stack = load_stack("tiny-llama", with_head=True)
    config = technique_config(stack, technique, kind="text_generation")
    trained = technique_part(stack, config).trained().values()
    assert num_trained(config, model_facts("tiny-llama")) == sum(parameter.numel() for parameter in trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_and_adapters_begin_at_the_backbone(family: str) -> None:
    """B is zero, so LoRA begins exactly there; an adapter begins near the identity."""
    stack = load_stack(f"tiny-{family}")
    ids, mask = inputs_of(stack)
    with torch.no_grad():
        expected = stack(ids, mask)[0]
        for technique, tolerance in (("lora", 1e-6), ("adapters", 1e-2)):
            model = technique_part(stack, technique_config(stack, technique))
            torch.testing.assert_close(model(ids, mask)[1], expected, rtol=tolerance, atol=tolerance)
            for name, parameter in model.trained().items():
                if name.startswith("adapters.") or ".lora_B." in name:
                    parameter.add_(0.1)
            assert not torch.allclose(model(ids, mask)[1], expected, atol=1e-3)


def test_what_each_technique_trains() -> None:
    """Full: all. LoRA: r (in + out) for queries and values.  Adapters: two bottlenecks and two norms in each layer.
    All: the head."""
    stack = load_stack("tiny-bert")
    trained = {}
    for technique in TECHNIQUES:
        model = technique_part(stack, technique_config(stack, technique))
        trained[technique] = sum(parameter.numel() for parameter in model.trained().values())
    head = 32 * 2 + 2
    assert trained["full"] == sum(parameter.numel() for parameter in stack.parameters()) + head
    assert trained["lora"] == 6 * 2 * 8 * (32 + 32) + head
    assert trained["adapters"] == 6 * 2 * (2 * 32 * 8 + 8 + 32 + 2 * 32) + head


def test_dropout_is_the_heads_alone() -> None:
    """It depends on sample and epoch; evaluation has none; LoRA's own is drawn only if asked for."""
    stack = load_stack("tiny-bert")
    (ids, mask), samples = inputs_of(stack), torch.arange(4)
    model = technique_part(stack, technique_config(stack, "lora", dropout=0.5))
    _, last = model(ids, mask)
    assert torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 0))
    assert not torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 1))
    model.eval()
    assert torch.equal(model.logits(last, mask, samples, 0), model.logits(last, mask, samples, 1))
    noisy = technique_part(stack, technique_config(stack, "lora", lora_dropout=0.5))
    for name, parameter in noisy.trained().items():
        if ".lora_B." in name:
            torch.nn.init.ones_(parameter)
    assert not torch.equal(noisy(ids, mask)[1], noisy(ids, mask)[1])
    noisy.eval()
    assert torch.equal(noisy(ids, mask)[1], noisy(ids, mask)[1])


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, called by peft
@pytest.mark.filterwarnings("ignore::UserWarning")  # peft saw no head in the base model
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "llama", "opt", "t5", "vit"])
def test_a_result_loads_again_and_by_peft_or_transformers_alone(family: str, technique: str, tmp_path: Path) -> None:
    """The same predictions from the folder alone: our head is the mean over the tokens of a token classification's."""
    base, folder = tmp_path / "base", tmp_path / "result"
    load_model(f"tiny-{family}-2").save_pretrained(base)
    save_tokenizer(f"tiny-{family}-2", base)
    stack = load_stack(str(base))
    regression = {"kind": "regression", "num_outputs": 1, "label_mean": 3.0, "label_std": 2.0}
    config = technique_config(stack, technique, **(regression if family == "gpt2" else {"num_outputs": 3}))
    (ids, mask), samples = inputs_of(stack), torch.arange(4)
    if not stack.family.reads_images:
        mask[0, 5:] = 0
    model = TechniqueStage(stack.stage(0, 2), config)
    with torch.no_grad():
        for number, parameter in enumerate(model.trained().values()):
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
    names = () if family == "gpt2" else ("bad", "fine", "good")
    about = TrainedDescription(config=config, model=str(base))
    before = os.umask(0o027)
    try:
        save_trained(folder, model, about, class_names=names)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}
    model.eval()
    loaded, _ = load_trained(folder)
    with torch.no_grad():
        expected = model.logits(model(ids, mask)[1], mask, samples, 0)
        torch.testing.assert_close(
            loaded.logits(loaded(ids, mask)[1], mask, samples, 0), expected, rtol=1e-5, atol=1e-5
        )
    is_ours = technique == "adapters" or family in ("opt", "t5", "vit")
    assert (folder / "trained.safetensors").is_file() == is_ours
    if is_ours:
        return
    if technique == "lora":
        alone: Any = (
            import_peft()
            .AutoPeftModelForTokenClassification.from_pretrained(folder, num_labels=config.num_outputs)
            .eval()
        )
    else:
        alone = AutoModelForTokenClassification.from_pretrained(folder).eval()
        assert alone.config.id2label == dict(enumerate(names or ("LABEL_0",)))
    with torch.no_grad():
        logits = alone(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(
        (logits * mask[..., None]).sum(1) / mask[..., None].sum(1), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", TOKEN_KINDS)
@pytest.mark.parametrize(
    ("family", "technique"),
    [("bert", "full"), ("distilbert", "lora"), ("gpt2", "full"), ("llama", "lora"), ("opt", "lora")],
)
def test_answers_and_tags_load_again_and_by_peft_or_transformers_alone(
    family: str, technique: str, kind: str, tmp_path: Path
) -> None:
    """Heads that read every token are those of transformers' own classes; only the padding's logits differ."""
    load_model(f"tiny-{family}-2").save_pretrained(tmp_path / "base")
    save_tokenizer(f"tiny-{family}-2", tmp_path / "base")
    stack = load_stack(str(tmp_path / "base"))
    config, folder = technique_config(stack, technique, kind=kind), tmp_path / "result"
    (ids, mask), samples = inputs_of(stack), torch.arange(4)
    mask[0, 5:] = 0
    model = TechniqueStage(stack.stage(0, 2), config)
    save_trained(folder, model, TrainedDescription(config=config, model=str(tmp_path / "base")))
    loaded, _ = load_trained(folder)
    model.eval()
    with torch.no_grad():
        expected = model.logits(model(ids, mask)[1], mask, samples, 0)
        torch.testing.assert_close(
            loaded.logits(loaded(ids, mask)[1], mask, samples, 0), expected, rtol=1e-5, atol=1e-5
        )
    assert expected.shape == (4, 8, 2) and (kind != "question_answering" or (expected[0, 5:] < -1e30).all())
    if (folder / "trained.safetensors").is_file():
        assert family == "opt" and kind == "token_classification", "transformers has no such class"
        return
    makers = import_peft() if technique == "lora" else transformers
    maker = {"question_answering": "ModelForQuestionAnswering", "token_classification": "ModelForTokenClassification"}[
        kind
    ]
    alone = getattr(makers, ("AutoPeft" if technique == "lora" else "Auto") + maker).from_pretrained(folder).eval()
    with torch.no_grad():
        actual = alone(input_ids=ids, attention_mask=mask)
    logits = (
        actual.logits
        if kind == "token_classification"
        else torch.stack([actual.start_logits, actual.end_logits], dim=2)
    )
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "technique"), [("llama", "lora"), ("gpt2", "lora"), ("opt", "adapters")])
def test_text_generation_has_transformers_own_loss_and_loads_again(family: str, technique: str, tmp_path: Path) -> None:
    """With one sample, transformers' loss is ours; LoRA loads by peft alone, with the model's own head."""
    config = model_config(f"tiny-{family}-2")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = transformers.AutoModelForCausalLM.from_config(config).eval()
    base.save_pretrained(tmp_path / "base")
    save_tokenizer(f"tiny-{family}-2", tmp_path / "base")
    stack = load_stack(str(tmp_path / "base"), with_head=True)
    chosen, folder = technique_config(stack, technique, kind="text_generation"), tmp_path / "result"
    (ids, mask), samples = inputs_of(stack), torch.arange(4)
    mask[0, 5:] = 0
    labels = torch.where((torch.arange(8) >= 2) & (mask == 1), ids, -100)  # two tokens of a prompt, then its answer
    ours = torch.cat([labels[:, 1:], torch.full((4, 1), -100)], dim=1)
    model = TechniqueStage(stack.stage(0, 2), chosen)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.trained().items():
            parameter.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
        logits = model.logits(model(ids, mask)[1], mask, samples, 0)
    assert logits.shape == (4, 8, config.vocab_size)
    scores = answer_scores(logits[ours >= 0], ours)
    torch.testing.assert_close(task_loss(logits, ours, "text_generation", reduction="none"), scores[:, 0])
    save_trained(folder, model, TrainedDescription(config=chosen, model=str(tmp_path / "base")))
    loaded, _ = load_trained(folder)
    with torch.no_grad():
        torch.testing.assert_close(loaded.logits(loaded(ids, mask)[1], mask, samples, 0), logits, rtol=1e-5, atol=1e-5)
        if technique != "lora":
            return
        alone = import_peft().AutoPeftModelForCausalLM.from_pretrained(folder).eval()
        for row in range(4):
            own = slice(row, row + 1)
            result = alone(input_ids=ids[own], attention_mask=mask[own], labels=labels[own])
            assert result.loss.item() == pytest.approx(scores[row, 0].item(), rel=1e-5)
            right = (result.logits.argmax(dim=2) == ours[own])[ours[own] >= 0]
            assert right.float().mean().item() == pytest.approx(scores[row, 1].item())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_damaged_result_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """No description, no head, cut weights, a base that is gone."""
    base, folder = tmp_path / "base", tmp_path / "result"
    load_model("tiny-bert-1").save_pretrained(base)
    save_tokenizer("tiny-bert-1", base)
    stack = load_stack(str(base))
    config = technique_config(stack, "lora")
    about = TrainedDescription(config=config, model=str(base))
    save_trained(folder, TechniqueStage(stack.stage(0, 1), config), about)
    weights = folder / "adapter_model.safetensors"
    content = weights.read_bytes()
    with pytest.raises(WorkbenchError, match=r"fine-tuned model .* No such file"):
        load_trained(tmp_path)
    tensors = load_file(weights)
    save_file({name: tensor for name, tensor in tensors.items() if "classifier" not in name}, weights)
    with pytest.raises(WorkbenchError, match=r"'head.output.weight' was asked for. It is missing"):
        load_trained(folder)
    weights.write_bytes(content[:-100])
    with pytest.raises(WorkbenchError, match=r"damaged"):
        load_trained(folder)
    weights.write_bytes(content)
    base.rename(tmp_path / "moved")
    with pytest.raises(WorkbenchError, match=r"The model '.*base' was asked for"):
        load_trained(folder)
    with pytest.raises(WorkbenchError, match=r"trained parameter .* It is missing"):
        set_trained(TechniqueStage(stack.stage(0, 1), technique_config(stack, "full")), {})


def test_a_trained_embedding_adds_to_its_gradient_as_torch_does() -> None:
    """Words twice in a batch, padding, and two backward passes before a step."""
    plain = nn.Embedding(12, 4, padding_idx=0)
    mine = copy.deepcopy(plain)
    mine.__class__ = _TrainedEmbedding
    for ids in (torch.tensor([[3, 3, 0], [11, 1, 0]]), torch.tensor([[3, 5]])):
        for table in (plain, mine):
            (table(ids).sin() * ids[..., None]).sum().backward()
    assert plain.weight.grad is not None and plain.weight.grad[3].abs().sum() > 0
    torch.testing.assert_close(mine.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-t5"])
def test_parallel_adapters_in_two_stages_are_pac_plus_s(name: str) -> None:
    """The logits are those of PAC+'s whole adapter, and no gradient reaches the hidden state between the stages."""
    stack = load_stack(name)
    width, layers = stack.hidden_size, stack.num_layers
    config = TechniqueConfig(technique="parallel", hidden_size=width, num_layers=layers, reduction=2)
    first, last = (TechniqueStage(stack.stage(*span), config) for span in ((0, 2), (2, layers)))
    assert {name.partition(".")[0] for name in {**first.trained(), **last.trained()}} == {"adapters"}
    ids, mask, _ = first.backbone.make_inputs(2, 7)
    samples = torch.arange(2)
    between = first(ids, mask)[0].detach().requires_grad_()
    logits = last.logits(last(between, mask)[1], mask, samples, 1)
    reference = ParallelAdapter(last.adapters.config)
    torch.testing.assert_close(logits, reference.predict(stack(ids, mask)[1], mask, samples, 1))
    logits.sum().backward()
    assert (
        between.shape[2] == width + width // 2
        and not between.grad[..., :width].any()
        and between.grad[..., width:].any()
    )
