"""Tokenized splits and batches."""

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.tasks.task import Split
from workbench.tasks.tokenize import (
    TokenizedSplit,
    collate,
    decoder_inputs,
    evaluation_batches,
    padded_length,
    tokenize,
)


class Letters:
    """An encoder that numbers letters; pairs are joined by 0."""

    pad_id, start_id = 99, None

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
    batch = collate(tokenized(), [2, 0])
    assert batch.input_ids.shape == (2, 16) and batch.input_ids.dtype == torch.int64
    assert batch.input_ids[1].tolist() == [1, 2, 3] + [99] * 13
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
    assert padded_length([3, 5]) == 8


class Decoding(Letters):
    """An encoder of a model with a decoder, whose targets begin with 50."""

    start_id = 50


def test_a_decoder_reads_its_start_token_unless_there_are_words():
    batch = collate(tokenize(SPLIT, Decoding(), max_length=9), [0, 2])
    assert batch.decoder_ids.tolist() == [[50], [50]] and batch.labels.tolist() == [1, 1] and batch.choices is None
    assert tokenized().target_length == 0 and collate(tokenized(), [0]).decoder_ids is None


def test_label_words_become_targets():
    split = tokenize(SPLIT, Decoding(), max_length=9, words=("NO", "YES"))
    assert split.target_length == 3 and split.labels == SPLIT.labels
    batch = collate(split, [0, 1])
    assert batch.labels.tolist() == [[25, 5, 19], [14, 15, -100]]
    assert batch.decoder_ids.tolist() == [[50, 25, 5], [50, 14, 15]]
    assert batch.choices.tolist() == [[14, 15, -100], [25, 5, 19]] and batch.decoder_ids.dtype == torch.int64
    short = decoder_inputs(torch.tensor([[7, -100, -100]]), 50, 99)
    assert short.tolist() == [[50, 7, 99]]


@pytest.mark.parametrize(
    ("encoder", "words", "message"),
    [(Letters(), ("NO", "YES"), "no decoder"), (Decoding(), ("ABCDEFGHIJK", "ABCDEFGHIXX"), "the same tokens")],
)
def test_words_that_cannot_be_targets(encoder, words, message):
    with pytest.raises(ConfigError, match=message):
        tokenize(SPLIT, encoder, max_length=9, words=words)


def test_pictures_are_for_models_of_pictures():
    pictures = Split(texts=("", ""), labels=(0, 1), sample_ids=(0, 1), images=(bytes(4), bytes(4)))
    assert pictures.take([1]).images == (bytes(4),)
    with pytest.raises(ConfigError, match="reads no pictures"):
        tokenize(pictures, Letters(), max_length=8)


def test_an_empty_split():
    with pytest.raises(ConfigError, match="0 samples"):
        tokenize(Split(texts=(), labels=(), sample_ids=()), Letters(), max_length=8)
