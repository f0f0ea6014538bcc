"""Find the columns of a user's table by their names and by their contents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.serial import listed, shown
from workbench.tasks.tables import FILE, Table

LARGEST_NUMBER = 1e18
"""Heads compute in float32, in which the square of a regression's error must be a number."""

_PAIRS = (
    ("sentence1", "sentence2"),
    ("text1", "text2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
_TEXTS = ("text", "sentence", "review", "content", "comment", "message", "question", "title")
_LABELS = ("label", "labels", "class", "category", "target", "score", "rating", "stars", "sentiment")
EXAMPLE = "text=review,label=stars"
USUAL: Mapping[str, Mapping[str, Sequence[str]]] = {
    "question_answering": {"question": ("question",), "context": ("context",), "answers": ("answers",)},
    "token_classification": {"tokens": ("tokens", "words"), "tags": ("tags", "ner_tags", "pos_tags", "labels")},
    "instruction_tuning": {
        "instruction": ("instruction", "prompt", "question"),
        "input": ("input",),
        "output": ("output", "response", "completion", "answer"),
    },
}
"""By task: the usual names of each role's column."""
OPTIONAL = ("input",)
"""Roles without which the data are complete."""
MESSAGES = {"messages": ("role", "content"), "conversations": ("from", "value")}
"""Columns of whole conversations, and the fields of each message in them: who writes, and what."""
_SQUAD = "paragraphs"
"""The column of SQuAD's articles."""


class Columns(NamedTuple):
    """Names of the columns for the text, the second text of a pair, the label, and the source.  None: no
    such column.
    """

    text: str
    pair: str | None
    label: str | None
    source: str | None = None


def named_columns(
    columns: str, roles: Sequence[str], table: Table, example: str = EXAMPLE, *, left_out: Sequence[str] = ()
) -> dict[str, str]:
    """Return the column of each role in 'text=review,label=stars'.  A column's name may contain commas and blanks.

    left_out: roles that are not needed, whose columns the table may lack.
    Raises ConfigError for an unknown role or column, for a role that is named twice, and for a name that two columns
    have.
    """
    blank, *parts = re.split(rf"(?:^|,)\s*({'|'.join(roles)})\s*=", columns)
    named = [(role, name) for role, name in zip(parts[::2], parts[1::2], strict=True) if role not in left_out]
    trimmed = {name.strip(): name for name in reversed(table.names)}
    column_of = {role: name if name in table.columns else trimmed.get(name.strip(), "") for role, name in named}
    wrong = blank.strip(" ,") or next(
        (f"{role}={name}" for role, name in named if column_of[role] not in table.columns), ""
    )
    request = f"The columns '{shown(columns, 200)}' were asked for."
    if wrong:
        raise ConfigError(
            request,
            f"'{shown(wrong)}' names no role or no column. The data have the columns {listed(table.names)}.",
            f"Name them, such as --columns {example}.",
        )
    if len(column_of) < len(named):
        raise ConfigError(request, "A role is named twice.", "Name each once.")
    for name in column_of.values():
        _require_one(table, [name])
    return column_of


def usual_column(table: Table, usual: Iterable[str]) -> str | None:
    """Return the first column with one of these names, in any case.  Raises ConfigError if two columns have it."""
    for name in usual:
        if matching := [column for column in table.names if column.strip().lower() == name]:
            return _require_one(table, matching)
    return None


def columns_by_role(table: Table, columns: str, task: str) -> dict[str, str]:
    """Return the column of each of a task's roles, as named in `columns` (see named_columns) or by a usual name.

    A role of OPTIONAL may be missing in the result.  Raises ConfigError with the columns present if another role has
    none.
    """
    usual = USUAL[task]
    example = ",".join(f"{role}=NAME" for role in usual)
    named = named_columns(columns, tuple(usual), table, example)
    column_of = {role: named.get(role) or usual_column(table, names) for role, names in usual.items()}
    if any(name is None and role not in OPTIONAL for role, name in column_of.items()):
        raise ConfigError(
            f"Data with the columns {listed(usual)} were asked for.",
            f"The data have the columns {listed(table.names)}.",
            f"{_other_task(table, task)}Name them, such as --columns {example}.",
        )
    return {role: name for role, name in column_of.items() if name is not None}


def _other_task(table: Table, asked: str) -> str:
    """Return a sentence that names the task whose usual columns a table has; '' if there is none."""
    names = {name.strip().lower() for name in table.names}
    fitting = [
        task
        for task, usual in USUAL.items()
        if all(names & set(of_role) for role, of_role in usual.items() if role not in OPTIONAL)
    ]
    if _SQUAD in names:
        fitting.append("question_answering")
    if names & set(MESSAGES):
        fitting.append("instruction_tuning")
    if names & set(_TEXTS) and names & set(_LABELS):
        fitting.append("classification")
    other = next((task for task in fitting if task != asked), None)
    return f"These columns are usual for --task {other}. " if other else ""


def _require_one(table: Table, names: list[str]) -> str:
    if len(names) > 1 or names[0] in table.repeated:
        problem = (
            f"The columns {listed(names)} differ in case or blanks only."
            if len(names) > 1
            else "Several columns have that name."
        )
        raise ConfigError(
            f"The column '{shown(names[0])}' was to be read.", problem, "Rename them, or name one by --columns."
        )
    return names[0]


def find_columns(named: Mapping[str, str], table: Table, *, needs_label: bool, task: str = "") -> Columns:
    """Return the columns, detected where not named (see named_columns).  Raises ConfigError with the existing and the
    required columns.

    task: the task that was chosen, if another one can be: the error then names the one that the columns are usual for.
    """
    label = named.get("label") or usual_column(table, _LABELS)
    text, pair = named.get("text"), named.get("pair")
    if text is None:
        both = ((usual_column(table, [first]), usual_column(table, [two])) for first, two in _PAIRS)
        text, usual_pair = next(((first, two) for first, two in both if first and two), (None, None))
        text, pair = (
            text or usual_column(table, [name for name in _TEXTS if label is None or name != label.lower()]),
            pair or usual_pair,
        )
    if text is None:
        texts = [name for name in table.names if name not in (label, FILE) and _holds_text(table.values(name))]
        text = texts[0] if len(texts) == 1 else None
    missing = "text" if text is None else "label" if label is None and needs_label else ""
    if missing:
        usual = ", ".join(_TEXTS if missing == "text" else _LABELS)
        problem = f"The data have the columns {listed(table.names)}. Wanted is one of {usual}."
        other = _other_task(table, task) if task else ""
        raise ConfigError(
            f"Data with a column of each {missing} were asked for.",
            problem,
            f"{other}Name them, such as --columns {EXAMPLE}.",
        )
    assert text is not None
    return Columns(text, pair, label, named.get("source") or (FILE if FILE in table.columns else None))


def _holds_text(values: Iterable[Any]) -> bool:
    return any(isinstance(value, str) and value and as_number(value) is None for value in values)


def is_missing(value: Any) -> bool:
    """Return whether a table's cell is empty."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def as_text(value: Any) -> str | None:
    """Return a value as text, '' for a missing one.  None if it is not a single value, or bytes that are not UTF-8."""
    if is_missing(value):
        return ""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return None if isinstance(value, list | dict | tuple) else str(value)


def as_class(value: Any) -> str | None:
    """Return the name of a class, '' for a missing one, None for lists and the like.  The number 3.0 is the class '3';
    a text is its own name.
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else as_text(value)


def as_number(value: Any) -> float | None:
    """Return a value as a number that can be learnt; None for others."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST_NUMBER and "_" not in str(value) else None
