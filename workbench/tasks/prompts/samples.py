"""Define a task of prompts: samples with named fields, three splits, and the paper's sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.core.errors import ConfigError
from workbench.tasks.prompts.templates import Prompt, PromptKind
from workbench.tasks.task import fixed_order

PAPER_SAMPLES: Mapping[str, Any] = {"train_samples": 1000, "validation_samples": 500, "test_samples": 1000}
"""Number of samples per split in the paper (appendix D.2, after MeZO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSample:
    """fields: the prompt's contents by name.  label: the class, or the number of the correct candidate; 0 for a question.

    answers: for a question, all correct answers; the first is the one to learn.
    """

    sample_id: int
    fields: Mapping[str, str]
    label: int = 0
    answers: tuple[str, ...] = ()


PromptSplit = tuple[PromptSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTask:
    """A task of Table 8, with shuffled splits.  source: where the data comes from, for reports."""

    name: str
    prompt: Prompt
    train: PromptSplit
    validation: PromptSplit
    test: PromptSplit
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("train", "validation", "test"):
            if not getattr(self, name):
                raise ConfigError(f"The task '{self.name}' was asked for.", f"Its {name} split has 0 samples.", "Give more data.")

    @property
    def kind(self) -> PromptKind:
        """Return the kind of prediction."""
        return self.prompt.kind

    @property
    def words(self) -> tuple[str, ...]:
        """Return the label words, without the space before them.  Empty if the task is not a classification."""
        return tuple(word.strip() for word in self.prompt.words)

    @property
    def metric(self) -> str:
        """Return 'f1' (of the answer's words) for questions, 'accuracy' for all other tasks (appendix D.1)."""
        return "f1" if self.kind == "question_answering" else "accuracy"

    def reworded(self, words: Sequence[str]) -> PromptTask:
        """Return a classification with other label words, in class order.

        Raises ConfigError if the task is not a classification, or if the number of different words differs from the number of classes.
        """
        asked = f"The label words {'/'.join(words)} were asked for on '{self.name}'."
        if self.kind != "classification":
            raise ConfigError(asked, f"It is {self.kind.replace('_', ' ')}, without classes.", "Leave them out.")
        bare = [word.strip() for word in words]
        if len(bare) != len(self.words) or not all(bare) or len(set(bare)) < len(bare):
            raise ConfigError(asked, f"It has {len(self.words)} classes: {'/'.join(self.words)}.", "Give a word of its own for each.")
        space = " " if self.prompt.words[0].startswith(" ") else ""
        return replace(self, prompt=replace(self.prompt, words=tuple(f"{space}{word}" for word in bare)))

    def limited(self, train: int | None, validation: int | None, test: int | None) -> PromptTask:
        """Return the task with at most this many samples in each split, the first ones.  None keeps all."""
        return replace(self, train=_limit(self.train, train), validation=_limit(self.validation, validation), test=_limit(self.test, test))


def _limit(split: PromptSplit, limit: int | None) -> PromptSplit:
    if limit is None or limit >= len(split):
        return split
    if limit < 1:
        raise ConfigError(f"A split of {limit} samples was asked for.", "An empty split trains and tests nothing.", "Raise the limit.")
    return split[:limit]


def shuffled(samples: Sequence[PromptSample]) -> PromptSplit:
    """Return a split in a fixed random order, so that its first samples are representative: published files may be sorted by class."""
    return tuple(samples[index] for index in fixed_order("limit", len(samples)))
