"""`workbench reproduce`: a paper's tables and figures, the paper's numbers next to ours, printed and written to a
folder.

The folder gets each result as JSON, its figures as HTML (and PNG if Chromium is installed), and an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from markupsafe import Markup

from workbench.assets.fetch import cache_folder
from workbench.cli.output import Json, Png, print_json, print_table, print_text, say
from workbench.core.errors import ConfigError, WorkbenchError
from workbench.core.files import make_folder, require_writable
from workbench.core.methods import title_of
from workbench.core.serial import to_builtins, write_json, write_text
from workbench.core.units import with_capital
from workbench_studies.papers import COMPARE, PAPERS, Item, Result, Settings, Table, find_item, items_of
from workbench_studies.papers.result import DRAWS, LIMIT_S, Number, Row

if TYPE_CHECKING:
    from workbench.plots.export import Captioned


def write(
    results: Sequence[tuple[Item, Result]], folder: Path, *, title: str, png: Literal["auto"] | bool = "auto"
) -> list[Path]:
    """Write results and figures under `folder`; return the files, the index first.

    The index lists the files of this call.  png: as in plots.write_figures.
    """
    from workbench.plots.export import (
        INDEX,
        page,
        write_html,
        write_pngs,
    )  # imports plotly, which is not needed to print a table

    make_folder(folder)
    written: list[Path] = []
    sections, figures = [], []
    for item, result in results:
        drawn = item.draw(result)
        path = folder / f"{item.name}.json"
        write_json(path, result)
        written.append(path)
        written += [write_html(figure, folder / f"{name}.html") for name, _, figure in drawn]
        figures += drawn
        sections.append(_section(result, drawn))
    pictures, why_none = write_pngs(figures, folder, png)
    index = folder / INDEX
    links = _joined(Markup("<li><a href='#{}'>{}</a></li>").format(result.item, result.title) for _, result in results)
    contents = Markup("<nav aria-label='Contents'><ul>{}</ul></nav>").format(links)
    note = Markup("<p>{}</p>").format(why_none) if why_none else ""
    write_text(index, page(title, _joined([note, contents, *sections])))
    return [index, *written, *pictures]


def number_text(value: Number) -> str:
    """Return a cell's text: three digits, or a word; '' for None."""
    if isinstance(value, bool | str):
        return str(value)
    if value is None:
        return ""
    return (
        f"{value:.0f}"
        if value == int(value) or abs(value) >= 1000
        else f"{value:.3g}"
        if abs(value) < 100
        else f"{value:.1f}"
    )


def comparison_table(result: Result, *, join_labels: bool = False) -> Table:
    """Return the comparisons as a table: labels, paper, ours, deviation, kind, and notes.

    join_labels: put the labels into one column, without notes, for a narrow terminal.
    """
    rows: list[Row] = []
    noted = any(comparison.note for comparison in result.comparisons) and not join_labels
    for comparison in result.comparisons:
        difference = comparison.deviation
        if difference is not None:
            words = f"{difference:+.1f} {'points' if comparison.deviation_in == 'points' else '%'}"
        else:
            words = {True: "same", False: "differs", None: ""}[comparison.agrees]
        labels = (", ".join(comparison.labels),) if join_labels else comparison.labels
        rows.append(
            (
                *labels,
                comparison.paper,
                comparison.ours,
                comparison.unit,
                words,
                comparison.how,
                *((comparison.note,) if noted else ()),
            )
        )
    names = (", ".join(result.label_columns),) if join_labels else result.label_columns
    columns = (*names, "paper", "ours", "unit", "deviation", "how", *(("note",) if noted else ()))
    return Table(title=f"{result.title} ({result.source})", columns=columns, rows=tuple(rows))


