"""Texts and pairs of texts as token ids."""

import json
import string

import pytest

from workbench.core.errors import ConfigError
from workbench.models.loading import load_tokenizer
from workbench.models.tokenizer import tiny_tokenizer
from workbench.tasks.task import Split
from workbench.tasks.tokenize import tokenize


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
    assert tokenizer.joins_pairs
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


def bare_folder(folder, family, tokenizer_config):
    """Write a model's folder whose special tokens stand in tokenizer.json alone, as many on the hub do."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    folder.mkdir()
    words = [*string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase)]
    if family == "bert":
        vocabulary = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words])}
        backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        settings = {"model_type": "bert", "type_vocab_size": 2, "pad_token_id": 0}
    else:
        backend = Tokenizer(
            models.BPE({letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
        )
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        backend.add_special_tokens(["<|endoftext|>"])
        settings = {"model_type": family}
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return settings | {"vocab_size": backend.get_vocab_size()}


@pytest.mark.parametrize("truncated", [5, 64])
@pytest.mark.parametrize(
    "pair", [("a cat", "no dog"), ("a [SEP] cat", "no [MASK] dog"), ("", "x"), ("cat " * 9, "dog " * 9)]
)
def test_special_tokens_in_tokenizer_json_alone(tmp_path, pair, truncated):
    from transformers import AutoTokenizer

    settings = bare_folder(tmp_path / "bert", "bert", {"do_lower_case": True, "tokenizer_class": "BertTokenizer"})
    (tmp_path / "bert" / "config.json").write_text(json.dumps(settings))
    ours, theirs = load_tokenizer(str(tmp_path / "bert")), AutoTokenizer.from_pretrained(tmp_path / "bert")
    [ids] = ours.encode([pair[0]], [pair[1]], max_length=truncated)
    expected = theirs(*pair, truncation=True, max_length=truncated)
    assert [max(index, ~index) for index in ids] == expected["input_ids"]
    assert [int(index < 0) for index in ids] == expected["token_type_ids"]
    assert ours.pad_id == theirs.pad_token_id


@pytest.mark.parametrize(
    ("tokenizer_config", "config", "end", "pad"),
    [
        ({"model_max_length": 64}, {}, 256, 256),
        ({}, {"eos_token_id": 256, "pad_token_id": None}, 256, 256),
        ({}, {"eos_token_id": [65, 256], "pad_token_id": -1}, 65, 65),
        ({}, {"eos_token_id": 9999, "pad_token_id": 3}, 256, 3),
        ({"eos_token": "<|endoftext|>", "pad_token": {"content": "A"}}, {"eos_token_id": 65}, 256, 65 - 33),
        ({"eos_token": "<|endoftext|>", "pad_token": "absent"}, {"vocab_size": 256, "eos_token_id": 4}, 4, 4),
    ],
)
def test_the_end_and_the_padding_of_a_decoder(tmp_path, tokenizer_config, config, end, pad):
    settings = bare_folder(tmp_path / "gpt2", "gpt2", tokenizer_config) | config
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(tmp_path / "gpt2"))
    assert (tokenizer.end_id, tokenizer.pad_id) == (end, pad)


def test_a_tokenizer_without_an_end_learns_no_answers(tmp_path):
    settings = bare_folder(tmp_path / "gpt2", "gpt2", {})
    path = tmp_path / "gpt2" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|other|>"))
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(settings))
    split = Split(texts=("a",), answers=("b",), labels=(0,), sample_ids=(0,))
    with pytest.raises(ConfigError, match="names no token that ends a text"):
        tokenize(split, load_tokenizer(str(tmp_path / "gpt2")), max_length=16)


@pytest.mark.parametrize("model", ["tiny-bert", "all-MiniLM-L6-v2", "SmolLM2-135M"])
@pytest.mark.parametrize(
    "long", ["good film " * 7_000, "x" * 70_000, " " * 70_000 + "good film", "a" + "\n\n" * 35_000 + "film"]
)
def test_the_beginning_of_a_very_long_text_has_the_same_tokens(model, long):
    tokenizer = load_tokenizer(model)
    tokenizer.backend.enable_truncation(32)
    reference = [tokenizer.backend.encode(long).ids, tokenizer.backend.encode("b c", long).ids]
    tokenizer.backend.no_truncation()
    assert tokenizer.encode([long], max_length=32) == [reference[0]]
    if not tokenizer.joins_pairs:
        [pair] = tokenizer.encode(["b c"], [long], max_length=32)
        assert [max(index, ~index) for index in pair] == reference[1]
