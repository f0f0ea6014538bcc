"""Convert answers and tags to token classes, and logits back to answers and tags.

Metrics use the formulas of `evaluate`'s squad, squad_v2 and seqeval.  Long contexts are split into overlapping windows, as BERT does for
SQuAD: Devlin et al., "BERT" (2019), section 4.2 and its released code.  An answer is the first and the last token in a window that
contains all of it.  For other windows, and for a question without an answer, both are the window's first token.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from workbench.core.errors import ConfigError, require_numbers
from workbench.tasks.metrics import compute
from workbench.tasks.task import Span, Split

if TYPE_CHECKING:
    from workbench.tasks.tokenize import TokenizedSplit

MAX_ANSWER_TOKENS = 30
"""Maximum answer length, as in BERT's released code for SQuAD."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Answers = Sequence[Sequence[str]]


PredictionsLike = Any
"""A workbench.models.evaluation.Predictions."""


def score(task: Any, split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike) -> dict[str, float]:
    """Return a task's metrics for predictions on a split, each from 0 to 1 (correlations from -1).

    task: a Task, or an object with its kind, metrics, class_names and may_be_none.  Raises DivergedError for NaN and infinity.
    """
    if split.spans is None:
        return compute(task.metrics, predictions.answers(task.kind), predictions.references())
    if task.kind == "question_answering":
        found = answers(split, tokenized, predictions, may_be_none=task.may_be_none)
        accepted = [[answer.text for answer in spans] for spans in split.spans]
        return {name: mean_of(QUESTION_FORMULAS[name], found, accepted) for name in task.metrics}
    names = task.class_names
    tagged = [[names[label] for label in one] for one in tags(split, tokenized, predictions, task.class_names)]
    real = [[names[word.label] for word in words] for words in split.spans]
    pairs = [pair for rows in zip(tagged, real, strict=True) for pair in zip(*rows, strict=True)]
    return {"entity_f1": entity_f1(tagged, real), "accuracy": sum(found == own for found, own in pairs) / len(pairs)}


