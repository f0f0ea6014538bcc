"""Texts and pairs of texts as token ids."""

import pytest

from workbench.core.errors import ConfigError
from workbench.models.tokenizer import tiny_tokenizer


def pieces(tokenizer, ids):
    return [tokenizer.backend.id_to_token(index) for index in ids]


def test_a_text_and_a_pair_for_an_encoder():
    tokenizer = tiny_tokenizer(is_causal=False)
    (one,) = tokenizer.encode(["A cat!"], max_length=16)
    assert pieces(tokenizer, one) == ["[CLS]", "a", "ca", "##t", "!", "[SEP]"]
    (pair,) = tokenizer.encode(["a"], ["no"], max_length=16)
    assert pieces(tokenizer, pair) == ["[CLS]", "a", "[SEP]", "no", "[SEP]"]


def test_a_pair_for_a_causal_model_is_joined():
    tokenizer = tiny_tokenizer(is_causal=True)
    assert tokenizer.separator_id is None
    assert tokenizer.encode(["a"], ["no"], max_length=16) == tokenizer.encode(["a\nno"], max_length=16)


def test_cutting_keeps_the_special_tokens_and_cuts_the_longer_of_two():
    tokenizer = tiny_tokenizer(is_causal=False)
    (ids,) = tokenizer.encode(["a b c d e f g h"], max_length=5)
    assert pieces(tokenizer, ids) == ["[CLS]", "a", "b", "c", "[SEP]"]
    (ids,) = tokenizer.encode(["a b c d e f"], ["x"], max_length=6)
    assert pieces(tokenizer, ids) == ["[CLS]", "a", "b", "[SEP]", "x", "[SEP]"]
    (ids,) = tokenizer.encode(["a b c d e f g h"], max_length=64)
    assert len(ids) == 10  # the limit of one call does not stay


def test_an_empty_text_has_a_token():
    assert tiny_tokenizer(is_causal=True).encode([""], max_length=8) == [[0]]


def test_a_limit_below_the_special_tokens():
    with pytest.raises(ConfigError, match="max_length = 2"):
        tiny_tokenizer(is_causal=False).encode(["a"], max_length=2)
