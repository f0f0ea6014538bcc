"""Metrics: accuracy, F1, Pearson and Spearman in numpy, equal to scikit-learn's and scipy's; others from the `evaluate`
library.

Answers and tags, which this module derives from logits, have the formulas of `evaluate`'s squad, squad_v2 and seqeval.
The formulas are ours because `evaluate` fetches a metric's code from the hub, and because devices have neither it nor
scikit-learn.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.assets.hub import hub_endpoint, hub_is_reachable
from workbench.core.errors import ConfigError, DivergedError, MissingDataError, require_numbers
from workbench.core.serial import shown
from workbench.tasks.task import IGNORED, Split
from workbench.tasks.windows import first_tokens

if TYPE_CHECKING:
    from workbench.tasks.tokenize import TokenizedSplit


def compute(names: Iterable[str], predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Compute each metric from predictions and references.

    names: names in FORMULAS, or names for evaluate.load: a metric on the hub or in a local folder, whose own code is
    run.
    Raises ConfigError for an unknown name or for unequal or empty inputs, MissingDataError for a metric on the hub if
    the hub is unavailable, DivergedError if predictions are NaN or infinite.
    """
    if not len(references) or len(predictions) != len(references):
        raise ConfigError(
            f"A metric of {len(predictions)} predictions was asked for.",
            f"There are {len(references)} references.",
            "Give as many, at least one.",
        )
    if not all(map(math.isfinite, predictions)):
        raise DivergedError("A metric was asked for.", "Some predictions are not numbers.", "Lower learning_rate.")
    scores: dict[str, float] = {}
    for name in names:
        scores |= (
            {name: FORMULAS[name](predictions, references)}
            if name in FORMULAS
            else _evaluated(name, predictions, references)
        )
    return scores


