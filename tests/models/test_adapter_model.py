"""Parallel adapters as a library: a plain loop, transformers' Trainer, saving and loading."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, Trainer, TrainingArguments

from workbench.core.errors import ConfigError
from workbench.models.adapter_model import ParallelAdapterModel, adapter_config, get_parallel_adapter_model
from workbench.models.configuration import model_config
from workbench.models.loading import load_stack
from workbench.models.optimization import learning_rate_at, make_optimizer, set_learning_rate
from workbench.models.parallel_adapter import ParallelAdapter
from workbench.models.quantization import QuantizationConfig
from workbench.models.side_layers import ids_of_texts

from .helpers import small_batch
from .plain_training import train_reference


def hugging_face(name="tiny-bert-2", seed=0, kind=AutoModel):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return kind.from_config(model_config(name))


def arguments(batch):
    return {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}


def batches():
    return [small_batch(seed=0), small_batch((9, 4, 11, 6), seed=1, first_id=8)]


def plain_loop(model, epochs=2, with_ids=True):
    """What a user of PyTorch would write."""
    losses, optimizer = [], make_optimizer(model, 0.01)
    model.train()
    for epoch in range(epochs):
        model.set_epoch(epoch)
        for index, batch in enumerate(batches()):
            loss = model(
                **arguments(batch), labels=batch.labels, sample_ids=batch.sample_ids if with_ids else None
            ).loss
            loss.backward()
            set_learning_rate(optimizer, learning_rate_at(2 * epoch + index, 2 * epochs, 2e-3, 0.06))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart"])
def test_a_plain_loop_equals_the_reference(family):
    name = f"tiny-{family}-2"
    model = get_parallel_adapter_model(name, reduction=4, seed=3)
    losses = plain_loop(model)
    stack, adapter = load_stack(name), ParallelAdapter(adapter_config(name, reduction=4, seed=3))
    expected = [loss for _, loss in train_reference(stack, adapter, lambda epoch: batches(), 2)]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(tensor, adapter.state_dict()[name]) for name, tensor in model.adapter.state_dict().items())


def test_sequence_to_sequence_equals_the_reference():
    batch = small_batch()
    labels = torch.randint(4, 1400, (8, 3), generator=torch.Generator().manual_seed(0))
    labels[2, 1:] = -100
    model = get_parallel_adapter_model("tiny-t5-2", kind="sequence_to_sequence", target_length=3, reduction=4)
    actual = model(**arguments(batch), labels=labels, sample_ids=batch.sample_ids)
    start = torch.zeros(8, 1, dtype=torch.int64)
    decoder_ids = torch.cat([start, labels[:, :-1].clamp(min=0)], dim=1)
    _, taps = model.backbone(batch.input_ids, batch.attention_mask, decoder_ids)
    expected = model.adapter.predict(taps, batch.attention_mask, batch.sample_ids)
    torch.testing.assert_close(actual.logits, expected)
    actual.loss.backward()
    with pytest.raises(ConfigError, match="labels or decoder_input_ids"):
        model(**arguments(batch))


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_object_is_a_backbone(kind):
    source, batch = hugging_face(kind=kind), small_batch()
    model = get_parallel_adapter_model(source, adapter_config(source, reduction=4)).eval()
    assert model.backbone.layers[0] is source.base_model.encoder.layer[0]
    with torch.no_grad():
        hidden = source.base_model(**arguments(batch)).last_hidden_state
        ours, taps = model.backbone(batch.input_ids, batch.attention_mask)
    real = batch.attention_mask.bool()
    torch.testing.assert_close(ours[real], hidden[real], rtol=1e-5, atol=1e-6)
    logits = model(**arguments(batch)).logits
    torch.testing.assert_close(logits, model.adapter.predict(taps, batch.attention_mask, batch.sample_ids))
    types = batch.attention_mask * (torch.arange(batch.input_ids.shape[1]) > 3)
    with torch.no_grad():
        hidden = source.base_model(**arguments(batch), token_type_ids=types).last_hidden_state
        _, taps = model.backbone(torch.where(types.bool(), ~batch.input_ids, batch.input_ids), batch.attention_mask)
    torch.testing.assert_close(taps[-1][real], hidden[real], rtol=1e-5, atol=1e-6)
    typed = model(**arguments(batch), token_type_ids=types).logits
    torch.testing.assert_close(typed, model.adapter.predict(taps, batch.attention_mask, batch.sample_ids))
    assert not torch.allclose(typed, logits)


def test_only_the_adapter_is_trained_and_saved(capsys):
    model = get_parallel_adapter_model("tiny-bert-2", reduction=4)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names and all(name.startswith("adapter.") for name in names)
    assert set(model.state_dict()) == {f"adapter.{name}" for name in model.adapter.state_dict()}
    other = get_parallel_adapter_model("tiny-bert-2", reduction=4, seed=9)
    other.load_state_dict(model.state_dict())  # strict
    assert all(torch.equal(a, b) for a, b in zip(model.adapter.parameters(), other.adapter.parameters(), strict=True))
    assert not model.train().backbone.training and model.adapter.training
    model.print_trainable_parameters()
    trainable, total = model.count_parameters()
    assert f"{trainable:,} of {total:,}" in capsys.readouterr().out
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    assert (trainable, total) == (sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes))


def test_counting_does_not_depend_on_storage():
    dense, stored = (
        get_parallel_adapter_model("tiny-gpt2-2", reduction=4, quantization=quantization).count_parameters()
        for quantization in (None, QuantizationConfig(storage="nf4"))
    )
    assert dense == stored


@pytest.mark.parametrize("storage", ["bfloat16", "int8", "nf4"])
def test_a_quantized_backbone_trains_and_loads(storage, tmp_path):
    quantization, batch = QuantizationConfig(storage=storage), small_batch()
    model = get_parallel_adapter_model(
        "tiny-llama-2", reduction=4, quantization=quantization, initialization="pruned", dropout=0.0
    )
    losses = plain_loop(model, epochs=6)
    assert sum(losses[-2:]) < sum(losses[:2])
    model.eval().save_pretrained(tmp_path)
    loaded = ParallelAdapterModel.from_pretrained("tiny-llama-2", tmp_path, quantization=quantization)
    assert torch.equal(loaded(**arguments(batch)).logits, model(**arguments(batch)).logits)


def test_a_saved_adapter_predicts_the_same(tmp_path):
    model, batch = get_parallel_adapter_model("tiny-bert-2", reduction=4), small_batch()
    model.calibrate([arguments(batch)])
    plain_loop(model)
    expected = model.eval()(**arguments(batch)).logits
    assert model.save_pretrained(tmp_path / "adapter") == tmp_path / "adapter"
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == ["adapter.json", "adapter.safetensors"]
    assert json.loads((tmp_path / "adapter" / "adapter.json").read_text())["model"] == "tiny-bert-2"
    loaded = ParallelAdapterModel.from_pretrained("tiny-bert-2", tmp_path / "adapter")
    assert not loaded.training and torch.equal(loaded(**arguments(batch)).logits, expected)
    with pytest.raises(ConfigError, match="num_layers is 2, the backbone's is 3"):
        ParallelAdapterModel.from_pretrained("tiny-bert-3", tmp_path / "adapter")


def samples(count=48):
    """Texts whose label is their first token's half of the vocabulary: learnt in few steps."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for index in range(count):
        ids = torch.randint(4, 1400, (3 + index % 5,), generator=generator)
        ids[0] = 5 if index % 2 else 900
        results.append({"input_ids": ids.tolist(), "labels": index % 2})
    return results


