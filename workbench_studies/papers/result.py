"""The result of reproducing a table or figure: the paper's printed values, ours, and the comparison."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import stdev
from typing import Any, Literal, TypeVar

from workbench.core.catalogue import data_folder
from workbench.core.errors import MissingDataError
from workbench.core.published import constants_of
from workbench.core.serial import load_or_compute, read_json

Source = Literal["simulated", "executed", "computed"]
Kind = Literal["fitted", "upper bound", "lower bound", "predicted", "computed", "measured", "quick trial"]
OOM = "OOM"
DRAWS, LIMIT_S = 100, 6.0
"""Defaults: the number of random clusters, and a solver's seconds for each."""
Number = float | str | None  # a number, a word such as OOM or [2-1-1], or nothing
Row = tuple[Number, ...]
Cells = dict[tuple[str, ...], Any]
"""Values of a table by their labels."""
Record = dict[str, Any]
"""A row of a table by column."""
Series = dict[str, tuple[tuple[float, float], ...]]
"""Lines: their points by name."""
Progress = Callable[[str], None]
"""Called with each line about the progress."""
T = TypeVar("T")
FIXED = ("value", "unit", "source")
"""The last columns of a table's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One value of the paper and ours.

    labels: identify the value, under Result.label_columns.  paper: None if the paper gives none.  ours: None if we have
    none.
    kind: 'fitted': our constants were fitted to this value.  'predicted': constants fitted elsewhere give it.  'upper
    bound', 'lower bound': ours is a bound, which the note names.  'computed': from sizes only.  'measured': by an
    executed run.  'quick trial': a tiny model ran in place of the paper's, only to test the code; such a value is not
    compared.  deviation_in: 'percent' of the paper's value, or 'points' (ours - paper) for a
    value that is a percentage itself.
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
        """Return the deviation of ours from the paper's in per cent or points; None if there is none to speak of."""
        if self.kind == "quick trial":
            return None
        if not isinstance(self.paper, int | float) or not isinstance(self.ours, int | float):
            return None
        if self.deviation_in == "points":
            return self.ours - self.paper
        return 100.0 * (self.ours / self.paper - 1.0) if self.paper else None

    @property
    def how(self) -> str:
        """Return how our value was obtained, '' without one; a bound that the paper's value breaks is refuted."""
        if self.ours is None:
            return ""
        off = self.deviation
        is_broken = off is not None and (
            (self.kind == "upper bound" and off < 0) or (self.kind == "lower bound" and off > 0)
        )
        return f"refuted {self.kind}" if is_broken else self.kind

    @property
    def agrees(self) -> bool | None:
        """Return whether two words are equal (OOM where the paper has OOM); None if both are numbers or one is
        missing.
        """
        if self.paper is None or self.ours is None or self.deviation is not None or self.kind == "quick trial":
            return None
        return self.paper == self.ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Further numbers that have no counterparts in the paper: a sensitivity, a contradiction worked out, a plan."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def records(self) -> list[Record]:
        """Return each row by column."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A claim of the paper, or without a paper an expectation, that our numbers could contradict, whether it holds, and
    our result.
    """

    claim: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The reproduction of one table or figure.

    item: its name in the registry.  source: the origin of our numbers: 'simulated' if events were replayed, 'computed'
    if a formula gives them.  findings: what our numbers say beyond the paper's claims; nothing is judged.
    explanation: sentences on why ours differ from the paper's, what was fitted and what the paper leaves open.
    series: our numbers that only the figure shows, by name: (x, y) lists.
    environment: the machine and the settings of an executed one.  quick: a quick trial (see as_quick_trial).
    """

    item: str
    title: str
    paper_section: str
    source: Source
    label_columns: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    tables: tuple[Table, ...] = ()
    checks: tuple[Check, ...] = ()
    findings: tuple[str, ...] = ()
    explanation: tuple[str, ...] = ()
    series: Series = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    quick: bool = False

    def verdict(self, check: Check) -> str:
        """Return whether a paper's claim holds, or without a paper whether an expectation of ours does, in words."""
        if self.paper_section:
            return "holds" if check.holds else "FAILS"
        return "as we expected" if check.holds else "NOT AS WE EXPECTED"


