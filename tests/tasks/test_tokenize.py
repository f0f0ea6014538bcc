"""Tokenized splits and batches."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.tasks.task import Split
from workbench.tasks.tokenize import TokenizedSplit, collate, evaluation_batches, padded_length, tokenize


class Letters:
    """An encoder that numbers letters; pairs are joined by 0."""

    pad_id = 99

    def encode(self, texts, pairs=None, *, max_length):
        joined = [first + (f"@{second}") for first, second in zip(texts, pairs, strict=True)] if pairs else texts
        return [[ord(letter) - ord("@") for letter in text][:max_length] for text in joined]


SPLIT = Split(texts=("ABC", "A", "ABCDEFGHIJ", "AB"), labels=(1, 0, 1, 0), sample_ids=(10, 11, 12, 13))


def tokenized(split=SPLIT, max_length=9):
    return tokenize(split, Letters(), max_length=max_length)


def test_tokenize_cuts_and_keeps_labels_and_ids():
    split = tokenized()
    assert split.lengths == (3, 1, 9, 2) and split.ids[0] == (1, 2, 3)
    assert split.sample_ids == SPLIT.sample_ids and split.labels == SPLIT.labels
    pairs = Split(texts=("A",), pairs=("B",), labels=(0.5,), sample_ids=(0,))
    assert tokenized(pairs).ids == ((1, 0, 2),)


def test_collate_pads_on_the_right_to_a_multiple():
    batch = collate(tokenized(), [2, 0], pad_to_multiple=4)
    assert batch.input_ids.shape == (2, 12) and batch.input_ids.dtype == torch.int64
    assert batch.input_ids[1].tolist() == [1, 2, 3] + [99] * 9
    assert batch.attention_mask.sum(dim=1).tolist() == [9, 3] and batch.attention_mask[1, :3].all()
    assert batch.labels.tolist() == [1, 1] and batch.labels.dtype == torch.int64
    assert batch.sample_ids.tolist() == [12, 10] and batch.indices == (2, 0) and len(batch) == 2


def test_collate_to_a_given_length():
    assert collate(tokenized(), [1], length=20).input_ids.shape == (1, 20)
    with pytest.raises(ConfigError, match="has 9"):
        collate(tokenized(), [2], length=8)
    with pytest.raises(ConfigError, match="0 samples"):
        collate(tokenized(), [])


def test_regression_labels_are_floats():
    split = TokenizedSplit(ids=((1,), (2,)), labels=(0.5, -2.0), sample_ids=(0, 1), pad_id=0)
    assert collate(split, [1, 0]).labels.tolist() == [-2.0, 0.5]
    assert collate(split, [0]).labels.dtype == torch.float32


def test_evaluation_batches_cover_the_split_longest_first():
    batches = list(evaluation_batches(tokenized(), batch_size=3))
    assert [batch.indices for batch in batches] == [(2, 0, 3), (1,)]
    assert [batch.input_ids.shape[1] for batch in batches] == [16, 8]


def test_padded_length():
    assert [padded_length([length]) for length in (1, 8, 9, 16, 17)] == [8, 8, 16, 16, 24]
    assert padded_length([3, 5], pad_to_multiple=1) == 5


def test_an_empty_split():
    with pytest.raises(ConfigError, match="0 samples"):
        tokenize(Split(texts=(), labels=(), sample_ids=()), Letters(), max_length=8)
