"""Rows of tokens with answers and classes of single tokens: long contexts in overlapping windows, as BERT reads SQuAD.

Devlin et al., "BERT" (2019), section 4.2 and its released code: an answer is the first and the last token of a window that holds all of
it; for a window that does not, and for a question without an answer, both are the window's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from workbench.core.errors import ConfigError
from workbench.tasks.task import Span, Split

IGNORED = -100
"""The label of padding in a target, which no loss counts."""
MAX_WINDOWS = 1024
"""Of a sample: window w of sample i has the sample id 1024 i + w."""
OVERLAP = 1 / 3
"""Of two neighbouring windows; BERT's is 128 of 384 tokens."""


@runtime_checkable
class SpanEncoder(Protocol):
    """What a tokenizer must do besides (see TextTokenizer.locate)."""

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Any]:
        """Return the tokens of each text with their characters."""
        ...


class Window(NamedTuple):
    """A row of tokens.  sample: its place in the split.  first: the row's first token of the context (or text).

    offsets: the characters [start, end) of the tokens from there on.  targets: the answer's first and last token; if is_tagged, the class
    of each token, IGNORED for all but the first of each word.
    """

    sample: int
    sample_id: int
    first: int
    offsets: tuple[tuple[int, int], ...]
    targets: tuple[int, ...]
    is_tagged: bool

    def hidden(self) -> Window:
        """Return the window without anything of its text, answer or tags, for devices that may not see them."""
        return self._replace(offsets=(), targets=(0,) * len(self.targets))


def cut_windows(split: Split, encoder: SpanEncoder, max_length: int) -> tuple[tuple[tuple[int, ...], ...], tuple[Window, ...], int]:
    """Return the token ids of every row, what each row is, and how many samples have an answer or words that fit into no row.

    Raises ConfigError naming a question that leaves no room for its context, and an answer that is not in its context.
    """
    assert split.spans is not None
    ids, windows, left_out = [], [], 0
    for sample, (found, spans) in enumerate(zip(encoder.locate(split.texts, split.pairs), split.spans, strict=True)):
        before, own, after = found.ids[: found.first], found.ids[found.first : found.stop], found.ids[found.stop :]
        room = max_length - len(before) - len(after)
        if room < 2:
            raise ConfigError(
                f"max_length = {max_length} was asked for.",
                f"The question '{split.texts[sample][:60]}' takes {len(before) + len(after)} tokens, which leaves no room for its context.",
                "Raise max_length.",
            )
        tagged = split.pairs is None
        step = room if tagged else room - int(OVERLAP * room)
        starts = range(0, max(1, len(own) - (0 if tagged else room - step)), step)[: 1 if tagged else MAX_WINDOWS]
        answer = None if tagged or not spans else _tokens_of(spans[0], found.offsets)
        fits = answer is None or any(at <= answer[0] and answer[1] < at + room for at in starts)
        left_out += not fits or (tagged and len(own) > room)
        for number, at in enumerate(starts):
            offsets = tuple(found.offsets[at : at + room])
            if tagged:
                targets = _classes(spans, len(before), offsets, len(after))
            elif not fits:
                targets = (IGNORED, IGNORED)
            elif answer is not None and at <= answer[0] and answer[1] < at + room:
                targets = (len(before) + answer[0] - at, len(before) + answer[1] - at)
            else:
                targets = (0, 0)
            ids.append((*before, *own[at : at + room], *after))
            windows.append(Window(sample, split.sample_ids[sample] * MAX_WINDOWS + number, len(before), offsets, targets, tagged))
    return tuple(ids), tuple(windows), left_out


def _tokens_of(answer: Span, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """Return the first and the last token of an answer, None if the tokenizer drops all of its characters."""
    end = answer.start + len(answer.text)
    own = [at for at, (first, stop) in enumerate(offsets) if stop > answer.start and first < end]
    return (own[0], own[-1]) if own else None


def _classes(words: Sequence[Span], before: int, offsets: Sequence[tuple[int, int]], after: int) -> tuple[int, ...]:
    """Return the class of every token of a row: a word's at its first token."""
    found, at = [IGNORED] * before, 0
    for _, stop in offsets:
        while at < len(words) and words[at].start + len(words[at].text) < stop:
            at += 1
        starts = at < len(words) and words[at].start < stop
        found.append(words[at].label if starts else IGNORED)
        at += starts
    return (*found, *[IGNORED] * after)
