"""Cut long contexts into overlapping windows, with the tokens of each answer or tagged word.

As BERT does for SQuAD: Devlin et al., "BERT" (2019), section 4.2 and its released code.
An answer is the first and the last token in a window that contains all of it.  For other windows, and for a question
without an answer, both are the window's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from workbench.core.errors import ConfigError
from workbench.tasks.task import IGNORED, Span, Split

MAX_WINDOWS = 1024
"""Maximum number of windows per sample: window w of sample i has the sample id 1024 i + w."""
OVERLAP = 1 / 3
"""Overlap of two neighbouring windows.  BERT's is 128 of 384 tokens."""


@runtime_checkable
class SpanEncoder(Protocol):
    """Extra tokenizer method for spans (see TextTokenizer.locate)."""

    @property
    def end_id(self) -> int | None:
        """The token that ends a text, if one is known."""

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Any]:
        """Return the tokens of each text with their character ranges."""


class Window(NamedTuple):
    """A row of tokens.  sample: its index in the split.  first: the row's first token of the context (or text).

    offsets: the characters [start, end) of the tokens from there on.  targets: the answer's first and last token; if
    is_tagged, the class of each token: IGNORED except for the first token of each word, in text generation for the
    tokens in front of an answer's.
    """

    sample: int
    sample_id: int
    first: int
    offsets: tuple[tuple[int, int], ...]
    targets: tuple[int, ...]
    is_tagged: bool

    def hidden(self) -> Window:
        """Return the window without its text positions, answer and tags, for devices that may not see them."""
        return self._replace(offsets=(), targets=(0,) * len(self.targets))


def cut_windows(
    split: Split, encoder: SpanEncoder, max_length: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[Window, ...], int]:
    """Return the token ids of every row, the rows' windows, and the number of samples whose answer or words fit into no
    row.

    Raises ConfigError naming a question that leaves no room for its context, and an answer that is not in its context.
    """
    assert split.spans is not None
    ids, windows, left_out = [], [], 0
    for sample, (located, spans) in enumerate(zip(encoder.locate(split.texts, split.pairs), split.spans, strict=True)):
        before, context, after = (
            located.ids[: located.first],
            located.ids[located.first : located.stop],
            located.ids[located.stop :],
        )
        room = max_length - len(before) - len(after)
        if room < 2:
            raise ConfigError(
                f"max_length = {max_length} was asked for.",
                f"The question '{split.texts[sample][:60]}' takes {len(before) + len(after)} tokens, which "
                "leaves no room for its context.",
                "Raise max_length.",
            )
        tagged = split.pairs is None
        step = room if tagged else room - int(OVERLAP * room)
        starts = range(0, max(1, len(context) - (0 if tagged else room - step)), step)[: 1 if tagged else MAX_WINDOWS]
        answer = None if tagged or not spans else _tokens_of(spans[0], located.offsets)
        fits = answer is None or any(start <= answer[0] and answer[1] < start + room for start in starts)
        left_out += not fits or (tagged and len(context) > room)
        for number, start in enumerate(starts):
            offsets = tuple(located.offsets[start : start + room])
            if tagged:
                targets = _classes(spans, len(before), offsets, len(after))
            elif not fits:
                targets = (IGNORED, IGNORED)
            elif answer is not None and start <= answer[0] and answer[1] < start + room:
                targets = (len(before) + answer[0] - start, len(before) + answer[1] - start)
            else:
                targets = (0, 0)
            ids.append((*before, *context[start : start + room], *after))
            windows.append(
                Window(sample, split.sample_ids[sample] * MAX_WINDOWS + number, len(before), offsets, targets, tagged)
            )
    return tuple(ids), tuple(windows), left_out


def _tokens_of(answer: Span, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and last token of an answer.  None if the tokenizer drops all of its characters."""
    end = answer.start + len(answer.text)
    tokens = [index for index, (first, stop) in enumerate(offsets) if stop > answer.start and first < end]
    return (tokens[0], tokens[-1]) if tokens else None


def _classes(words: Sequence[Span], before: int, offsets: Sequence[tuple[int, int]], after: int) -> tuple[int, ...]:
    """Return the class of every token in a row.  A word's class is at its first token."""
    classes = [IGNORED] * (before + len(offsets) + after)
    for word, token in zip(words, first_tokens(words, offsets), strict=True):
        if token is not None:
            classes[before + token] = word.label
    return tuple(classes)


def first_tokens(words: Sequence[Span], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the first token of each word; None for a word that is cut off or that the tokenizer drops completely.

    offsets: the characters [start, end) of each token.  A token that spans several words belongs to the first of them.
    """
    firsts: list[int | None] = [None] * len(words)
    number = 0
    for token, (_, stop) in enumerate(offsets):
        while number < len(words) and words[number].start + len(words[number].text) < stop:
            number += 1
        if number < len(words) and words[number].start < stop:
            firsts[number] = token
            number += 1
    return firsts