def _evaluated(name: str, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Return the value of a metric from the `evaluate` library."""
    request, remedy = f"The metric '{shown(name)}' was asked for.", f"{', '.join(FORMULAS)} need no hub."
    if not Path(name).exists() and not hub_is_reachable():
        raise MissingDataError(
            request, f"{hub_endpoint()} cannot be reached; {remedy}", "Choose one of them, or connect to the network."
        )
    import evaluate  # takes seconds, and most runs do not need it

    try:
        scores = evaluate.load(name).compute(predictions=list(predictions), references=list(references))
    except Exception as error:  # the library and the metric's own code may raise anything
        raise ConfigError(
            request, f"It does not compute: {shown(str(error), 200)}. {remedy}", "Choose another."
        ) from error
    return {key: float(value) for key, value in scores.items() if isinstance(value, int | float | np.number)}


def accuracy(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the share of equal values."""
    return float(np.mean(np.asarray(predictions) == np.asarray(references)))


def f1(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the harmonic mean of precision and recall for class 1; 0 if class 1 neither occurs nor is predicted."""
    predicted, real = np.asarray(predictions) == 1, np.asarray(references) == 1
    claimed = int(predicted.sum() + real.sum())
    return 2 * int((predicted & real).sum()) / claimed if claimed else 0.0


def macro_f1(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the mean of every class's F1, over the classes that occur or are predicted."""
    predicted, real = np.asarray(predictions), np.asarray(references)
    return float(np.mean([f1(predicted == label, real == label) for label in np.union1d(predicted, real)]))


def pearson(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the linear correlation.  It is undefined if either side is constant; then 0 is returned, because reports
    need a number.
    """
    first, other = (np.asarray(values, dtype=np.float64) for values in (predictions, references))
    first, other = first - first.mean(), other - other.mean()
    size = float(np.sqrt((first @ first) * (other @ other)))
    return float(first @ other) / size if size > 0 else 0.0


def spearman(predictions: Sequence[float], references: Sequence[float]) -> float:
    """Return the rank correlation, with mean ranks for ties; 0 if either side is constant."""
    return pearson(_ranks(predictions), _ranks(references))


def _ranks(values: Sequence[float]) -> Sequence[float]:
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - (counts - 1) / 2)[inverse]).tolist()


LOSS = "loss"
"""The metric of which less is better: the mean over the samples of an answer's cross-entropy for each of its tokens, in
nats."""

FORMULAS: dict[str, Callable[[Sequence[float], Sequence[float]], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "pearson": pearson,
    "spearman": spearman,
}


MAX_ANSWER_TOKENS = 30
"""Maximum answer length, as in BERT's released code for SQuAD."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
Answers = Sequence[Sequence[str]]


def quality(task: Any, metrics: Mapping[str, float]) -> float:
    """Return the value by which an epoch is chosen; larger is better.  It is the task's first metric, or the negative
    of a loss.
    """
    name = task.metrics[0]
    return -metrics[name] if name == LOSS else metrics[name]


PredictionsLike = Any
"""A workbench.models.evaluation.Predictions."""


def score(task: Any, split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike) -> dict[str, float]:
    """Return a task's metrics for predictions on a split, each from 0 to 1 (correlations from -1, a loss from 0).

    task: a Task, or an object with its kind, metrics, class_names and may_be_none.  Raises DivergedError for NaN and
    infinity.
    """
    if split.answers is not None:
        answered = require_numbers(predictions.logits, "Predictions")[predictions.labels.ge(0).any(dim=1)]
        return dict(zip(task.metrics, answered.mean(dim=0).tolist(), strict=True))
    if split.spans is None:
        return compute(task.metrics, predictions.answers(task.kind), predictions.references())
    if task.kind == "question_answering":
        given_answers = answers(split, tokenized, predictions, may_be_none=task.may_be_none)
        accepted = [[answer.text for answer in spans] for spans in split.spans]
        return {name: mean_of(QUESTION_FORMULAS[name], given_answers, accepted) for name in task.metrics}
    names = task.class_names
    guessed = zip(tags(split, tokenized, predictions, names), split.spans, strict=True)
    # A word that is not learnt counts neither as right nor as wrong.
    tagged_rows = [
        [(label, word.label) for label, word in zip(*row, strict=True) if word.label != IGNORED] for row in guessed
    ]
    tagged, real = ([[names[pair[side]] for pair in row] for row in tagged_rows] for side in (0, 1))
    pairs = [pair for rows in zip(tagged, real, strict=True) for pair in zip(*rows, strict=True)]
    return {
        "entity_f1": entity_f1(tagged, real),
        "accuracy": sum(predicted == expected for predicted, expected in pairs) / max(1, len(pairs)),
    }


def answers(split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike, *, may_be_none: bool) -> list[str]:
    """Return the most likely answer to each question: the best span of at most 30 tokens in any window of its context,
    '' for no answer.

    may_be_none: whether to answer '' if in every window the first token's score exceeds the best span's (SQuAD 2.0).
    """
    import torch

    assert split.pairs is not None
    logits = require_numbers(predictions.logits, "Predictions")
    best: dict[int, tuple[float, str]] = {}
    no_answer_scores: dict[int, float] = {}
    by_id = {window.sample_id: window for window in tokenized.windows}
    for sample_id, row in zip(predictions.sample_ids.tolist(), logits, strict=True):
        window = by_id[sample_id]
        context_scores = row[window.first : window.first + len(window.offsets)]
        spans = context_scores[:, None, 0] + context_scores[None, :, 1]
        allowed = torch.ones_like(spans, dtype=torch.bool).triu().tril(MAX_ANSWER_TOKENS - 1)
        flat = spans.masked_fill(~allowed, -torch.inf).flatten()
        best_index = int(flat.argmax()) if len(flat) else 0
        value, text = -torch.inf, ""
        if len(flat):
            first, last = (
                window.offsets[best_index // len(context_scores)],
                window.offsets[best_index % len(context_scores)],
            )
            value, text = float(flat[best_index]), split.pairs[window.sample][first[0] : last[1]].strip()
        best[window.sample] = max(best.get(window.sample, (-torch.inf, "")), (value, text))
        no_answer_scores[window.sample] = min(no_answer_scores.get(window.sample, torch.inf), float(row[0].sum()))
    return [
        "" if may_be_none and no_answer_scores[sample] > best[sample][0] else best[sample][1]
        for sample in range(len(split))
    ]


def tags(
    split: Split, tokenized: TokenizedSplit, predictions: PredictionsLike, names: Sequence[str]
) -> list[list[int]]:
    """Return the class of every word in each text.  A word without a token, such as one that is cut off, gets 'O', or
    else class 0.
    """
    assert split.spans is not None
    chosen = require_numbers(predictions.logits, "Predictions").argmax(dim=2)
    beyond = list(names).index("O") if "O" in names else 0
    by_id = {window.sample_id: window for window in tokenized.windows}
    classes: list[list[int]] = [[]] * len(split)
    for sample_id, row in zip(predictions.sample_ids.tolist(), chosen.tolist(), strict=True):
        window = by_id[sample_id]
        places = first_tokens(split.spans[window.sample], window.offsets)
        classes[window.sample] = [beyond if place is None else row[window.first + place] for place in places]
    return classes


def mean_of(formula: Callable[[str, str], float], predictions: Sequence[str], accepted: Answers) -> float:
    """Return the mean over questions of the best agreement with an accepted non-empty answer.  Without one, '' is
    correct.
    """
    usable = ([answer for answer in answers_of_one if _words(answer)] or [""] for answers_of_one in accepted)
    best = [
        max(formula(prediction, answer) for answer in answers_of_one)
        for prediction, answers_of_one in zip(predictions, usable, strict=True)
    ]
    return sum(best) / len(best)


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if both are equal, ignoring case, punctuation, articles and spaces."""
    return float(_words(prediction) == _words(reference))


def answer_f1(prediction: str, reference: str) -> float:
    """Return the harmonic mean of the words' precision and recall.  If either text has no words: whether both have
    none.
    """
    predicted, real = _words(prediction), _words(reference)
    if not predicted or not real:
        return float(predicted == real)
    return 2 * (Counter(predicted) & Counter(real)).total() / (len(predicted) + len(real))


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


QUESTION_FORMULAS = {"answer_f1": answer_f1, "exact_match": exact_match}


def entity_f1(predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> float:
    """Return F1 over whole entities (words and type both correct), as in seqeval: prefixes B-, I-, E- and S-,
    and 'O'.
    """
    predicted, real = (
        {(row, *entity) for row, names in enumerate(rows) for entity in _entities(names)}
        for rows in (predictions, references)
    )
    return 2 * len(predicted & real) / (len(predicted) + len(real)) if predicted or real else 0.0


def _entities(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, last word) of each entity.  B-, S-, a new type, or the word after 'O', E- or S- starts
    an entity.
    """
    entities, begin, before = [], 0, ("O", "_")
    for index, name in enumerate([*names, "O"]):
        mark, kind = name[0], name[1:].split("-", 1)[-1] or "_"
        begins = mark != "O" and (mark in "BS" or before[0] in "OES" or kind != before[1])
        ends = before[0] != "O" and (before[0] in "ES" or mark in "OBS" or kind != before[1])
        if ends:
            entities.append((before[1], begin, index - 1))
        begin = index if begins else begin
        before = (mark, kind)
    return entities
