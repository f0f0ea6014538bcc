"""Instruction tuning: rows of an instruction, an input, and the output to learn (Alpaca's format; Taori et al., 2023).

The embedded instructions are made by rules and by the patterns of `questions` from the embedded sentences, not by
people.  They show how a run works and say little about a model's use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.tasks.columns import columns_by_role
from workbench.tasks.embedded import load_sentiment_rating
from workbench.tasks.metrics import LOSS
from workbench.tasks.own import divided, texts_of
from workbench.tasks.question_answering import load_questions
from workbench.tasks.tables import Table, read_tables
from workbench.tasks.task import Split, Task, numbered

METRICS = (LOSS, "token_accuracy")
LIMITS = 2000, 200, 400
"""Embedded instructions of each split."""


class Instruction(NamedTuple):
    """A row.  input: may be empty."""

    instruction: str
    input: str
    output: str


RULES: tuple[tuple[str, Callable[[str, float], str]], ...] = (
    ("Does the writer like it? Answer yes or no.", lambda text, rating: "Yes" if rating > 0 else "No"),
    ("Repeat the first three words.", lambda text, rating: " ".join(text.split()[:3])),
    ("Write the last word in capital letters.", lambda text, rating: text.split()[-1].upper()),
)
"""Instructions about a sentence with its rating, and their outputs."""


def load_instructions(folder: Path | None = None) -> Task:
    """Return the embedded task.  A sentence is in the same split as in 'sentiment-rating'.  folder: see
    load_sentiment_rating.
    """
    rated, questioned = load_sentiment_rating(folder), load_questions(folder)

    def rows(name: str) -> list[Instruction]:
        sentences, questions = getattr(rated, name), getattr(questioned, name)
        contexts = zip(questions.texts, questions.pairs, questions.spans, strict=True)
        instructions = [Instruction(text, context, spans[0].text) for text, context, spans in contexts]
        for number, (text, rating) in enumerate(zip(sentences.texts, sentences.labels, strict=True)):
            instruction, output = RULES[number % len(RULES)]
            instructions.append(Instruction(instruction, text, output(text, rating)))
        return instructions

    parts = {name: _split(rows(name)) for name in ("train", "validation", "test")}
    return _task("instructions", numbered(parts), f"made by rules from {rated.source}").limited(*LIMITS)


def load_instruction_tuning(data: Path | str | None, columns: str = "", *, whole: bool = False) -> Task:
    """Return own data in Alpaca's format: a table with the columns instruction, input (may be missing) and output.

    columns: for example 'instruction=prompt,output=answer'.  data: see own.load_own.  whole: see own.divided.
    Raises MissingDataError if the data is unavailable, ConfigError for a missing column, naming the row of an empty
    value.
    """
    tables = read_tables("instruction_tuning", data)
    first = next(iter(tables.values()))
    columns_of = columns_by_role(first, columns, {role: [role] for role in Instruction._fields}, optional=["input"])
    parts = {name: _split(_rows(table, columns_of, name)) for name, table in tables.items()}
    source = ", ".join([Path(str(data)).name, *columns_of.values()])
    notes = [note for table in tables.values() for note in table.notes]
    return _task("instruction_tuning", divided(numbered(parts), data, whole=whole), source, notes)


def _rows(table: Table, columns: dict[str, str], split: str) -> Iterator[Instruction]:
    def texts(role: str) -> Iterable[str]:
        if role not in columns:
            return ("",) * len(table)
        return map(str.strip, texts_of(table, columns[role], split, may_be_empty=role == "input"))

    return map(Instruction, texts("instruction"), texts("input"), texts("output"))


def _split(rows: Iterable[Instruction]) -> Split:
    instructions = tuple(rows)
    return Split(
        texts=tuple(row.instruction for row in instructions),
        pairs=tuple(row.input for row in instructions),
        answers=tuple(row.output for row in instructions),
    )


def _task(name: str, parts: dict[str, Any], source: str, notes: Sequence[str] = ()) -> Task:
    return Task(
        name=name, kind="text_generation", num_outputs=1, metrics=METRICS, source=source, notes=tuple(notes), **parts
    )
