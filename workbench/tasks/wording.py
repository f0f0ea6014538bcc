"""The wording of tasks: labels of text-to-text models, and the prompts of next-word prediction, as P-RGE prints them.

The prompts are those of appendix D.2, Table 8.
A row of the table is a line here, and the answer is on a separate line; after "It was" and "Answer:" and in the
multiple choices it continues on the same line.  Most prompts are MeZO's (Malladi et al., NeurIPS 2023, appendix E.2),
which breaks a few lines elsewhere and asks "Yes or No?" in WSC too.  The table does not assign words to classes; that
follows from the meaning of the data sets' labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal, TypeVar

from workbench.core.catalogue import data_folder
from workbench.core.serial import from_builtins, read_toml

T = TypeVar("T")
PromptKind = Literal["classification", "multiple_choice", "question_answering"]
STEP = 0.2


def task_table(name: str, kind: type[T]) -> dict[str, T]:
    """Return a table of data/tasks.toml by task."""
    path = data_folder() / "tasks.toml"
    return {
        task: from_builtins(text, kind, source=f"'{name}.{task}' of '{path}'")
        for task, text in read_toml(path)[name].items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """How a task is expressed in words.

    prefix: text before every sample.  names: texts before the first and the second text of a pair.  words: one for each
    class.
    lowest, highest: range of a regression's numbers, which are rounded to STEP and written as text; words is then
    empty.
    """

    prefix: str
    names: tuple[str, str] = ("sentence", "")
    words: tuple[str, ...] = ()
    lowest: float = 0.0
    highest: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The wording of a sample: templates with the names of its fields in braces.

    text: the model's input.  words: the continuation for each class.  candidates: the possible continuations of a
    multiple choice.
    answer: the continuation of a question.  shortened: the field that is shortened from the left if the text does not
    fit.
    kept: fields that are not content, and remain when the content is removed (see prompts/scoring.py).
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
        assert self.shortened in self.fields, f"{self.shortened} is not a field of '{self.text}'"

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields in the text."""
        return tuple(name for _, name, _, _ in Formatter().parse(self.text) if name)

    @property
    def label_words(self) -> tuple[str, ...]:
        """Return the label words, without the space before them.  Empty if the task is not a classification."""
        return tuple(word.strip() for word in self.words)

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the model's input for these fields."""
        return self.text.format_map(fields)

    def without_content(self, fields: Mapping[str, str], stand_in: str) -> dict[str, str]:
        """Return the fields with `stand_in` in place of those in the text.  Candidates and kept fields
        are unchanged.
        """
        return {**fields, **{name: stand_in for name in self.fields if name not in self.kept}}


WORDINGS = task_table("wordings", Wording)
PROMPTS = task_table("prompts", Prompt)
MOBIZO_PROMPTS = task_table("mobizo_prompts", Prompt)
"""Those of MobiZO, the later form of P-RGE (arXiv:2409.15520v3), that differ."""
PAPER_SAMPLES: Mapping[str, Any] = {"train_samples": 1000, "validation_samples": 500, "test_samples": 1000}
"""Number of samples per split in the paper (appendix D.2, after MeZO)."""
