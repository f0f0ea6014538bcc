"""A paper's tables and figures as described in PAPER/items.toml, looked up by their usual names ('Fig. 13')."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any

from workbench.core.errors import ConfigError, check_choice, did_you_mean
from workbench.core.serial import from_builtins, read_toml
from workbench_studies.papers.charts import Chart, Rules, matches
from workbench_studies.papers.result import (
    Cells,
    Check,
    Comparison,
    Kind,
    Number,
    Result,
    Row,
    Series,
    Settings,
    Source,
    Table,
    as_quick_trial,
    paper_folder,
    paper_values,
    printed,
)

if TYPE_CHECKING:  # plotly is slow to import, and a list of items does not need it
    from workbench.plots.export import Captioned

# To add a paper: add a package with its name here.  It has functions named like its items, items.toml and the paper's
# values.
PAPERS = ("pac_plus", "galaxy_plus", "p_rge", "ringada", "confidant")
COMPARE = "compare"
"""All methods next to each other: a folder like a paper's, without a paper's values."""
CHANGE = 0.05
_ROMAN = {
    "i": "1",
    "ii": "2",
    "iii": "3",
    "iv": "4",
    "v": "5",
    "vi": "6",
    "vii": "7",
    "viii": "8",
    "ix": "9",
    "x": "10",
}
Rows = Sequence[Sequence[Any]]
"""Rows of numbers, words and None, as in Table.rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableText:
    """The texts of a further table.  Like all texts here, they may contain {words} that the code fills in."""

    title: str
    columns: tuple[str, ...]
    note: str = ""


