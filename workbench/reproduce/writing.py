"""Write a reproduction to a folder: its result as JSON, its figures as HTML (and PNG if a Chromium is found), and an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from markupsafe import Markup

from workbench.core.files import make_folder
from workbench.core.serial import to_json, write_text
from workbench.reproduce.items import Item
from workbench.reproduce.result import Number, Result, Table

if TYPE_CHECKING:
    from workbench.plots.export import Captioned


def write(done: Sequence[tuple[Item, Result]], folder: Path, *, title: str, png: Literal["auto"] | bool = "auto") -> list[Path]:
    """Write results and figures under `folder`; return the files, the index first.

    The index lists the files of this call.  png: as in plots.write_figures.
    """
    from workbench.plots.export import INDEX, page, write_html, write_pngs  # imports plotly, which is not needed to print a table

    make_folder(folder)
    written: list[Path] = []
    sections, figures = [], []
    for item, result in done:
        drawn = item.draw(result)
        path = folder / f"{item.name}.json"
        write_text(path, to_json(result))
        written.append(path)
        written += [write_html(figure, folder / f"{name}.html") for name, _, figure in drawn]
        figures += drawn
        sections.append(_section(result, drawn))
    pictures, why_none = write_pngs(figures, folder, png)
    index = folder / INDEX
    note = Markup("<p class='note'>{}</p>").format(why_none) if why_none else ""
    write_text(index, page(title, _joined([note, *sections])))
    return [index, *written, *pictures]


def number_text(value: Number) -> str:
    """Return a cell's text: three digits, or a word; '' for None."""
    if isinstance(value, bool | str):
        return str(value)
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def comparison_table(result: Result, *, join_labels: bool = False) -> Table:
    """Return the comparisons as a table: labels, paper, ours, deviation, kind, and notes.

    join_labels: put the labels into one column, without notes, for a narrow terminal.
    """
    rows: list[tuple[Number, ...]] = []
    noted = any(one.note for one in result.comparisons) and not join_labels
    for one in result.comparisons:
        difference = one.deviation
        if difference is not None:
            words = f"{difference:+.1f} {'points' if one.deviation_in == 'points' else '%'}"
        else:
            words = {True: "same", False: "differs", None: ""}[one.agrees]
        labels = (", ".join(one.labels),) if join_labels else one.labels
        how = "" if one.ours is None else one.kind
        rows.append((*labels, one.paper, one.ours, one.unit, words, how, *((one.note,) if noted else ())))
    names = (", ".join(result.label_columns),) if join_labels else result.label_columns
    columns = (*names, "paper", "ours", "unit", "deviation", "how", *(("note",) if noted else ()))
    return Table(title=f"{result.title} ({result.source})", columns=columns, rows=tuple(rows))


def _section(result: Result, drawn: Sequence[Captioned]) -> Markup:
    from workbench.plots.export import frames

    explained = _joined(Markup("<p>{}</p>").format(line) for line in result.explanation)
    checks = _joined(
        Markup("<li{}>{}: {} ({})</li>").format(
            Markup("" if check.holds else " class='note'"), "holds" if check.holds else "FAILS", check.claim, check.found
        )
        for check in result.checks
    )
    tables = _joined(
        Markup("<details><summary>{}</summary>{}<p>{}</p></details>").format(table.title, _table(table), table.note)
        for table in (comparison_table(result), *result.tables)
    )
    section = Markup(
        "<h2 id='{item}'>{title} ({source})</h2>\n<p>Section {section} of the paper. <a href='{item}.json'>JSON</a></p>\n"
        "<ul>{checks}</ul>\n{frames}\n{explained}\n{tables}"
    )
    return section.format(
        item=result.item,
        title=result.title,
        source=result.source,
        section=result.paper_section,
        checks=checks,
        frames=frames(drawn),
        explained=explained,
        tables=tables,
    )


def _table(table: Table) -> Markup:
    head = Markup().join(Markup("<th>{}</th>").format(column) for column in table.columns)
    cells = (Markup().join(Markup("<td>{}</td>").format(number_text(cell)) for cell in row) for row in table.rows)
    return Markup("<table><tr>{}</tr>\n{}</table>").format(head, _joined(Markup("<tr>{}</tr>").format(row) for row in cells))


_joined = Markup("\n").join