def _section(result: Result, drawn: Sequence[Captioned]) -> Markup:
    from workbench.plots.export import frames, html_table

    def shown(table: Table) -> Markup:
        return html_table(table.columns, ([number_text(cell) for cell in row] for row in table.rows))

    explained = _joined(Markup("<p>{}</p>").format(line) for line in result.explanation)
    checks = _joined(
        Markup("<li{}>{} {} ({})</li>").format(
            Markup("" if check.holds else " class='warning'"),
            Markup("<b aria-label='{}'>✓</b>" if check.holds else "<b>✗ {}:</b>").format(result.verdict(check)),
            with_capital(check.claim),
            check.found,
        )
        for check in result.checks
    )
    findings = _joined(Markup("<li>{}</li>").format(finding) for finding in result.findings)
    tables = _joined(
        Markup("<details><summary>{}</summary>{}<p>{}</p></details>").format(table.title, shown(table), table.note)
        for table in (*([comparison_table(result)] if result.comparisons else []), *result.tables)
    )
    section = Markup(
        "<h2 id='{0.item}'>{0.title} ({0.source})</h2>\n<p>{place}<a href='{0.item}.json'>JSON</a></p>\n"
        "<ul class='checks'>{checks}</ul>\n<ul>{findings}</ul>\n{frames}\n"
        "<details><summary>How our numbers came about, and why they differ</summary>{explained}"
        "</details>\n{tables}"
    )
    place = f"Section {result.paper_section} of the paper. " if result.paper_section else ""
    return section.format(
        result, place=place, checks=checks, findings=findings, frames=frames(drawn), explained=explained, tables=tables
    )


_joined = Markup("\n").join


QUICK_SEEDS = 1
MOST_SEEDS = 100
MOST_DRAWS = 10_000
QUICK_DRAWS = 2


def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(PAPERS)}, or {COMPARE} for all together. Without a name: a list."),
    ] = None,
    items: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE|FIGURE]...",
            help="Such as table5, 'Table V', fig13 or 'Fig. 13'. Without a name: all that are simulated or computed.",
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also run those that execute and take long.")] = False,
    names: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON and figures (default: figures/reproduce/PAPER).")
    ] = None,
    png: Png = "auto",
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with GLUE's tasks, SQuAD's files or tagged words, for those that execute."),
    ] = None,
    kept: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which results of trainings and of solvers are stored for reuse.", show_default="the cache"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Number of seeds, for those that execute.")] = 3,
    draws: Annotated[
        int, typer.Option(min=1, max=MOST_DRAWS, help="Number of random clusters, for those that use them.")
    ] = DRAWS,
    limit_s: Annotated[
        float, typer.Option("--limit", min=0.1, max=3600, help="Seconds for the solver, for those that have one.")
    ] = LIMIT_S,
    quick: Annotated[bool, typer.Option("--quick", help="Execute with a tiny model, as a test.")] = False,
    as_json: Json = False,
) -> None:
    """Reproduce a paper's tables and figures: its numbers, ours, the deviation and why."""
    if paper is None:
        of_all = {each: items_of(each) for each in (*PAPERS, COMPARE)}
        if as_json:
            print_json({each: _listed(paper_items) for each, paper_items in of_all.items()})
            return
        for each, paper_items in of_all.items():
            _show_list(each, paper_items)
        print_text("Next        workbench reproduce PAPER (all that is simulated or computed), or PAPER and a name")
        return
    items_of_paper = items_of(paper)
    if names:
        if as_json:
            print_json(_listed(items_of_paper))
        else:
            _show_list(paper, items_of_paper)
        return
    if everything and items:
        request = f"--all and {', '.join(items)} were asked for."
        raise ConfigError(request, "--all is everything already.", "Give one or the other.")
    chosen = (
        [find_item(paper, name) for name in items]
        if items
        else [item for item in items_of_paper if everything or item.source != "executed"]
    )
    if not items and not as_json:
        _show_list(paper, items_of_paper)
    folder = Path("figures") / "reproduce" / paper if out is None else out
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"Writing to '{folder}' was asked for.", "It is a file.", "Name a folder.")
    if data is not None and not data.is_dir():
        raise ConfigError(f"The data in '{data}' was asked for.", "There is no such folder.", "Check the path.")
    if kept is not None and kept.exists() and not kept.is_dir():
        raise ConfigError(f"Trainings kept in '{kept}' were asked for.", "It is a file.", "Name a folder.")
    require_writable(None if kept is None else kept / "kept", folder / "index.html")
    # Trained results stay: an interrupted table continues where it was.
    workdir = cache_folder() / "reproduce" / paper if kept is None else kept
    chosen_seeds, trains = tuple(range(QUICK_SEEDS if quick else seeds)), everything or bool(items)
    settings = Settings(
        data=data,
        seeds=chosen_seeds,
        quick=quick,
        workdir=workdir,
        trains=trains,
        draws=QUICK_DRAWS if quick else draws,
        limit_s=limit_s,
        progress=say,
    )
    results: list[tuple[Item, Result]] = []
    failed: list[tuple[Item, WorkbenchError]] = []
    for item in {item.name: item for item in chosen}.values():
        say(f"{item.name}: {item.title} ({item.source})")
        try:
            result = item.run(settings)
            results.append(
                (
                    item,
                    replace(result, environment=_environment(settings))
                    if item.source == "executed" or (item.trains and trains)
                    else result,
                )
            )
        except WorkbenchError as error:
            if len(chosen) == 1:
                raise
            failed.append((item, error))  # the others are still worth having
        else:
            if not as_json:
                show(results[-1][1])
    files = write(
        results,
        folder,
        title="All methods together" if paper == COMPARE else f"{title_of(paper)}: the paper's numbers and ours",
        png=png if png == "auto" else png == "yes",
    )
    if as_json:
        print_json({item.name: _as_json(result) for item, result in results})
    else:
        print_text(f"{len(files)} files; open {files[0]}")
    for item, reason in failed:
        say(f"{item.name}: {reason}")
    if failed:
        raise typer.Exit(1)