def pad(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def test_trainer_reduces_the_loss_and_saves_only_the_adapter(tmp_path):
    model = get_parallel_adapter_model(hugging_face(), reduction=4)
    frozen = {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}
    settings = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=5,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        gradient_accumulation_steps=2,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=samples(), eval_dataset=samples(), data_collator=pad)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.5 * before
    predictions = trainer.predict(samples()).predictions
    assert (
        predictions.shape == (48, 2)
        and (predictions.argmax(axis=1) == [row["labels"] for row in samples()]).mean() > 0.9
    )
    trainer.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == {f"adapter.{name}" for name in model.adapter.state_dict()}
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in model.backbone.state_dict().items())


def test_dropout_masks_follow_text_and_epoch():
    model, batch = get_parallel_adapter_model("tiny-bert-2", reduction=4, dropout=0.5), small_batch()
    model.set_epoch(0)
    first = model(**arguments(batch)).logits
    # Neither the neighbours nor the padding matter: the sample of two tokens alone.
    torch.testing.assert_close(model(batch.input_ids[2:3, :2]).logits, first[2:3], rtol=1e-5, atol=1e-6)
    model.set_epoch(1)
    assert not torch.allclose(model(**arguments(batch)).logits, first)
    free = get_parallel_adapter_model("tiny-bert-2", reduction=4, dropout=0.5)
    torch.testing.assert_close(free(**arguments(batch)).logits, first)  # the first pass counts as epoch 0
    assert not torch.allclose(free(**arguments(batch)).logits, first)
    assert torch.equal(free.eval()(**arguments(batch)).logits, model.eval()(**arguments(batch)).logits)


def test_text_numbers_differ_with_tokens_and_their_order():
    ids, ones = torch.tensor([[5, 6, 7], [6, 5, 7], [5, 6, 0], [5, 6, 7]]), torch.ones(4, 3)
    ones[2, 2] = 0
    first, second, third, fourth = ids_of_texts(ids, ones).tolist()
    assert len({first, second, third}) == 3 and first == fourth
    assert ids_of_texts(torch.tensor([[5, 6]]), torch.ones(1, 2)).item() == third


def test_a_family_without_support():
    model = AutoModel.from_config(
        AutoConfig.for_model(
            "albert",
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            embedding_size=16,
        )
    )
    with pytest.raises(ConfigError, match=r"family 'albert'.*families\.py"):
        get_parallel_adapter_model(model)


def test_what_cannot_be_meant():
    with pytest.raises(ConfigError, match="not a Hugging Face model"):
        get_parallel_adapter_model(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Did you mean 'reduction'"):
        get_parallel_adapter_model("tiny-bert-2", reductoin=4)
    with pytest.raises(ConfigError, match="may contradict"):
        get_parallel_adapter_model("tiny-bert-2", adapter_config("tiny-bert-2"), reduction=4)
    with pytest.raises(ConfigError, match="is_causal is False, the backbone's is True"):
        get_parallel_adapter_model("tiny-gpt2-2", adapter_config("tiny-bert-2"))
    with pytest.raises(ConfigError, match="not a multiple"):
        adapter_config("tiny-bert-2", reduction=5)
    with pytest.raises(ConfigError, match="reads pictures"):
        get_parallel_adapter_model("tiny-vit-2")
    model = get_parallel_adapter_model(hugging_face(), reduction=4)
    ids = torch.tensor([[0, 5, 6]])
    with pytest.raises(ConfigError, match="padding_side"):
        model(ids, torch.tensor([[0, 1, 1]]))
