"""The values that the papers print, and the constants fitted to them, in files that state the source of each value."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from workbench.core.errors import MissingDataError
from workbench.core.serial import from_builtins, read_toml

FIXED = ("value", "unit", "source")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """One printed value: a number, or a word such as OOM or [2-1-1].  labels: the file's own columns.  source: table,
    figure, section.
    """

    labels: dict[str, str]
    value: float | str
    unit: str
    source: str


def constants_of(path: Path, kind: type[T], section: str = "") -> T:
    """Return the constants of a paper's constants.toml, which states the source of each value: of one section, or of
    all.
    """
    tables = read_toml(path)
    chosen = tables[section] if section else {name: value for table in tables.values() for name, value in table.items()}
    return from_builtins(chosen, kind, source=f"'{path}'")


def values_of(path: Path) -> tuple[PaperValue, ...]:
    """Return a table's values in the file's order.  Raises MissingDataError naming a missing or malformed file."""
    request = f"The values of '{path.stem}' of the paper '{path.parent.name}' were asked for."
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, strict=True)
            columns = tuple(reader.fieldnames or ())
            rows = list(reader)
    except (OSError, csv.Error) as error:
        raise MissingDataError(request, f"{error}.", "Reinstall.") from error
    if columns[-len(FIXED) :] != FIXED or any(None in row or None in row.values() for row in rows):
        raise MissingDataError(
            request, f"'{path}' is not of the form LABELS..., {', '.join(FIXED)}.", "Fix or reinstall it."
        )
    return tuple(
        PaperValue(
            labels={column: row[column] for column in columns[: -len(FIXED)]},
            value=_number(row["value"]),
            unit=row["unit"],
            source=row["source"],
        )
        for row in rows
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