def _environment(settings: Settings) -> dict[str, str]:
    """Return what an executed result was measured with."""
    from workbench.profiler.cache import host_fingerprint

    data = "embedded" if settings.data is None else f"'{settings.data.name}', else embedded"
    return host_fingerprint() | {
        "seeds": ", ".join(map(str, settings.seeds)),
        "data": data,
    }


def show(result: Result) -> None:
    """Print a result: comparison, checks, findings, explanation, and the tables behind it."""
    if result.comparisons:
        _show_table(comparison_table(result, join_labels=True))
    for note in dict.fromkeys(comparison.note for comparison in result.comparisons if comparison.note):
        noted = [", ".join(comparison.labels) for comparison in result.comparisons if comparison.note == note]
        print_text(f"{'; '.join(noted)}: {note}")
    for check in result.checks:
        print_text(f"{result.verdict(check)}  {check.claim}: {check.found}")
    for finding in result.findings:
        print_text(f"finding  {finding}")
    print_text()
    for line in result.explanation:
        print_text(f"- {line}")
    print_text()
    for table in result.tables:
        _show_table(table)
        if table.note:
            print_text(f"{table.note}\n")


def _show_table(table: Table) -> None:
    print_table(table.title, table.columns, ([number_text(cell) for cell in row] for row in table.rows))


def _show_list(paper: str, paper_items: tuple[Item, ...]) -> None:
    print_table(
        f"What can be reproduced of {'all methods together' if paper == COMPARE else title_of(paper)} ({paper})",
        ("name", "what", "how"),
        ((item.name, item.title, item.how) for item in paper_items),
    )


def _listed(paper_items: tuple[Item, ...]) -> dict[str, dict[str, object]]:
    return {item.name: {"title": item.title, "source": item.source, "trains": item.trains} for item in paper_items}


def _as_json(result: Result) -> dict[str, object]:
    """Return the result with each comparison's deviation, which follows from its values."""
    built: dict[str, object] = to_builtins(result)
    built["comparisons"] = [
        {**to_builtins(comparison), "deviation": comparison.deviation} for comparison in result.comparisons
    ]
    return built
