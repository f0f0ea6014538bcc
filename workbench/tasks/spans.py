"""Answers and tags from the logits of tokens, and their scores by the formulas of `evaluate`'s squad, squad_v2 and seqeval."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from workbench.core.errors import require_numbers
from workbench.tasks.metrics import compute
from workbench.tasks.task import Split
from workbench.tasks.tokenize import TokenizedSplit

if TYPE_CHECKING:
    from torch import Tensor

MAX_ANSWER_TOKENS = 30
"""As in BERT's released code for SQuAD."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Answers = Sequence[Sequence[str]]


class PredictionsLike(Protocol):
    """As workbench.models.evaluation.Predictions."""

    logits: Tensor
    sample_ids: Tensor

    def answers(self, kind: str) -> Any:
        """Return classes or numbers."""
        ...

    def references(self) -> Any:
        """Return the labels."""
        ...


class Scored(Protocol):
    """A Task, or what else says what its answers are and how they are scored."""

    @property
    def kind(self) -> str:
        """Return as Task.kind."""
        ...

    @property
    def metrics(self) -> Collection[str]:
        """Return as Task.metrics."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return as Task.class_names."""
        ...

    @property
    def may_be_none(self) -> bool:
        """Return as Task.may_be_none."""
        ...


def score(task: Scored, split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike) -> dict[str, float]:
    """Return a task's metrics of predictions on a split, each from 0 to 1 (correlations from -1).

    Raises DivergedError for predictions that are no numbers.
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
    """Return the most likely answer to each question, '' for none: the best span of at most 30 tokens of any window of its context.

    may_be_none: whether '' is taken where the first token's score, in every window, is above that of the best span (SQuAD 2.0).
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
    """Return the class of every word of each text; a word that was cut has the class 'O', without one the first."""
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
    """Return the mean over questions of the best agreement with an accepted answer that has words; without one '' is right."""
    usable = ([one for one in own if _words(one)] or [""] for own in accepted)
    best = [max(formula(found, one) for one in own) for found, own in zip(predictions, usable, strict=True)]
    return sum(best) / len(best)


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if both are the same but for case, punctuation, articles and spaces."""
    return float(_words(prediction) == _words(reference))


def answer_f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the words; of an answer without words whether both are."""
    found, real = _words(prediction), _words(reference)
    if not found or not real:
        return float(found == real)
    return 2 * (Counter(found) & Counter(real)).total() / (len(found) + len(real))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


QUESTION_FORMULAS = {"answer_f1": answer_f1, "exact_match": exact_match}


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return F1 over whole entities, their words and type both right, as seqeval has it: prefixes B-, I-, E- and S-, and 'O'."""
    found, real = ({(row, *one) for row, names in enumerate(rows) for one in _entities(names)} for rows in (predictions, references))
    return 2 * len(found & real) / (len(found) + len(real)) if found or real else 0.0


def _entities(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each entity: begun by B-, S-, another type or what follows 'O', E- or S-."""
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
