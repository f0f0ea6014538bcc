"""Options and targets of parallel adapters: where taps sit, what is mixed, what the head reads,
sequence-to-sequence."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.evaluation import calibrate, predict, set_statistics, word_scores
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.parallel_adapter import ParallelAdapter, task_loss
from workbench.tasks import load_task
from workbench.tasks.task import Split, Task, as_text_to_text
from workbench.tasks.tokenize import collate, evaluation_batches, tokenize

from .helpers import TARGET_LENGTH, batch_for, small_config
from .plain_training import reference_loss, train_reference


@pytest.fixture(scope="module", params=["t5", "bart"])
def stack(request):
    return load_stack(f"tiny-{request.param}")


def test_the_loss_of_a_sequence_counts_each_samples_own_tokens():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, -100], [0, 4, 3]])
    each = -logits.log_softmax(dim=2)
    first, second = (each[0, 0, 1] + each[0, 1, 2]) / 2, (each[1, 0, 0] + each[1, 1, 4] + each[1, 2, 3]) / 3
    torch.testing.assert_close(task_loss(logits, labels, "sequence_to_sequence"), (first + second) / 2)
    torch.testing.assert_close(task_loss(logits, labels, "sequence_to_sequence", reduction="sum"), first + second)
    torch.testing.assert_close(word_scores(logits, labels[0])[1], -(each[1, 0, 1] + each[1, 1, 2]))


def test_the_side_decoder_is_causal_and_reads_the_side_encoder(stack):
    batch, adapter = batch_for(stack, (9,)), ParallelAdapter(small_config(stack)).eval()
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    side = adapter(None, taps, batch.attention_mask)
    assert side.shape == (1, 9 + TARGET_LENGTH, 8)
    changed = [tap.clone() for tap in taps]
    for tap in changed[4:]:
        tap[:, 2:] += 1
    other = adapter(None, changed, batch.attention_mask)
    torch.testing.assert_close(other[:, : 9 + 2], side[:, : 9 + 2])
    assert not torch.allclose(other[:, 11:], side[:, 11:], atol=1e-3)
    changed = [tap.clone() for tap in taps]
    changed[3][:, :3] += 1  # the encoder's last tap reaches the decoder through cross-attention only
    other = adapter(None, changed, batch.attention_mask)
    assert not torch.allclose(other[:, 9:], side[:, 9:], atol=1e-4)


def test_a_class_is_read_off_the_decoders_first_state(stack):
    batch, adapter = batch_for(stack), ParallelAdapter(small_config(stack, dropout=0.0)).eval()
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    side = adapter(None, taps, batch.attention_mask)[:, batch.attention_mask.shape[1]]
    expected = adapter.last.output(adapter.last.up(adapter.last.norm(side)) + taps[-1][:, 0])
    torch.testing.assert_close(adapter.predict(taps, batch.attention_mask, batch.sample_ids), expected)


def two_words(count=48):
    """Texts whose last letter decides the class."""
    texts = tuple(f"{'xy'[index % 3 == 0]} {chr(97 + index % 20)} {'xy'[index % 3 == 0]}" for index in range(count))
    split = Split(
        texts=texts, labels=tuple(int(index % 3 == 0) for index in range(count)), sample_ids=tuple(range(count))
    )
    task = Task(
        name="sentiment",
        kind="classification",
        num_outputs=2,
        metrics=("accuracy",),
        train=split,
        validation=split,
        test=split,
    )
    return as_text_to_text(task)


def test_sequence_to_sequence_learns_to_write_the_label_word(stack):
    task, name = two_words(), f"tiny-{stack.family_name}"
    split = tokenize(task.train, load_tokenizer(name), max_length=32, words=task.words)
    config = small_config(
        stack, kind="sequence_to_sequence", target_length=split.target_length, dropout=0.0, reduction=2
    )
    adapter, batches = ParallelAdapter(config), list(evaluation_batches(split, 12))
    set_statistics(adapter, calibrate(stack, batches))
    losses = [loss for _, loss in train_reference(stack, adapter, lambda epoch: batches, 10, learning_rate=1e-2)]
    assert sum(losses[-4:]) < 0.5 * sum(losses[:4])
    (result,) = predict(stack, [adapter], batches)
    assert result.logits.shape == (48, 2) and result.references() == list(task.train.labels)
    answers = result.answers(config.kind)
    assert sum(answer == label for answer, label in zip(answers, task.train.labels, strict=True)) >= 46
    # Scores are the log-likelihood of the whole word, as the loss has it.
    batch = collate(split, [0, 1, 2])
    loss = reference_loss(stack, adapter.eval(), batch, 0)
    lengths = batch.labels.ne(-100).sum(dim=1)
    own = result.logits[torch.arange(3), torch.tensor(split.labels[:3])]
    torch.testing.assert_close((-own / lengths).mean(), loss.detach(), rtol=1e-4, atol=1e-5)


def test_an_adapter_learns_digits():
    task, stack = load_task("digits", train_samples=256, validation_samples=10, test_samples=10), load_stack("tiny-vit")
    split = tokenize(task.train, load_tokenizer("tiny-vit"), max_length=64)
    adapter = ParallelAdapter(small_config(stack, reduction=2, num_outputs=10))
    batches = [collate(split, list(range(at, at + 32)), length=17) for at in range(0, 256, 32)]
    set_statistics(adapter, calibrate(stack, batches[:4]))
    losses = [loss for _, loss in train_reference(stack, adapter, lambda epoch: batches, 14, learning_rate=1e-2)]
    assert sum(losses[-8:]) < 0.4 * sum(losses[:8])
    (result,) = predict(stack, [adapter], batches)
    assert sum(a == b for a, b in zip(result.answers("classification"), result.references(), strict=True)) > 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "sequence_to_sequence"}, "no encoder and decoder"),
        ({"num_encoder_layers": 2, "target_length": 1}, "2 of 2 layers"),
        ({"num_encoder_layers": 1}, "one at least"),
        ({"target_length": 1}, "has no decoder"),
    ],
)
def test_impossible_options(changes, message):
    with pytest.raises(ConfigError, match=message):
        ParallelAdapterConfig(hidden_size=32, num_layers=2, **changes)


def test_a_sequence_needs_the_backbones_head(stack):
    batch, adapter = batch_for(stack), ParallelAdapter(small_config(stack, kind="sequence_to_sequence"))
    _, taps = stack(batch.input_ids, batch.attention_mask, batch.decoder_ids)
    with pytest.raises(ConfigError, match="attach"):
        adapter.predict(taps, batch.attention_mask, batch.sample_ids)
