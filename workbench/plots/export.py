"""Write a report's figures to a folder: HTML that opens offline, PNG if Chromium is installed, and an index of all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from string import Template
from typing import Literal, NamedTuple

import plotly.graph_objects as go
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from workbench.core.errors import RuntimeSetupError, WriteError
from workbench.core.files import make_folder, missing_folders
from workbench.core.methods import title_of
from workbench.core.report import Report, all_notes, busy_note
from workbench.core.serial import write_text
from workbench.core.summary import headline, summary_rows
from workbench.core.timeline import INVALID_MARK
from workbench.core.units import are_numbers, with_capital
from workbench.plots.breakdown import breakdown
from workbench.plots.gantt import gantt
from workbench.plots.memory import cluster, memory
from workbench.plots.predicted import predicted_against_measured
from workbench.plots.style import CONFIG, DARK_PAGE, dark_css
from workbench.plots.training import curves, epoch_times

PNG_WIDTH, PNG_SCALE, PNG_TIMEOUT_S = 1100, 2, 90
LIBRARY = "plotly.min.js"
INDEX = "index.html"


class Captioned(NamedTuple):
    """A figure with its file name (without ending) and a short caption."""

    name: str
    caption: str
    figure: go.Figure

    @property
    def title(self) -> str:
        """Return the figure's title as plain text."""
        return Markup(self.figure.layout.title.text or self.name).striptags()


def figures(report: Report) -> Iterator[Captioned]:
    """Yield all figures for which a report has data: first results, then the course of the run, then its devices."""
    note = busy_note(report)
    if report.mode == "execute" or report.sweep:
        caption = (
            "Predicted and measured times. On the dashed line the simulator was right; in the band it was within 10 %."
        )
        yield Captioned("predicted_against_measured", caption, predicted_against_measured(report))
    if report.epochs:
        caption = "The time of each epoch."
        if any(epoch.cached for epoch in report.epochs):
            caption += (
                " The first one runs through the backbone and fills the activation cache; later ones train from the "
                "cache alone."
            )
        yield Captioned("epoch_times", caption, epoch_times(report))
    if any(step.loss is not None for step in report.steps) or any(epoch.metrics for epoch in report.epochs):
        caption = "The training loss of every step, and the metrics on the validation split after each epoch."
        yield Captioned("curves", caption, curves(report))
    for name, timeline in report.timelines.items():
        caption = (
            f"{with_capital(name)}: what each device does when, in one step. Wide bars compute. Narrow ones are "
            "messages (green) and"
            " collectives (strong grey). The faintest grey is idle."
        )
        about = note if timeline.source != "simulated" else ""
        yield Captioned(f"gantt-{_slug(name)}", caption, gantt(timeline, note=about))
    if report.timelines:
        caption = (
            "What the time of each device goes to. Waiting for data is what the network costs; idle is the "
            "pipeline's bubble."
        )
        measured = any(timeline.source != "simulated" for timeline in report.timelines.values())
        yield Captioned("breakdown", caption, breakdown(report.timelines, note=note if measured else ""))
    for name, timeline in report.timelines.items():
        if any(timeline.memory):
            caption = f"{with_capital(name)}: the bytes of values that each device holds during the step."
            yield Captioned(f"memory-{_slug(name)}", caption, memory(timeline))
    yield Captioned("cluster", "The devices that the job was planned for, and their links.", cluster(report.cluster))


def write_figures(report: Report, folder: Path | str, png: Literal["auto"] | bool = "auto") -> list[Path]:
    """Write a report's figures under `folder` and return the files, the index first.

    HTML files share one plotly.min.js in the same folder, so they open without network.  png: 'auto' writes PNG files
    if Chromium is installed, otherwise the index says that there are none; True raises RuntimeSetupError instead; False
    writes none.
    Raises WriteError if the system refuses a file, such as on a full disk; then no new file or folder is left.
    """
    folder = Path(folder)
    with _whole_or_none(folder) as new:
        drawn, index = list(figures(report)), folder / INDEX
        pages = [folder / f"{name}.html" for name, _, _ in drawn]
        new += [path for path in (*pages, folder / LIBRARY, index) if not path.exists()]
        written = [write_html(figure, path) for path, (_, _, figure) in zip(pages, drawn, strict=True)]
        pictures, why_none = write_pngs(drawn, folder, png)
        write_text(index, _index(report, drawn, why_none))
    return [index, *written, *pictures]


@contextlib.contextmanager
def _whole_or_none(folder: Path) -> Iterator[list[Path]]:
    """Make a folder, and yield a list of the files that are to be new in it.  If the block cannot write, remove them,
    and the folder if it was not there.
    """
    new_folders = missing_folders(folder)
    make_folder(folder)
    new: list[Path] = []
    try:
        yield new
    except WriteError:
        for path in new:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something else is in it
            for place in new_folders:
                place.rmdir()
        raise


def write_html(figure: go.Figure, path: Path) -> Path:
    """Write a figure as a page that opens without network, next to the plotly.min.js that all pages of its folder
    share.
    """
    dark = DARK_PAGE(f"body {{ background: #121212; }} {dark_css('.js-plotly-plot')}")
    style = f"<style>:root {{ color-scheme: light dark; }} {dark}</style></head>"
    write_text(path, figure.to_html(include_plotlyjs="directory", config=CONFIG).replace("</head>", style, 1))
    library = path.with_name(LIBRARY)
    if not library.exists():
        write_text(library, get_plotlyjs())
    return path


