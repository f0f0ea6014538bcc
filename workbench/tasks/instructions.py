"""Instruction tuning: rows of an instruction, an input, and the output to learn (Alpaca's format; Taori et al., 2023).

The embedded instructions are made by rules and by the patterns of `questions` from the embedded sentences, not by
people.  They show how a run works and say little about a model's use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.serial import shown
from workbench.tasks.columns import MESSAGES, columns_by_role, usual_column
from workbench.tasks.embedded import load_sentiment_rating
from workbench.tasks.metrics import LOSS
from workbench.tasks.own import divided, texts_of
from workbench.tasks.question_answering import load_questions
from workbench.tasks.tables import Table, read_tables
from workbench.tasks.task import Split, Task, numbered

METRICS = (LOSS, "token_accuracy")
_WRITERS = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
"""Names of who writes a message, in files of several origins, by the role that they mean."""
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
    """Return own data in Alpaca's format: a table with the columns instruction, input (may be missing) and output; or
    a table with a column of conversations.

    columns: for example 'instruction=ask,output=say'; other columns have their usual names.  data: see
    own.load_own.  whole: see own.divided.
    A conversation is a list of messages, as chat models are trained with ('messages' with role and content,
    'conversations' with from and value).  Its first question and the answer to it are learnt, and a system message
    stands before the question; a note counts what goes on after the answer.
    Raises MissingDataError if the data is unavailable, ConfigError for a missing column, naming the row of an empty
    value.
    """
    tables = read_tables("instruction_tuning", data)
    first = next(iter(tables.values()))
    notes = [note for table in tables.values() for note in table.notes]
    conversations = None if columns else usual_column(first, MESSAGES)
    if conversations is not None:
        exchanges = {name: list(_exchanges(table, conversations, name)) for name, table in tables.items()}
        parts = {name: _split(row for row, _ in rows) for name, rows in exchanges.items()}
        source = f"{Path(str(data)).name}, {conversations}"
        longer = sum(goes_on for rows in exchanges.values() for _, goes_on in rows)
        if longer:
            number = sum(map(len, exchanges.values()))
            notes.append(f"{longer} of {number} conversations go on after the first answer; that is not learnt.")
    else:
        columns_of = columns_by_role(first, columns, "instruction_tuning")
        parts = {name: _split(_rows(table, columns_of, name)) for name, table in tables.items()}
        source = ", ".join([Path(str(data)).name, *columns_of.values()])
    return _task("instruction_tuning", divided(numbered(parts), data, whole=whole), source, notes)


def _rows(table: Table, columns: dict[str, str], split: str) -> Iterator[Instruction]:
    def texts(role: str) -> Iterable[str]:
        if role not in columns:
            return ("",) * len(table)
        return map(str.strip, texts_of(table, columns[role], split, may_be_empty=role == "input"))

    return map(Instruction, texts("instruction"), texts("input"), texts("output"))


def _exchanges(table: Table, column: str, split: str) -> Iterator[tuple[Instruction, bool]]:
    """Yield each conversation's first question and answer, and whether the conversation continues.  Raises ConfigError
    with the row number if a row is not a conversation that begins with a question and its answer.
    """
    for row, messages in enumerate(table.values(column), 1):
        written = _written(messages, *MESSAGES[column.strip().lower()])
        before = [text for writer, text in written[:1] if writer == "system"]
        rest = written[len(before) :]
        if [writer for writer, _ in rest[:2]] != ["user", "assistant"] or not all(text for _, text in rest[:2]):
            raise ConfigError(
                f"The conversations in the column '{shown(column)}' were to be read.",
                f"Row {row} of {split} does not begin with a user's message and an assistant's answer, after a system "
                "message at most.",
                "Fix or remove that row.",
            )
        (_, question), (_, answer), *more = rest
        yield Instruction("\n\n".join([*before, question]), "", answer), bool(more)


def _written(messages: Any, by: str, column: str) -> list[tuple[str, str]]:
    """Return who writes each message, and its text; nothing if this is no list of messages."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    pairs = [(message.get(by), message.get(column)) for message in messages]
    return [
        (_WRITERS.get(writer, ""), text.strip() if isinstance(text, str) else "")
        for writer, text in pairs
        if isinstance(writer, str)
    ]


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
