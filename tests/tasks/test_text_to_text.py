"""Tasks put into words as T5 knows them."""

import pytest

from workbench.core.errors import ConfigError
from workbench.tasks.published import GLUE
from workbench.tasks.task import WORDINGS, Split, Task, as_text_to_text


def task(name, labels, *, kind="classification", pairs=None, **options):
    split = Split(texts=("good", "bad"), pairs=pairs, labels=labels, sample_ids=(4, 5))
    return Task(
        name=name, kind=kind, num_outputs=1 if kind == "regression" else 2, metrics=("accuracy",),
        train=split, validation=split, test=split, **options,
    )  # fmt: skip


def test_classes_become_words():
    text_task = as_text_to_text(task("sentiment", (1, 0)))
    assert (text_task.kind, text_task.words, text_task.num_outputs) == (
        "sequence_to_sequence",
        ("negative", "positive"),
        2,
    )
    assert text_task.train.texts == ("sst2 sentence: good", "sst2 sentence: bad") and text_task.train.labels == (1, 0)
    assert text_task.train.sample_ids == (4, 5) and text_task.metrics == ("accuracy",)
    assert as_text_to_text(text_task) is text_task


def test_a_pair_becomes_one_text():
    text_task = as_text_to_text(task("mrpc", (1, 0), pairs=("fine", "poor")))
    assert text_task.test.texts[0] == "mrpc sentence1: good sentence2: fine" and text_task.test.pairs is None
    assert text_task.words == ("not_equivalent", "equivalent")


def test_numbers_become_words_in_steps():
    text_task = as_text_to_text(task("stsb", (3.74, 5.0), kind="regression", pairs=("fine", "poor")))
    assert (
        len(text_task.words) == text_task.num_outputs == 26
        and text_task.words[:2] == ("0.0", "0.2")
        and text_task.words[-1] == "5.0"
    )
    assert [text_task.words[label] for label in text_task.train.labels] == ["3.8", "5.0"]
    rating = as_text_to_text(task("sentiment-rating", (-3.9, 0.04), kind="regression"))
    assert [rating.words[label] for label in rating.train.labels] in (["-4.0", "0.0"], ["-3.8", "0.0"])


def test_every_text_task_has_a_wording_and_pictures_have_none():
    assert set(GLUE) < set(WORDINGS)
    with pytest.raises(ConfigError, match="sentiment, sentiment-rating, mrpc"):
        as_text_to_text(task("digits", (1, 0)))
