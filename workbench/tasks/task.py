"""A task: texts, labels, splits and what counts as good."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from workbench.core.errors import ConfigError

Kind = Literal["classification", "regression", "sequence_to_sequence", "question_answering", "token_classification"]


class Span(NamedTuple):
    """Characters of a text: where they start, and what they are.  label: the class of a word in token classification."""

    start: int
    text: str
    label: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Samples of a task.

    pairs: second texts, or None.  labels: int (class, also of a label word) or float (regression).  sample_ids: stable, unique.
    images: square grey pictures, row by row, a byte for each pixel; the texts are then empty.
    sources: where each sample comes from (a reviewer, product or topic), or None.
    spans: in question answering the accepted answers in `pairs`, the texts being questions and the labels 1 where there is an answer;
    in token classification the words of each text, the labels being 0.  None in other tasks.
    """

    texts: tuple[str, ...]
    labels: tuple[int | float, ...]
    sample_ids: tuple[int, ...]
    pairs: tuple[str, ...] | None = None
    images: tuple[bytes, ...] | None = None
    sources: tuple[str, ...] | None = None
    spans: tuple[tuple[Span, ...], ...] | None = None

    def __post_init__(self) -> None:
        columns = (self.texts, self.labels, self.sample_ids, self.pairs, self.images, self.sources, self.spans)
        sizes = {len(column) for column in columns if column is not None}
        assert len(sizes) == 1, f"a split of unequal columns: {sizes}"

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: range | list[int]) -> Split:
        """Return the samples at `indices`; each keeps its sample id."""
        return Split(
            texts=tuple(self.texts[index] for index in indices),
            labels=tuple(self.labels[index] for index in indices),
            sample_ids=tuple(self.sample_ids[index] for index in indices),
            pairs=None if self.pairs is None else tuple(self.pairs[index] for index in indices),
            images=None if self.images is None else tuple(self.images[index] for index in indices),
            sources=None if self.sources is None else tuple(self.sources[index] for index in indices),
            spans=None if self.spans is None else tuple(self.spans[index] for index in indices),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """metrics: names in workbench.tasks.metrics; the first one chooses the epoch, larger is better.

    source: where the data came from, for reports.
    words: in sequence-to-sequence the word that stands for each class; the splits' labels stay classes, which the metrics compare.
    class_names: of a classification, in the order of its classes; none: they are numbers.
    """

    name: str
    kind: Kind
    num_outputs: int
    metrics: tuple[str, ...]
    train: Split
    validation: Split
    test: Split
    source: str = ""
    words: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.words) == (self.kind == "sequence_to_sequence"), "label words are for sequence-to-sequence"
        for name in ("train", "validation", "test"):
            if not len(getattr(self, name)):
                raise ConfigError(
                    f"The task '{self.name}' was asked for.", f"Its {name} split has 0 samples.", "Give data, or fewer conditions."
                )

    def limited(self, train: int | None, validation: int | None, test: int | None) -> Task:
        """Return the task with at most so many samples in each split, drawn by a fixed seed; None keeps all."""
        return replace(self, train=_limit(self.train, train), validation=_limit(self.validation, validation), test=_limit(self.test, test))


def _limit(split: Split, limit: int | None) -> Split:
    if limit is None or limit >= len(split):
        return split
    if limit < 1:
        raise ConfigError(f"A split of {limit} samples was asked for.", "An empty split trains and tests nothing.", "Raise the limit.")
    # One fixed permutation: a larger limit holds all samples of a smaller one.
    order = list(range(len(split)))
    random.Random("limit").shuffle(order)
    return split.take(sorted(order[:limit]))