def answers(split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike, *, may_be_none: bool) -> list[str]:
    """Return the most likely answer to each question: the best span of at most 30 tokens in any window of its context, '' for no answer.

    may_be_none: whether to answer '' if in every window the first token's score exceeds the best span's (SQuAD 2.0).
    """
    import torch

    assert split.pairs is not None
    logits = require_numbers(predictions.logits, "Predictions")
    best: dict[int, tuple[float, str]] = {}
    none: dict[int, float] = {}
    by_id = {window.sample_id: window for window in tokenized.windows}
    for sample_id, row in zip(predictions.sample_ids.tolist(), logits, strict=True):
        window = by_id[sample_id]
        own = row[window.first : window.first + len(window.offsets)]
        spans = own[:, None, 0] + own[None, :, 1]
        allowed = torch.ones_like(spans, dtype=torch.bool).triu().tril(MAX_ANSWER_TOKENS - 1)
        flat = spans.masked_fill(~allowed, -torch.inf).flatten()
        at = int(flat.argmax()) if len(flat) else 0
        value, text = -torch.inf, ""
        if len(flat):
            first, last = window.offsets[at // len(own)], window.offsets[at % len(own)]
            value, text = float(flat[at]), split.pairs[window.sample][first[0] : last[1]].strip()
        best[window.sample] = max(best.get(window.sample, (-torch.inf, "")), (value, text))
        none[window.sample] = min(none.get(window.sample, torch.inf), float(row[0].sum()))
    return ["" if may_be_none and none[sample] > best[sample][0] else best[sample][1] for sample in range(len(split))]


def tags(split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike, names: Sequence[str]) -> list[list[int]]:
    """Return the class of every word in each text.  A truncated word gets class 'O', or the first class if 'O' does not exist."""
    assert split.spans is not None
    chosen = require_numbers(predictions.logits, "Predictions").argmax(dim=2)
    beyond = list(names).index("O") if "O" in names else 0
    by_id = {window.sample_id: window for window in tokenized.windows}
    found: list[list[int]] = [[]] * len(split)
    for sample_id, row in zip(predictions.sample_ids.tolist(), chosen.tolist(), strict=True):
        window = by_id[sample_id]
        first_tokens = (at for at, target in enumerate(window.targets) if target >= 0)
        words = len(split.spans[window.sample])
        own = [row[at] for at in first_tokens]
        found[window.sample] = own + [beyond] * (words - len(own))
    return found


def mean_of(formula: Callable[[str, str], float], predictions: Sequence[str], accepted: Answers) -> float:
    """Return the mean over questions of the best agreement with an accepted non-empty answer.  Without one, '' is correct."""
    usable = ([one for one in own if _words(one)] or [""] for own in accepted)
    best = [max(formula(found, one) for one in own) for found, own in zip(predictions, usable, strict=True)]
    return sum(best) / len(best)


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if both are equal, ignoring case, punctuation, articles and spaces."""
    return float(_words(prediction) == _words(reference))


def answer_f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of the words' precision and recall.  If either text has no words: whether both have none."""
    found, real = _words(prediction), _words(reference)
    if not found or not real:
        return float(found == real)
    return 2 * (Counter(found) & Counter(real)).total() / (len(found) + len(real))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


QUESTION_FORMULAS = {"answer_f1": answer_f1, "exact_match": exact_match}


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return F1 over whole entities (words and type both correct), as in seqeval: prefixes B-, I-, E- and S-, and 'O'."""
    found, real = ({(row, *one) for row, names in enumerate(rows) for one in _entities(names)} for rows in (predictions, references))
    return 2 * len(found & real) / (len(found) + len(real)) if found or real else 0.0


def _entities(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each entity.  B-, S-, a new type, or the word after 'O', E- or S- starts an entity."""
    entities, begin, before = [], 0, ("O", "_")
    for at, name in enumerate([*names, "O"]):
        mark, kind = name[0], name[1:].split("-", 1)[-1] or "_"
        begins = mark != "O" and (mark in "BS" or before[0] in "OES" or kind != before[1])
        ends = before[0] != "O" and (before[0] in "ES" or mark in "OBS" or kind != before[1])
        if ends:
            entities.append((before[1], begin, at - 1))
        begin = at if begins else begin
        before = (mark, kind)
    return entities


IGNORED = -100
"""The label of padding in a target, which losses ignore."""
MAX_WINDOWS = 1024
"""Maximum number of windows per sample: window w of sample i has the sample id 1024 i + w."""
OVERLAP = 1 / 3
"""Overlap of two neighbouring windows.  BERT's is 128 of 384 tokens."""


@runtime_checkable
class SpanEncoder(Protocol):
    """Extra tokenizer method for spans (see TextTokenizer.locate)."""

    def locate(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> list[Any]:
        """Return the tokens of each text with their character ranges."""


class Window(NamedTuple):
    """A row of tokens.  sample: its index in the split.  first: the row's first token of the context (or text).

    offsets: the characters [start, end) of the tokens from there on.  targets: the answer's first and last token; if is_tagged, the class
    of each token, IGNORED except for the first token of each word.
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


def cut_windows(split: Split, encoder: SpanEncoder, max_length: int) -> tuple[tuple[tuple[int, ...], ...], tuple[Window, ...], int]:
    """Return the token ids of every row, the rows' windows, and the number of samples whose answer or words fit into no row.

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
    """Return the first and last token of an answer.  None if the tokenizer drops all of its characters."""
    end = answer.start + len(answer.text)
    own = [at for at, (first, stop) in enumerate(offsets) if stop > answer.start and first < end]
    return (own[0], own[-1]) if own else None


def _classes(words: Sequence[Span], before: int, offsets: Sequence[tuple[int, int]], after: int) -> tuple[int, ...]:
    """Return the class of every token in a row.  A word's class is at its first token."""
    found, at = [IGNORED] * before, 0
    for _, stop in offsets:
        while at < len(words) and words[at].start + len(words[at].text) < stop:
            at += 1
        starts = at < len(words) and words[at].start < stop
        found.append(words[at].label if starts else IGNORED)
        at += starts
    return (*found, *[IGNORED] * after)
