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
    found = as_text_to_text(task("sentiment", (1, 0)))
    assert (found.kind, found.words, found.num_outputs) == ("sequence_to_sequence", ("negative", "positive"), 2)
    assert found.train.texts == ("sst2 sentence: good", "sst2 sentence: bad") and found.train.labels == (1, 0)
    assert found.train.sample_ids == (4, 5) and found.metrics == ("accuracy",)
    assert as_text_to_text(found) is found


def test_a_pair_becomes_one_text():
    found = as_text_to_text(task("mrpc", (1, 0), pairs=("fine", "poor")))
    assert found.test.texts[0] == "mrpc sentence1: good sentence2: fine" and found.test.pairs is None
    assert found.words == ("not_equivalent", "equivalent")


def test_numbers_become_words_in_steps():
    found = as_text_to_text(task("stsb", (3.74, 5.0), kind="regression", pairs=("fine", "poor")))
    assert (
        len(found.words) == found.num_outputs == 26 and found.words[:2] == ("0.0", "0.2") and found.words[-1] == "5.0"
    )
    assert [found.words[label] for label in found.train.labels] == ["3.8", "5.0"]
    rating = as_text_to_text(task("sentiment-rating", (-3.9, 0.04), kind="regression"))
    assert [rating.words[label] for label in rating.train.labels] in (["-4.0", "0.0"], ["-3.8", "0.0"])


def test_every_text_task_has_a_wording_and_pictures_have_none():
    assert set(GLUE) < set(WORDINGS)
    with pytest.raises(ConfigError, match="sentiment, sentiment-rating, mrpc"):
        as_text_to_text(task("digits", (1, 0)))
