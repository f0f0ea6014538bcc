"""Write a reproduction to a folder: its result as JSON, its figures as HTML (and PNG where a Chromium is found), and an index of all."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from workbench.core.errors import RuntimeSetupError
from workbench.core.serial import to_json, write_text
from workbench.reproduce.items import Item
from workbench.reproduce.result import Number, Result, Table

if TYPE_CHECKING:
    from workbench.plots.export import Captioned


def write(done: Sequence[tuple[Item, Result]], folder: Path, *, title: str, png: Literal["auto"] | bool = "auto") -> list[Path]:
    """Write results and figures under `folder`; return the files, the index first.

    The index lists what this call wrote.  png: as plots.write_figures has it.
    """
    from workbench.plots.export import INDEX, write_pngs  # plotly: not needed to print a table

    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    sections, figures = [], []
    for item, result in done:
        drawn = item.draw(result)
        path = folder / f"{item.name}.json"
        write_text(path, to_json(result))
        written.append(path)
        for name, _, figure in drawn:
            page = folder / f"{name}.html"
            figure.write_html(page, include_plotlyjs="directory", config={"displaylogo": False, "responsive": True})
            written.append(page)
        figures += drawn
        sections.append(_section(result, drawn))
    pictures, why_none = write_pngs({folder / f"{name}.png": figure for name, _, figure in figures}) if png else ([], "")
    if why_none and png is True:
        raise RuntimeSetupError("PNG figures were asked for.", why_none, "Install Chromium, or set BROWSER_PATH to one.")
    index = folder / INDEX
    write_text(index, _page(title, sections, why_none))
    return [index, *written, *pictures]


def number_text(value: Number) -> str:
    """Return a cell: three digits, or a word; nothing for None."""
    if isinstance(value, bool | str):
        return str(value)
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def comparison_table(result: Result, *, join_labels: bool = False) -> Table:
    """Return the comparisons as a table: labels, paper, ours, deviation, kind, and notes.

    join_labels: the labels in one column, and no notes, for a narrow terminal.
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
        rows.append((*labels, one.paper, one.ours, one.unit, words, one.kind, *((one.note,) if noted else ())))
    names = (", ".join(result.label_columns),) if join_labels else result.label_columns
    columns = (*names, "paper", "ours", "unit", "deviation", "how", *(("note",) if noted else ()))
    return Table(title=f"{result.title} ({result.source})", columns=columns, rows=tuple(rows))


def _section(result: Result, drawn: Sequence[Captioned]) -> str:
    explained = "\n".join(f"<p>{html.escape(line)}</p>" for line in result.explanation)
    checks = "\n".join(
        f"<li class='{'holds' if check.holds else 'fails'}'>{'holds' if check.holds else 'FAILS'}: {html.escape(check.claim)}"
        f" ({html.escape(check.found)})</li>"
        for check in result.checks
    )
    frames = "\n".join(
        f"<figure><figcaption>{html.escape(caption)} <a href='{name}.html'>alone</a></figcaption>"
        f"<iframe src='{name}.html' title='{html.escape(caption, quote=True)}' loading='lazy'"
        f" style='height:{int(figure.layout.height) + 40}px'></iframe></figure>"
        for name, caption, figure in drawn
    )
    tables = "\n".join(
        f"<details><summary>{html.escape(table.title)}</summary>{_table(table)}<p>{html.escape(table.note)}</p></details>"
        for table in (comparison_table(result), *result.tables)
    )
    return (
        f"<h2 id='{result.item}'>{html.escape(result.title)} ({result.source})</h2>\n<p>Section {html.escape(result.paper_section)} of the"
        f" paper. <a href='{result.item}.json'>JSON</a></p>\n<ul>{checks}</ul>\n{frames}\n{explained}\n{tables}"
    )


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(number_text(cell))}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _page(title: str, sections: Sequence[str], why_none: str) -> str:
    note = f"<p class='fails'>{html.escape(why_none)}</p>" if why_none else ""
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
body {{ font-family: Helvetica, Arial, sans-serif; max-width: 1180px; margin: 1.5em auto; padding: 0 1em; color: #111; }}
table {{ border-collapse: collapse; font-size: .9em; }}
th {{ text-align: left; }}
td, th {{ padding: .1em .8em .1em 0; vertical-align: top; }}
.fails {{ color: #a84300; font-weight: bold; }}
details {{ margin: .5em 0; overflow-x: auto; }} figure {{ margin: 1.5em 0; }} figcaption {{ color: #333; margin-bottom: .3em; }}
iframe {{ width: 100%; border: 1px solid #ddd; }}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{note}
{body}
</body>
</html>
"""
