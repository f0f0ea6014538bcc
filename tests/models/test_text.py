"""Texts: chat templates as transformers renders them, sampled tokens, the pieces that a stream of tokens makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from workbench.core.errors import ConfigError
from workbench.methods.common.text_model import load_text_model
from workbench.models.chat_template import ALPACA, alpaca_prompt, render
from workbench.models.generation import Sampling
from workbench.models.hub import locate
from workbench.models.loading import load_tokenizer
from workbench.models.text import TextSettings, pieces

TALK: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "How are you?"},
]


@pytest.mark.parametrize("messages", [TALK, TALK[1:2]], ids=["talk", "one message"])
def test_a_conversation_is_written_as_transformers_writes_it(messages: Any) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(locate("SmolLM2-135M"))
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokenizer: Any = load_tokenizer("SmolLM2-135M")
    assert tokenizer.chat(messages) == expected
    requests = [{"role": "user", "content": "Add.\n\n1 and 2"}]
    assert tokenizer.instruct("Add.", "1 and 2") == tokenizer.chat(requests)


def test_a_model_without_a_template_reads_alpacas_prompt() -> None:
    assert render(ALPACA, TALK[1:2], {}) == alpaca_prompt("Hello")
    text = render(ALPACA, TALK, {})
    assert text.endswith("### Response:\nHi!\n\n### Instruction:\nHow are you?\n\n### Response:\n")
    assert alpaca_prompt("Add.", "1 and 2").count("### Input:\n1 and 2\n\n### Response:\n") == 1


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "There is nothing to answer"),
        ([{"role": "tool", "content": "a"}], "has the role 'tool'"),
        ([{"role": "user", "content": None}], "the role 'user' and a NoneType"),
    ],
)
def test_conversations_that_cannot_be_written_are_refused(messages: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        render(ALPACA, messages, {})
    with pytest.raises(ConfigError, match="chat template refuses it: no system"):
        render("{{ raise_exception('no system') }}", TALK, {})


def test_sampled_tokens_follow_the_softmax_of_the_likely_ones() -> None:
    """Of 1,500 draws the shares are within 5 standard deviations."""
    logits, count = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 1500
    for sampling, expected in (
        (Sampling(temperature=1.0), logits[0].softmax(0)),
        (Sampling(temperature=0.5), (2 * logits[0]).softmax(0)),
        (Sampling(temperature=1.0, top_p=0.8), torch.tensor([1.0, torch.e**-1, 0, 0]) / (1 + torch.e**-1)),
    ):
        drawn = Counter(sampling.choose(logits, number) for number in range(count))
        for token, share in enumerate(expected.tolist()):
            assert abs(drawn[token] / count - share) <= 5 * (share * (1 - share) / count) ** 0.5
    assert Sampling().choose(logits, 7) == Sampling(temperature=1e-320).choose(logits, 7) == 0
    with pytest.raises(ConfigError, match="top_p = 0"):
        Sampling(top_p=0)


def test_the_same_seed_writes_the_same_text_and_another_another() -> None:
    model, texts = load_text_model("tiny-llama-2"), []
    for seed in (1, 1, 2):
        settings = TextSettings(max_tokens=12, sampling=Sampling(temperature=1.0, seed=seed))
        texts.append("".join(piece.text for piece in model.complete("hello", settings)))
    assert texts[0] == texts[1] != texts[2]


def test_half_a_character_is_read_as_a_broken_one() -> None:
    model, settings = load_text_model("tiny-llama-2"), TextSettings(max_tokens=3)
    half, broken = "a \udc00", "a \ufffd"
    assert list(model.complete(half, settings)) == list(model.complete(broken, settings))
    read, meant = ([{"role": "user", "content": text}] for text in (half, broken))
    assert list(model.chat(read, settings)) == list(model.chat(meant, settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "ends", "expected", "finish"),
    [
        ((), set(), "the élan end", "length"),
        (("an e",), set(), "the él", "stop"),
        (("nothing",), set(), "the élan end", "length"),
        (("é", "he"), set(), "t", "stop"),
        ((), {5}, "the él", "stop"),
    ],
)
def test_pieces_make_the_text_up_to_its_end(stop: Any, ends: set[int], expected: str, finish: str) -> None:
    """A piece ends neither within a character nor with what may begin a stop word."""
    parts = [b"t", b"he ", b"\xc3", b"\xa9", b"l", b"an", b" end"]
    results = list(
        pieces(
            range(7),
            lambda ids: b"".join(parts[index] for index in ids).decode("utf-8", "replace"),
            frozenset(ends),
            TextSettings(stop=stop),
        )
    )
    assert "".join(piece.text for piece in results) == expected and results[-1].finish == finish
    assert [piece.finish for piece in results[:-1]] == [""] * (len(results) - 1)
    assert all("\ufffd" not in piece.text for piece in results)


@pytest.mark.parametrize(
    ("prompt", "tokens", "said"), [("a " * 600, 4, "The model reads 512"), ("", 4, "nothing to continue")]
)
def test_a_text_without_room_is_refused(prompt: str, tokens: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        list(load_text_model("tiny-llama-2").complete(prompt, TextSettings(max_tokens=tokens)))
