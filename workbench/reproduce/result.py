"""The result of reproducing a table or figure: the paper's printed values, ours, and the comparison."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any, Literal, TypeVar

from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.serial import from_builtins, from_json, read_toml, to_json, write_text

Source = Literal["simulated", "executed", "counted"]
Kind = Literal["fitted", "bounded", "predicted", "computed", "measured"]
OOM = "OOM"
Number = float | str | None  # a number, a word such as OOM or [2-1-1], or nothing
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One value of the paper and ours.

    labels: identify the value, under Result.label_columns.  paper: None if the paper gives none.  ours: None if we have none.
    kind: 'fitted' if our constants were fitted to this value, 'predicted' if constants fitted elsewhere give it, 'bounded' if ours is a
    bound that the note names, 'computed' from sizes alone, 'measured' by an executed run.  deviation_in: 'percent' of the
    paper's value, or 'points' (ours - paper) for a value that is a percentage itself.
    """

    labels: tuple[str, ...]
    paper: Number
    ours: Number
    unit: str = ""
    kind: Kind = "computed"
    deviation_in: Literal["percent", "points"] = "percent"
    note: str = ""

    @property
    def deviation(self) -> float | None:
        """Return the deviation of ours from the paper's in per cent or points; None if one of them is not a number."""
        if not isinstance(self.paper, int | float) or not isinstance(self.ours, int | float):
            return None
        if self.deviation_in == "points":
            return self.ours - self.paper
        return 100.0 * (self.ours / self.paper - 1.0) if self.paper else None

    @property
    def agrees(self) -> bool | None:
        """Return whether two words are equal (OOM where the paper has OOM); None if both are numbers or one is missing."""
        if self.paper is None or self.ours is None or self.deviation is not None:
            return None
        return self.paper == self.ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Further numbers that have no counterparts in the paper: a sensitivity, a contradiction worked out, a plan."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Number, ...], ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A claim, whether it holds in our numbers, and the finding."""

    claim: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The reproduction of one table or figure.

    item: its name in the registry.  source: the origin of our numbers.  explanation: sentences on why ours differ from the paper's, what
    was fitted and what the paper leaves open.  series: our numbers that only the figure shows, by name: (x, y) lists.
    environment: the machine and the settings of an executed one.
    """

    item: str
    title: str
    paper_section: str
    source: Source
    label_columns: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    tables: tuple[Table, ...] = ()
    checks: tuple[Check, ...] = ()
    explanation: tuple[str, ...] = ()
    series: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of executed reproductions; simulated ones ignore them.

    data: a local folder with the GLUE tasks or SQuAD's files, None for the embedded data.  seeds: of each executed comparison.  quick: a
    tiny version that only tests that the code runs.  workdir: for intermediate files of an executed one.  progress: called with lines.
    trains: whether a simulated one may also train for those of its values that no simulation gives.
    """

    data: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    workdir: Path | None = None
    trains: bool = False
    progress: Callable[[str], None] = lambda line: None


def read_kept(path: Path, kind: type[T]) -> T | None:
    """Return a file's content from an earlier run; None if it is missing, truncated, or written by another version."""
    try:
        return from_json(path.read_bytes(), kind, source=str(path)) if path.is_file() else None
    except ConfigError:
        return None


def kept_or_made(path: Path | None, kind: type[T], make: Callable[[], T]) -> T:
    """Return a file's content from an earlier run, or create it and store it there.  path: None stores nothing."""
    found = None if path is None else read_kept(path, kind)
    if found is None:
        found = make()
        if path is not None:
            write_text(path, to_json(found, indent=-1))
    return found


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of the sample; None for a single value."""
    return stdev(values) if len(values) > 1 else None


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


def read_constants(paper: str, kind: type[T], section: str = "") -> T:
    """Return a paper's constants.toml, which states the source of each value: all of its sections in one, or one of them."""
    path = paper_folder(paper) / "constants.toml"
    tables = read_toml(path)
    chosen = tables[section] if section else {name: value for table in tables.values() for name, value in table.items()}
    return from_builtins(chosen, kind, source=f"'{path}'")


def paper_values(paper: str, table: str) -> tuple[PaperValue, ...]:
    """Return a table's values in the file's order.  Raises MissingDataError naming a missing or malformed file."""
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


def printed(paper: str, table: str) -> dict[tuple[str, ...], Any]:
    """Return a table's values by their labels, in the order of the file's columns."""
    return {tuple(one.labels.values()): one.value for one in paper_values(paper, table)}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