SENSITIVITY = TableText(
    title="Sensitivity to 5 % of each constant, and what a trivial rule scores", columns=("constants",)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A table or figure: its texts, and the function in the paper's package that computes it.

    The function has its name, and takes the item, the settings, or both.
    title: its name in lists.  trains: whether a simulated one also trains for some of its values if it is named.
    heading: the result's.  kinds, units, notes: those of cells, by their labels; kind, unit: those of all other cells.
    checks: a claim of the paper and our result.  findings: sentences on what our numbers say beyond them.
    varied, together, scores, trivial: settings of the sensitivity (see there).  words: for every text.
    """

    paper: str
    name: str
    title: str
    source: Source
    trains: bool = False
    module: str
    heading: str = ""
    section: str = ""
    label_columns: tuple[str, ...] = ()
    unit: str | None = None
    kind: Kind = "computed"
    kinds: Rules = ()
    units: Rules = ()
    notes: Rules = ()
    explanation: tuple[str, ...] = ()
    checks: dict[str, tuple[str, str]] = field(default_factory=dict)
    findings: dict[str, str] = field(default_factory=dict)
    tables: dict[str, TableText] = field(default_factory=dict)
    figures: tuple[Chart, ...] = ()
    varied: tuple[str, ...] = ()
    together: dict[str, str] = field(default_factory=dict)
    scores: tuple[str, ...] = ()
    trivial: str = ""
    words: dict[str, str] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """Return where its numbers come from, in words for a list."""
        return f"{self.source}; trains for some values if named (minutes)" if self.trains else self.source

    def run(self, settings: Settings) -> Result:
        """Compute the result."""
        result: Result = _called(self._function(self.name), item=self, settings=settings)
        return as_quick_trial(result) if settings.quick else result

    def draw(self, result: Result) -> list[Captioned]:
        """Return the result's figures: by a function draw_NAME if it exists, otherwise as the file describes.

        The function takes the result, the item, or both.  It returns one figure, or several with their captions.
        """
        from workbench.plots.export import Captioned
        from workbench_studies.papers.drawing import draw

        draw_item = self._function(f"draw_{self.name}")
        if draw_item is None:
            return draw(self.figures, result)
        drawn = _called(draw_item, item=self, result=result)
        return drawn if isinstance(drawn, list) else [Captioned(self.name, self.title, drawn)]

    def _function(self, name: str) -> Any:
        module = import_module(f"workbench_studies.papers.{self.paper}.{self.module}")
        return getattr(module, name.replace("-", "_"), None)

    @property
    def printed(self) -> Cells:
        """Return the paper's values of the item by their labels."""
        return printed(self.paper, self.name)

    def compare(self, ours: Callable[..., Number]) -> tuple[Comparison, ...]:
        """Return every value of the paper's table with ours(*labels)."""
        return tuple(
            self.cell(labels, value.value, ours(*labels), value.unit)
            for value in paper_values(self.paper, self.name)
            for labels in [tuple(value.labels.values())]
        )

    def cell(self, labels: tuple[str, ...], paper: Number, ours: Number, unit: str = "", note: str = "") -> Comparison:
        """Return one comparison with the unit, kind and note that the file gives its labels."""
        kind: Any = first_match(self.kinds, labels, self.kind)
        unit = first_match(self.units, labels, unit if self.unit is None else self.unit)
        return Comparison(
            labels=labels,
            paper=paper,
            ours=ours,
            unit=unit,
            kind=kind,
            deviation_in="points" if unit.startswith(("percent", "points", "%")) else "percent",
            note=note or first_match(self.notes, labels, ""),
        )

    def sensitivity(self, constants: Any, score: Callable[[Any], Sequence[Number]], trivial: Sequence[Number]) -> Rows:
        """Return the scores unchanged, with each constant of `varied` 5 % lower and higher, and for a trivial rule.

        constants: a dataclass.  `together` names constants that vary with another.
        """
        rows: list[Row] = [("as they are", *score(constants))]
        for name in self.varied:
            names = [name, *([self.together[name]] if name in self.together else [])]
            for sign in (-1, 1):
                changed = {each: getattr(constants, each) * (1 + sign * CHANGE) for each in names}
                rows.append((f"{name} {sign * CHANGE:+.0%}", *score(replace(constants, **changed))))
        return [*rows, (f"trivial rule: {self.trivial}", *trivial)]

    def check(self, name: str, holds: bool, **words: object) -> Check:
        """Return a check with the file's texts."""
        claim, outcome = (text.format(**self.words, **words) for text in self.checks[name])
        return Check(claim=claim, holds=bool(holds), found=outcome)

    def finding(self, name: str, **words: object) -> str:
        """Return a finding with the file's text."""
        return self.findings[name].format(**self.words, **words)

    def result(
        self,
        comparisons: Sequence[Comparison] = (),
        *,
        tables: Mapping[str, Rows] | None = None,
        holds: Mapping[str, bool] | None = None,
        checks: Sequence[Check] = (),
        findings: Sequence[str] | None = None,
        series: Series | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
        **words: Any,
    ) -> Result:
        """Return the result with the file's texts.

        tables: rows by name.  holds: which checks hold; checks: further ones.  findings: None for all of the file's.
        columns: a table's columns after those that the file names.
        words: for the texts.
        """

        def formatted(text: str) -> str:
            return text.format(**self.words, **words)

        def table(name: str, rows: Rows) -> Table:
            text = SENSITIVITY if name == "sensitivity" else self.tables[name]
            more = self.scores if name == "sensitivity" else (columns or {}).get(name, ())
            titles = tuple(map(formatted, (*text.columns, *more)))
            return Table(
                title=formatted(text.title),
                columns=titles,
                rows=tuple(map(tuple, rows)),
                note=formatted(text.note),
            )

        return Result(
            item=self.name,
            title=formatted(self.heading),
            paper_section=self.section,
            source=self.source,
            label_columns=self.label_columns,
            comparisons=tuple(comparisons),
            tables=tuple(table(name, rows) for name, rows in (tables or {}).items()),
            checks=(*(self.check(name, true, **words) for name, true in (holds or {}).items()), *checks),
            findings=tuple(map(formatted, self.findings.values()) if findings is None else findings),
            explanation=tuple(map(formatted, self.explanation)),
            series=series or {},
        )


def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a function with the values that it takes, by their names."""
    return function(**{name: arguments[name] for name in signature(function).parameters})


def each_cell(ours: Callable[..., Number]) -> Callable[[Item], Result]:
    """Return what computes an item that compares each of its cells with ours(*labels), and has nothing else."""
    return lambda item: item.result(item.compare(ours))


def first_match(rules: Rules, labels: Sequence[str], default: str) -> str:
    """Return the value of the first rule that matches the labels."""
    return next((value for value, *pattern in rules if matches(pattern, labels)), default)


def worst(
    comparisons: Sequence[Comparison], kinds: Sequence[Kind] = ("computed", "predicted", "fitted")
) -> tuple[float, str]:
    """Return the largest absolute deviation in per cent, and its cell."""
    return max(
        (abs(comparison.deviation), ", ".join(comparison.labels))
        for comparison in comparisons
        if comparison.kind in kinds and comparison.deviation is not None
    )


def median_deviation(comparisons: Sequence[Comparison], kinds: Sequence[Kind] = ("computed", "predicted")) -> float:
    """Return the median absolute deviation in per cent of the cells to which nothing was fitted."""
    return statistics.median(
        abs(comparison.deviation)
        for comparison in comparisons
        if comparison.kind in kinds and comparison.deviation is not None
    )


def median_off(pairs: Iterable[tuple[Number, Number]]) -> float:
    """Return the median of |ours / paper - 1| in per cent over the pairs (ours, paper) of two numbers."""
    return statistics.median(
        abs(100 * (our_value / value - 1))
        for our_value, value in pairs
        if isinstance(our_value, float) and isinstance(value, float)
    )


def swapped(cells: Iterable[tuple[str, Number, Number]]) -> list[str]:
    """Return the pairs of methods whose order differs from the paper's.

    cells: (method, paper, ours); values that are not numbers have no order, nor have two that print alike in the paper.
    """
    numeric = [cell for cell in cells if isinstance(cell[1], float) and isinstance(cell[2], float)]
    pairs: Any = product(numeric, numeric)
    return [f"{first[0]} before {two[0]}" for first, two in pairs if first[1] < two[1] and first[2] >= two[2]]


def columns_in_order(columns: Mapping[str, Iterable[tuple[str, Number, Number]]]) -> tuple[int, int, list[str]]:
    """Return the columns whose methods are in the paper's order, all columns, and the pairs that are not (see
    swapped).
    """
    wrong = [[f"{name}: {pair}" for pair in swapped(cells)] for name, cells in columns.items()]
    return sum(not pairs for pairs in wrong), len(wrong), [pair for pairs in wrong for pair in pairs]


def items_of(paper: str) -> tuple[Item, ...]:
    """Return a paper's items.  Raises ConfigError for an unknown paper."""
    names = (*PAPERS, COMPARE)
    check_choice("paper", paper, names)
    path = paper_folder(paper) / "items.toml"
    written = read_toml(path, "the paper's items")
    shared = {"paper": paper} | written.pop("paper", {})
    written.pop("absent", None)
    items = []
    for name, item_text in written.items():
        text = shared | written.get(item_text.pop("like", ""), {}) | item_text | {"name": name}
        items.append(from_builtins(text, Item, source=f"'{name}' of '{path}'"))
    return tuple(items)


def absent_of(paper: str) -> dict[str, str]:
    """Return the tables and figures of a paper without an item, each with the reason."""
    return dict(read_toml(paper_folder(paper) / "items.toml", "the paper's items").get("absent", {}))


def find_item(paper: str, name: str) -> Item:
    """Return an item by name: 'table5', 'Table V', 'fig. 13', 'Figure 13'.  Raises ConfigError with the list for an
    unknown one.
    """
    items = items_of(paper)
    canonical_name = canonical(name)
    for item in items:
        if item.name == canonical_name:
            return item
    names = [item.name for item in items]
    raise ConfigError(
        f"'{name}' of the paper '{paper}' was asked for.",
        f"There are: {', '.join(names)}.",
        did_you_mean(canonical_name, names),
    )


def canonical(name: str) -> str:
    """Return the canonical name, such as 'fig13', 'table5' or 'fig18-executed', of any spelling."""
    words = re.sub(r"[\s._]+", "", name.lower()).replace("figure", "fig")
    head, _, tail = words.partition("-")
    match = re.fullmatch(r"(table|fig)([ivx]+)", head)
    if match and match[2] in _ROMAN:
        head = match[1] + _ROMAN[match[2]]
    return f"{head}-{tail}" if tail else head
