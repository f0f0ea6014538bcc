"""Answers to questions: greedy generation, and F1 of their words as SQuAD counts it (Rajpurkar et al., EMNLP 2016, section 6)."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from workbench.core.errors import require_numbers
from workbench.tasks.prompts.batches import batch_of
from workbench.tasks.prompts.encoding import EncodedRow, PromptEncoder
from workbench.tasks.prompts.likelihoods import BATCH_SIZE, LogitsAt
from workbench.tasks.prompts.samples import PromptSample

MAX_NEW_TOKENS = 50
"""MeZO's limit; an answer ends with its line."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)


class Decoder(Protocol):
    """What a tokenizer must do besides, to read what was generated."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        ...


def normalized(answer: str) -> str:
    """Return an answer as SQuAD compares it: lower case, without punctuation, articles and repeated spaces."""
    bare = "".join(character for character in answer.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the words, against the answer that it fits best; 1 where both are empty."""
    return max((_f1(normalized(prediction).split(), normalized(answer).split()) for answer in answers), default=0.0)


def exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Return whether a prediction is one of the answers, both normalized."""
    return any(normalized(prediction) == normalized(answer) for answer in answers)


def _f1(predicted: Sequence[str], real: Sequence[str]) -> float:
    if not predicted or not real:
        return float(predicted == real)
    common = sum((Counter(predicted) & Counter(real)).values())
    return 2 * common / (len(predicted) + len(real))


def generate_answers(
    logits_at: LogitsAt,
    encoder: PromptEncoder,
    decoder: Decoder,
    samples: Sequence[PromptSample],
    *,
    max_new_tokens: int = MAX_NEW_TOKENS,
    batch_size: int = BATCH_SIZE,
) -> list[str]:
    """Return the line that the model writes behind each prompt, always taking the likeliest token.

    Every token runs the whole text anew (there is no cache in `logits_at`).  The prompts leave room for max_new_tokens.
    """
    fields, _ = encoder.fitted(samples, reserve=max_new_tokens if encoder.reader == "causal" else 0)
    prompts = encoder.openings(fields)
    answers = [""] * len(samples)
    order = sorted(range(len(samples)), key=lambda index: -len(prompts[index].ids))
    for at in range(0, len(order), batch_size):
        for index, ids in _generated(logits_at, encoder, decoder, prompts, order[at : at + batch_size], max_new_tokens):
            answers[index] = decoder.decode(ids).strip().split("\n")[0].strip()
    return answers


def _generated(
    logits_at: LogitsAt, encoder: PromptEncoder, decoder: Decoder, prompts: Sequence[EncodedRow], indices: Sequence[int], limit: int
) -> list[tuple[int, list[int]]]:
    import torch

    written: dict[int, list[int]] = {index: [] for index in indices}
    going = list(indices)
    pad_id = encoder.encoder.pad_id
    for _ in range(limit):
        rows = [prompts[index].followed_by(written[index]) for index in going]
        with torch.inference_mode():
            logits = logits_at(batch_of(rows, [0] * len(rows), pad_id, going))[:, 0]
            following = require_numbers(logits, "Answers").argmax(dim=1).tolist()
        for index, token in zip(going, following, strict=True):
            if token != pad_id:  # which is the end of text where a model has no padding of its own
                written[index].append(token)
        ended = {index for index, token in zip(going, following, strict=True) if token in (pad_id, *encoder.trail)}
        going = [index for index in going if index not in ended and "\n" not in decoder.decode(written[index]).lstrip()]
        if not going:
            break
    return list(written.items())
