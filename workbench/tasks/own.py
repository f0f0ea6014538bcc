"""Load own data as a task: read texts, classes and numbers, and divide the rows.  tables.py reads the files, columns.py
finds the columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from workbench.core.errors import ConfigError
from workbench.core.serial import listed, shown
from workbench.tasks.columns import (
    LARGEST_NUMBER,
    Columns,
    as_class,
    as_number,
    as_text,
    find_columns,
    is_missing,
    named_columns,
)
from workbench.tasks.tables import SPLITS, Table, read_tables
from workbench.tasks.task import Split, Task, fixed_order, numbered

OWN_TASKS = ("classification", "regression")
FROM_FILES = (*OWN_TASKS, "question_answering", "token_classification", "instruction_tuning")
"""Tasks whose data may be a file or a hub name."""
VALIDATION_SHARE, TEST_SHARE = 0.1, 0.2
_INTEGER = re.compile(r"-?\d{1,300}")


class Rows(NamedTuple):
    """The contents of one table.  labels: unchanged from the file, None without such a column.  sources: as
    in Split.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    labels: list[Any] | None
    sources: tuple[str, ...] | None = None


def load_own(
    kind: str, data: Path | str | None, columns: str = "", class_names: Sequence[str] = (), *, whole: bool = False
) -> Task:
    """Return own data as a task of kind 'classification' (any number of classes) or 'regression'.

    columns: for example 'text=review,label=stars'; other columns have their usual names.  source=reviewer: a
    sample's origin.
    class_names: a model's class names, to which labels are matched; empty: the data's own names.  whole: see divided.
    In a folder, files that are not named like splits are the training rows, and each file is a source: one file per
    device, for example.
    If a table has no test or validation split, or one without labels, a fixed random part of its rows is used.
    Raises MissingDataError if the data is unavailable, ConfigError naming column and row for unusable values.
    """
    tables = read_tables(kind, data)
    first = next(iter(tables.values()))
    columns_of = find_columns(named_columns(columns, Columns._fields, first), first, needs_label=True, task=kind)
    assert columns_of.label is not None
    notes = [note for table in tables.values() for note in table.notes]
    for name in [
        name for name, table in tables.items() if table is not first and _has_no_label(table, columns_of.label)
    ]:
        del tables[name]
        notes.append(f"The {name} split has no labels in a column '{shown(columns_of.label)}' and is not used.")
    rows = {name: read_rows(table, columns_of, name) for name, table in tables.items()}
    names: tuple[str, ...] = ()
    if kind == "regression":
        labels: dict[str, Any] = {
            name: numbers(rows_of.labels or (), columns_of.label, name) for name, rows_of in rows.items()
        }
    else:
        labels_of = {name: classes(rows_of.labels or (), columns_of.label, name) for name, rows_of in rows.items()}
        names = (
            tuple(class_names)
            or first.classes.get(columns_of.label)
            or class_order(list(chain(*labels_of.values())), columns_of.label)
        )
        labels = {
            name: class_numbers(split_labels, names, columns_of.label, name) for name, split_labels in labels_of.items()
        }
    parts = {
        name: Split(
            texts=split_rows.texts,
            pairs=split_rows.pairs,
            labels=labels[name],
            sources=split_rows.sources,
        )
        for name, split_rows in rows.items()
    }
    metrics = ("pearson", "spearman") if kind == "regression" else ("accuracy", "f1" if len(names) == 2 else "macro_f1")
    return Task(
        name=kind,
        kind="regression" if kind == "regression" else "classification",
        num_outputs=len(names) or 1,
        metrics=metrics,
        class_names=names,
        source=f"{Path(str(data)).name}, columns {', '.join(name for name in columns_of if name)}",
        notes=tuple(notes),
        **divided(numbered(parts), data, whole=whole),
    )


def _has_no_label(table: Table, column: str) -> bool:
    """Return whether all labels are missing, or -1 as on the hub, where a test split keeps them secret."""
    return column not in table.columns or all(
        is_missing(value) or value in (-1, "-1") for value in table.values(column)
    )


def read_rows(table: Table, columns: Columns, split: str) -> Rows:
    """Return a table's texts, pairs, labels and sources.  Raises ConfigError naming a row in which one is missing."""
    named = (columns.text, columns.pair, columns.source)
    texts, pairs, sources = (
        texts_of(table, name, split) if name is not None and name in table.columns else None for name in named
    )
    if texts is None or (pairs is None and columns.pair is not None):
        raise ConfigError(
            f"The columns {listed(filter(None, named[:2]))} were to be read.",
            f"The {split} split lacks one.",
            "Give it the columns of the training rows.",
        )
    labels = None if columns.label is None or columns.label not in table.columns else table.values(columns.label)
    missing = next((row for row, value in enumerate(labels or (), 1) if is_missing(value)), None)
    if missing is not None:
        raise _bad_label(columns.label or "", f"Row {missing} of {split} has no label.", "Fix or remove that row.")
    return Rows(texts, pairs, labels, sources)


LONGEST_TEXT = 1_000_000
"""Characters of a text.  A tokenizer takes over 40 bytes for each, however few tokens are used."""