def browser_path() -> str | None:
    """Return the path of the Chromium that draws PNG files, None if there is none."""
    from choreographer.browsers.chromium import Chromium

    browser = Chromium.find_browser(skip_local=False)
    return str(browser) if browser and Path(browser).is_file() else None


def write_pngs(drawn: Iterable[Captioned], folder: Path, png: Literal["auto"] | bool) -> tuple[list[Path], str]:
    """Draw figures with kaleido; return the files, and the reason if there are none (else '').  png: see
    write_figures.
    """
    if not png:
        return [], ""
    by_path = {folder / f"{name}.png": figure for name, _, figure in drawn}
    why_none = "" if browser_path() else "No Chromium was found on this machine, so no PNG files were written."
    if not why_none:
        import kaleido

        jobs = [
            {
                "fig": figure.to_dict(),
                "path": str(path),
                "opts": {"width": PNG_WIDTH, "height": figure.layout.height, "scale": PNG_SCALE},
            }
            for path, figure in by_path.items()
        ]
        try:
            # mathjax would be fetched from the network; none of our titles needs it.
            kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False, "timeout": PNG_TIMEOUT_S})
        except Exception as error:  # a browser may fail in any way: the HTML files exist, and PNG is an extra
            why_none = (
                f"The Chromium found could not draw ({type(error).__name__}: "
                f"{(str(error).splitlines() or ['no message'])[0]})."
            )
    if why_none and png is True:
        raise RuntimeSetupError(
            "PNG figures were asked for.", why_none, "Install Chromium, or set BROWSER_PATH to one."
        )
    return [] if why_none else [path for path in by_path if path.exists()], why_none


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:64] or "timeline"


def _index(report: Report, drawn: list[Captioned], why_none: str) -> str:
    notes = [note for note in dict.fromkeys((*all_notes(report), why_none)) if note]
    job, devices = report.job, ", ".join(report.cluster.names)
    training = f", {job.epochs} epochs, batch {job.batch_size}" if report.plan.inference is None else ""
    facts = [("Job", f"{job.method}: {job.model} on {job.task}{training}, seed {job.seed}"), ("Numbers", report.label)]
    facts += [("Cluster", f"{report.cluster.name}: {devices}"), *summary_rows(report)]
    rows = Markup("\n").join(Markup("<tr><th>{}</th><td>{}</td></tr>").format(*fact) for fact in facts)
    # A note explains; only that the numbers mean little is a warning.
    warnings = [note for note in notes if note.startswith(INVALID_MARK)]
    parts = [Markup("<p class='headline'>{}</p>").format(headline(report))] if report.steps else []
    parts += [Markup("<p class='warning'>{}</p>").format(note) for note in warnings]
    parts += [contents(drawn), Markup("<table>\n{}\n</table>").format(rows)]
    if others := [note for note in notes if note not in warnings]:
        items = Markup("").join(Markup("<li>{}</li>").format(note) for note in others)
        parts.append(Markup("<details><summary>Notes ({})</summary><ul>{}</ul></details>").format(len(others), items))
    return page(
        f"{title_of(job.method)} on {report.cluster.name} ({report.label})", Markup("\n").join([*parts, frames(drawn)])
    )


def contents(drawn: Iterable[Captioned]) -> Markup:
    """Return a page's list of contents: a link to each figure, by its title."""
    links = (Markup("<li><a href='#{}'>{}</a></li>").format(figure.name, figure.title) for figure in drawn)
    return Markup("<nav aria-label='Contents'><ul>{}</ul></nav>").format(Markup("").join(links))


def html_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Markup:
    """Return a page's table.  Columns of words have the class 'words'.  A cell that is Markup stays as it is."""
    cells = [list(row) for row in rows]
    looks = [Markup("" if are_numbers(map(str, column)) else " class='words'") for column in zip(*cells, strict=True)]

    def line(opening: str, tag: str, row: Sequence[object]) -> Markup:
        parts = (
            Markup("<{}{}>{}</{}>").format(Markup(opening), look, cell, tag)
            for cell, look in zip(row, looks or [Markup("")] * len(row), strict=True)
        )
        return Markup("<tr>{}</tr>").format(Markup("").join(parts))

    body = Markup("\n").join(line("td", "td", row) for row in cells)
    head = line("th scope='col'", "th", columns)
    return Markup("<table><thead>{}</thead><tbody>{}</tbody></table>").format(head, body)


def frames(drawn: Iterable[Captioned]) -> Markup:
    """Return a page's frames, one for each figure's file."""
    frame = Markup(
        "<figure id='{name}'><figcaption>{caption} <a href='{name}.html' aria-label='{title} on a page of its "
        "own'>Open alone</a>"
        "</figcaption><iframe src='{name}.html' title='{title}' loading='lazy' scrolling='no' "
        "style='height:{height}px'></iframe></figure>"
    )
    return Markup("\n").join(
        frame.format(
            name=shown.name, caption=shown.caption, title=shown.title, height=int(shown.figure.layout.height) + 16
        )
        for shown in drawn
    )


def page(title: str, body: Markup) -> Markup:
    """Return a whole page with a title and the common style."""
    return Markup(
        Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8")).substitute(
            title=escape(title), body=body, figures=DARK_PAGE(dark_css(".js-plotly-plot"))
        )
    )
