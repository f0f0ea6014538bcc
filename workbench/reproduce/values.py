"""The papers' printed values: data/papers/PAPER/TABLE.csv, each with its unit and where it stands."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.core.catalogue import data_folder
from workbench.core.errors import MissingDataError
from workbench.reproduce.result import Number

FIXED = ("value", "unit", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """One printed value: a number, or a word such as OOM or [2-1-1].  labels: the file's own columns.  source: table, figure, section."""

    labels: dict[str, str]
    value: float | str
    unit: str
    source: str


def paper_folder(paper: str) -> Path:
    """Return the folder of a paper's values."""
    return data_folder() / "papers" / paper


def paper_values(paper: str, table: str) -> tuple[PaperValue, ...]:
    """Return a table's values in the file's order.  Raises MissingDataError naming a file that is missing or not of this form."""
    path = paper_folder(paper) / f"{table}.csv"
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            columns = tuple(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, csv.Error) as error:
        raise MissingDataError(f"The values of '{table}' of the paper '{paper}' were asked for.", f"{error}.", "Reinstall.") from error
    if columns[-len(FIXED) :] != FIXED or any(None in row or None in row.values() for row in rows):
        asked = f"The values of '{table}' of the paper '{paper}' were asked for."
        raise MissingDataError(asked, f"'{path}' is not of the form LABELS..., {', '.join(FIXED)}.", "Mend or reinstall it.")
    return tuple(
        PaperValue(
            labels={column: row[column] for column in columns[: -len(FIXED)]},
            value=_number(row["value"]),
            unit=row["unit"],
            source=row["source"],
        )
        for row in rows
    )


def lookup(values: tuple[PaperValue, ...]) -> dict[tuple[str, ...], Number]:
    """Return the values by their labels, in the order of the file's columns."""
    return {tuple(value.labels.values()): value.value for value in values}


def printed(paper: str, table: str) -> dict[tuple[str, ...], Any]:
    """Return a table's values by their labels, for sums with cells that are known to be numbers."""
    return dict(lookup(paper_values(paper, table)))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
