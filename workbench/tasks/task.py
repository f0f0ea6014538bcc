"""Define a task: texts, labels, splits and metrics; a classification as text-to-text."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar

from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError
from workbench.core.serial import from_builtins, read_toml

T = TypeVar("T")

Kind = Literal["classification", "regression", "sequence_to_sequence", "question_answering", "token_classification", "text_generation"]


IGNORED = -100
"""The label of padding in a target, which losses ignore; also of a word that is neither learnt nor scored."""


class Span(NamedTuple):
    """A range of characters in a text, and the text there.  label: the class of a word in token classification, or IGNORED."""

    start: int
    text: str
    label: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples of a task.

    pairs: second texts, or None.  labels: int (class, also of a label word) or float (regression).  sample_ids: stable, unique.
    images: square grey images, row by row, one byte per pixel; the texts are then empty.
    sources: where each sample comes from (a reviewer, product or topic), or None.
    spans: in question answering the accepted answers in `pairs`, where texts are questions and labels are 1 if there is an answer;
    in token classification the words of each text, with all labels 0.  None in other tasks.
    answers: in text generation what follows each text, with all labels 0.  None in other tasks.
    """

    texts: tuple[str, ...]
    labels: tuple[int | float, ...]
    sample_ids: tuple[int, ...]
    pairs: tuple[str, ...] | None = None
    images: tuple[bytes, ...] | None = None
    sources: tuple[str, ...] | None = None
    spans: tuple[tuple[Span, ...], ...] | None = None
    answers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        sizes = {len(column) for column in self._columns().values() if column is not None}
        assert len(sizes) == 1, f"a split of unequal columns: {sizes}"

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: range | list[int]) -> Split:
        """Return the samples at `indices`, with their original sample ids."""
        columns: Any = {name: own and tuple(own[index] for index in indices) for name, own in self._columns().items()}
        return Split(**columns)

    def __add__(self, other: Split) -> Split:
        """Return the samples of both splits, which must have the same columns."""
        others = other._columns()
        columns: Any = {name: None if own is None else own + others[name] for name, own in self._columns().items()}
        return Split(**columns)

    def _columns(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


S = TypeVar("S", bound=Sized)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided(Generic[S]):
    """A task's samples in three splits, none of them empty.

    source: where the data comes from, for reports.  notes: how they were read where that was not certain, for reports.
    """

    name: str
    train: S
    validation: S
    test: S
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            if not len(getattr(self, name)):
                raise ConfigError(
                    f"The task '{self.name}' was asked for.", f"Its {name} split has 0 samples.", "Give data, or fewer conditions."
                )

    def limited(self, train: int | None, validation: int | None, test: int | None) -> Self:
        """Return the task with at most this many samples in each split, chosen with a fixed seed.  None keeps all."""
        return replace(self, train=_limit(self.train, train), validation=_limit(self.validation, validation), test=_limit(self.test, test))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Divided[Split]):
    """metrics: names in workbench.tasks.metrics; the first one selects the best epoch (see metrics.quality).

    words: for sequence-to-sequence the label word of each class; the splits' labels stay classes, which the metrics compare.
    class_names: of a classification, in class order; empty: classes are numbers.
    """

    kind: Kind
    num_outputs: int
    metrics: tuple[str, ...]
    words: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.words) == (self.kind == "sequence_to_sequence"), "label words are for sequence-to-sequence"
        Divided.__post_init__(self)

    @property
    def may_be_none(self) -> bool:
        """Return whether a question may have no answer, as in SQuAD 2.0."""
        return self.kind == "question_answering" and 0 in self.train.labels


def _limit(split: Any, limit: int | None) -> Any:
    if limit is None or limit >= len(split):
        return split
    if limit < 1:
        raise ConfigError(f"A split of {limit} samples was asked for.", "An empty split trains and tests nothing.", "Raise the limit.")
    # One fixed permutation, so that a larger limit includes all samples of a smaller one.
    # Prompts are in such an order already.
    return split.take(sorted(fixed_order("limit", len(split))[:limit])) if isinstance(split, Split) else split[:limit]


def samples_digest(samples: Split | Iterable[Any]) -> str:
    """Return a digest of samples (a Split, or a prompt's) in their order."""
    columns = [own for own in samples._columns().values() if own is not None] if isinstance(samples, Split) else [samples]
    digest = hashlib.sha256()
    for row in zip(*columns, strict=True):
        digest.update(repr(row).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def numbered(parts: Mapping[str, Split]) -> dict[str, Split]:
    """Return the splits with sample ids that are counted on from one split to the next."""
    starts = itertools.accumulate(map(len, parts.values()), initial=0)
    return {
        name: replace(part, sample_ids=tuple(range(at, at + len(part)))) for (name, part), at in zip(parts.items(), starts, strict=False)
    }


def fixed_order(purpose: str, count: int) -> list[int]:
    """Return a fixed permutation of `count` numbers, the same on every machine."""
    order = list(range(count))
    random.Random(purpose).shuffle(order)
    return order


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


def task_table(name: str, kind: type[T]) -> dict[str, T]:
    """Return a table of data/tasks.toml by task."""
    path = data_folder() / "tasks.toml"
    return {task: from_builtins(text, kind, source=f"'{name}.{task}' of '{path}'") for task, text in read_toml(path)[name].items()}


WORDINGS = task_table("wordings", Wording)


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
            "Choose one of them, or add an entry to data/tasks.toml.",
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
    labels = (
        split.labels
        if wording.words
        else tuple(min(max(round((float(label) - wording.lowest) / STEP), 0), num_words - 1) for label in split.labels)
    )
    return replace(split, texts=texts, pairs=None, labels=labels)