QUICK_NOTE = (
    "This is a quick trial: a tiny model ran on a few samples, to see that the code works.  Its values are "
    "marked as such, and no claim is"
    " judged by them.  What follows describes the whole run."
)


def as_quick_trial(result: Result) -> Result:
    """Return the result of a quick run, marked wherever it is shown; a result in which nothing was executed stays as it
    is.
    """
    if result.source != "executed" and not any(
        comparison.kind == "measured" and comparison.ours is not None for comparison in result.comparisons
    ):
        return result
    marked = [
        replace(comparison, kind="quick trial", note="") if comparison.kind == "measured" else comparison
        for comparison in result.comparisons
    ]
    tables = result.tables
    if result.source == "executed":
        tables = tuple(replace(table, title=f"Quick trial: {table.title}") for table in tables)
    return replace(
        result,
        title=f"Quick trial: {result.title}",
        comparisons=tuple(marked),
        tables=tables,
        checks=(),
        findings=(),
        explanation=(QUICK_NOTE, *result.explanation),
        quick=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of executed reproductions; simulated ones use draws, limit_s, quick, workdir and progress alone.

    data: a local folder with the GLUE tasks or SQuAD's files, None for the embedded data.  seeds: seeds for each
    executed comparison.
    quick: a tiny version that only tests that the code runs.  workdir: for intermediate files of an executed one.
    progress: called with lines.
    trains: whether a simulated one may also train for those of its values that no simulation gives.
    draws: random clusters of one that draws them.  limit_s: a solver's seconds for each.
    """

    data: Path | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    workdir: Path | None = None
    trains: bool = False
    draws: int = DRAWS
    limit_s: float = LIMIT_S
    progress: Progress = lambda line: None

    def remember(self, name: str, kind: type[T], make: Callable[[], T]) -> T:
        """Return the result that an earlier call stored in a file of the work folder, or compute and store it."""
        return load_or_compute(None if self.workdir is None else self.workdir / name, kind, make)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperValue:
    """One printed value: a number, or a word such as OOM or [2-1-1].  labels: the file's own columns.  source: table,
    figure, section.
    """

    labels: dict[str, str]
    value: float | str
    unit: str
    source: str


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation of the sample; None for a single value."""
    return stdev(values) if len(values) > 1 else None


def paper_folder(paper: str) -> Path:
    """Return the folder of a paper's values and texts, next to the code that reproduces it."""
    return Path(__file__).parent / paper


def _file(paper: str, name: str) -> Path:
    """Return a file of the paper's values.  Those that a notebook reads as well are among the workbench's own data."""
    paper_file = paper_folder(paper) / name
    return paper_file if paper_file.is_file() else data_folder() / "papers" / paper / name


def read_constants(paper: str, kind: type[T], section: str = "") -> T:
    """Return a paper's constants.toml: all of its sections in one, or one of them (see core.published)."""
    return constants_of(_file(paper, "constants.toml"), kind, section)


def paper_values(paper: str, table: str) -> tuple[PaperValue, ...]:
    """Return a table's values in the file's order.  Raises MissingDataError naming a missing or malformed file."""
    path = _file(paper, f"{table}.csv")
    request = f"The values of '{table}' of the paper '{paper}' were asked for."
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


def printed(paper: str, table: str) -> Cells:
    """Return a table's values by their labels, in the order of the file's columns."""
    return {tuple(value.labels.values()): value.value for value in paper_values(paper, table)}


def shipped_result(paper: str, item: str) -> Result | None:
    """Return an item's result that comes with the project; None if there is none."""
    for path in (paper_folder(paper) / "results" / f"{item}.json", data_folder() / "papers" / paper / f"{item}.json"):
        if path.is_file():
            return read_json(path, Result, "the result")
    return None
