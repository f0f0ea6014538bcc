"""The 13 tasks as next-word prediction: prompts and label words as printed in P-RGE (appendix D.2, Table 8).

A row of the table is a line here, and the answer is on a separate line; after "It was" and "Answer:" and in the multiple choices
it continues on the same line.  Most prompts are MeZO's (Malladi et al., NeurIPS 2023, appendix E.2), which breaks a few lines elsewhere and
asks "Yes or No?" in WSC too.  The table does not assign words to classes; that follows from the meaning of the data sets' labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from workbench.core.errors import ConfigError
from workbench.tasks.task import Divided, fixed_order, task_table

PromptKind = Literal["classification", "multiple_choice", "question_answering"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The wording of a sample: templates with the names of its fields in braces.

    text: the model's input.  words: the continuation for each class.  candidates: the possible continuations of a multiple choice.
    answer: the continuation of a question.  shortened: the field that is shortened from the left if the text does not fit.
    kept: fields that are not content, and remain when the content is removed (see scoring.py).
    """

    text: str
    shortened: str
    kind: PromptKind = "classification"
    words: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    answer: str = ""
    kept: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert bool(self.words) == (self.kind == "classification"), "label words are a classification's"
        assert bool(self.candidates) == (self.kind == "multiple_choice"), "candidates are a multiple choice's"
        assert bool(self.answer) == (self.kind == "question_answering"), "an answer is a question's"
        assert self.shortened in self.fields, f"{self.shortened} is no field of '{self.text}'"

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields in the text."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.text) if name)

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the model's input for these fields."""
        return self.text.format_map(fields)

    def without_content(self, fields: Mapping[str, str], stand_in: str) -> dict[str, str]:
        """Return the fields with `stand_in` in place of those in the text.  Candidates and kept fields are unchanged."""
        return {**fields, **{name: stand_in for name in self.fields if name not in self.kept}}


PROMPTS = task_table("prompts", Prompt)
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
class PromptTask(Divided[PromptSplit]):
    """A task of Table 8, with shuffled splits.  class_names: as own data have them; empty: the label words are the classes' names."""

    prompt: Prompt
    class_names: tuple[str, ...] = ()

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


def shuffled(samples: Sequence[PromptSample]) -> PromptSplit:
    """Return a split in a fixed random order, so that its first samples are representative: published files may be sorted by class."""
    return tuple(samples[index] for index in fixed_order("limit", len(samples)))
