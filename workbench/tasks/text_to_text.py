"""Convert tasks to text-to-text: the decoder generates the answer word (Raffel et al., JMLR 2020, section 2.4 and appendix D)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.errors import ConfigError
from workbench.tasks.task import Split, Task

STEP = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How a task is expressed in words.

    prefix: before every text.  names: before the first and the second text of a pair.  words: one for each class.
    lowest, highest: range of a regression's numbers, which are rounded to STEP and written as text; words is then empty.
    """

    prefix: str
    names: tuple[str, str] = ("sentence", "")
    words: tuple[str, ...] = ()
    lowest: float = 0.0
    highest: float = 0.0


# GLUE as in T5's training, except for wnli, which T5 left out.
WORDINGS: Mapping[str, Wording] = {
    "sentiment": Wording(prefix="sst2", words=("negative", "positive")),
    "sentiment-rating": Wording(prefix="sentiment", lowest=-4.0, highest=4.0),
    "mrpc": Wording(prefix="mrpc", names=("sentence1", "sentence2"), words=("not_equivalent", "equivalent")),
    "stsb": Wording(prefix="stsb", names=("sentence1", "sentence2"), highest=5.0),
    "sst2": Wording(prefix="sst2", words=("negative", "positive")),
    "qnli": Wording(prefix="qnli", names=("question", "sentence"), words=("entailment", "not_entailment")),
    "rte": Wording(prefix="rte", names=("sentence1", "sentence2"), words=("entailment", "not_entailment")),
    "qqp": Wording(prefix="qqp", names=("question1", "question2"), words=("not_duplicate", "duplicate")),
    "wnli": Wording(prefix="wnli", names=("sentence1", "sentence2"), words=("not_entailment", "entailment")),
}


def as_text_to_text(task: Task) -> Task:
    """Return the task with kind 'sequence_to_sequence': texts with T5's prefixes, no pairs, a label word for each class.

    A regression's numbers become classes in steps of 0.2.  Correlations of the classes are those of the rounded numbers.
    Raises ConfigError for a task without a wording.
    """
    if task.kind == "sequence_to_sequence":
        return task
    if task.name not in WORDINGS:
        raise ConfigError(
            f"The task '{task.name}' was asked for as text to text.",
            f"Words are known for {', '.join(WORDINGS)}.",
            "Choose one of them, or add an entry to workbench/tasks/text_to_text.py.",
        )
    wording = WORDINGS[task.name]
    count = round((wording.highest - wording.lowest) / STEP) + 1
    words = wording.words or tuple(f"{wording.lowest + index * STEP:.1f}" for index in range(count))
    parts: dict[str, Any] = {name: _reworded(getattr(task, name), wording, len(words)) for name in ("train", "validation", "test")}
    return replace(task, kind="sequence_to_sequence", num_outputs=len(words), words=words, **parts)


def _reworded(split: Split, wording: Wording, num_words: int) -> Split:
    first, second = wording.names
    if split.pairs is None:
        texts = tuple(f"{wording.prefix} {first}: {text}" for text in split.texts)
    else:
        texts = tuple(f"{wording.prefix} {first}: {text} {second}: {other}" for text, other in zip(split.texts, split.pairs, strict=True))
    labels = split.labels if wording.words else tuple(_class_of(float(label), wording, num_words) for label in split.labels)
    return replace(split, texts=texts, pairs=None, labels=labels)


def _class_of(number: float, wording: Wording, num_words: int) -> int:
    return min(max(round((number - wording.lowest) / STEP), 0), num_words - 1)