def texts_of(table: Table, column: str, split: str, *, may_be_empty: bool = False) -> tuple[str, ...]:
    """Return a column as texts.  Raises ConfigError naming the row of a value that is missing or no text."""
    texts = []
    for row, value in enumerate(table.values(column), 1):
        text = as_text(value)
        if text is None or not (may_be_empty or text.strip()):
            problem = "is empty" if text is not None else f"has {shown(value)}, which is not text"
            raise ConfigError(
                f"The column '{shown(column)}' was to be read.",
                f"Row {row} of {split} {problem}.",
                "Fix or remove that row.",
            )
        if len(text) > LONGEST_TEXT:
            raise ConfigError(
                f"The column '{shown(column)}' was to be read.",
                f"Row {row} of {split} has {len(text):,} characters; at most {LONGEST_TEXT:,} are read.",
                "Shorten or remove that row; maybe a quote before it is not closed.",
            )
        texts.append(text)
    return tuple(texts)


def numbers(labels: Sequence[Any], column: str, split: str) -> tuple[float, ...]:
    """Return labels as numbers.  Raises ConfigError naming the row of a label that is not a number."""
    values = []
    for row, value in enumerate(labels, 1):
        number = as_number(value)
        if number is None:
            raise _bad_label(
                column,
                f"Row {row} of {split} has {shown(str(value))!r}, which is not a number from -{LARGEST_NUMBER:g} to "
                f"{LARGEST_NUMBER:g}.",
                "Fix or remove that row, or choose --task classification.",
            )
        values.append(number)
    return tuple(values)


def classes(labels: Iterable[Any], column: str, split: str) -> list[str]:
    """Return the name of each label's class.  Raises ConfigError naming the row of a list or the like."""
    named = []
    for row, value in enumerate(labels, 1):
        name = as_class(value)
        if name is None:
            raise _bad_label(
                column, f"Row {row} of {split} has {shown(value)}, which is not a class.", "Fix or remove that row."
            )
        named.append(name)
    return named


def class_order(labels: Sequence[str], column: str) -> tuple[str, ...]:
    """Return the classes that occur (see sorted_classes).  Raises ConfigError for only one class, and for
    no classes.
    """
    names = sorted_classes(labels)
    values = {name: as_number(name) for name in names}
    broken = next((name for name, value in values.items() if value is not None and not value.is_integer()), None)
    if broken is not None and None not in values.values():
        raise _bad_label(column, f"It holds numbers such as {shown(broken)}.", "Choose --task regression.")
    if len(names) < 2:
        raise _bad_label(column, f"All {len(labels)} rows have the same label: {shown(names[0])}.", "Give two classes.")
    if len(names) > max(2, len(labels) / 2):
        raise _bad_label(
            column,
            f"It has {len(names)} different values in {len(labels)} rows: these are not classes.",
            "Name the label's column by --columns label=NAME, or choose --task regression.",
        )
    return names


def sorted_classes(labels: Iterable[str], first: str | None = None) -> tuple[str, ...]:
    """Return the classes that occur: `first`, then numbers by size, then words."""

    def order(name: str) -> tuple[bool, bool, float, str]:
        number = int(name) if _INTEGER.fullmatch(name) else as_number(name)
        return name != first, number is None, number or 0, name

    return tuple(sorted(set(labels), key=order))


def class_numbers(labels: Sequence[str], names: Sequence[str], column: str, split: str) -> tuple[int, ...]:
    """Return the number of each label's class.  Raises ConfigError with the labels and the known classes."""
    index = {name: number for number, name in enumerate(names)}
    unknown = next((row for row, name in enumerate(labels, 1) if name not in index), None)
    if unknown is not None:
        problem = (
            f"Row {unknown} of {split} has '{shown(labels[unknown - 1])}'. The data hold "
            f"{listed(sorted_classes(labels))}"
        )
        raise _bad_label(column, f"{problem}; the classes are {listed(names)}.", "Give labels of these names.")
    return tuple(index[name] for name in labels)


def _bad_label(column: str, problem: str, todo: str) -> ConfigError:
    return ConfigError(f"The labels in the column '{shown(column)}' were asked for.", problem, todo)


def divided(
    parts: dict[str, Split], data: Path | str | None, *, by_second_text: bool = False, whole: bool = False
) -> dict[str, Any]:
    """Return train, validation and test split.  A missing split is a fixed random part of the training rows.

    by_second_text: rows with the same second text stay together.  whole: whether each split has all rows in their
    order, so that nothing is divided.
    """
    if whole:
        first, *others = parts.values()
        return dict.fromkeys(SPLITS, sum(others, start=first))
    if "train" not in parts:
        parts["train"] = parts.pop(next(iter(parts)))
    if "test" not in parts and "validation" in parts:
        parts["test"] = parts.pop("validation")
    train = parts["train"]
    keys: Sequence[Any] = train.pairs or () if by_second_text else range(len(train))
    distinct = list(dict.fromkeys(keys))
    order = [distinct[index] for index in fixed_order("own", len(distinct))]

    def part(chosen: Sequence[Any]) -> Split:
        chosen_keys = set(chosen)
        return train.take([row for row, key in enumerate(keys) if key in chosen_keys])

    for name, share in (("test", TEST_SHARE), ("validation", VALIDATION_SHARE)):
        if name not in parts:
            count = max(1, round(share * len(distinct)))
            parts[name], order = part(order[:count]), order[count:]
    if not order:
        raise ConfigError(
            f"The data '{data}' were asked for.",
            f"{len(distinct)} {'contexts' if by_second_text else 'rows'} are too few to train, choose and test on.",
            "Give more rows: a few hundred, for something to be learned.",
        )
    return parts | {"train": part(order)}
