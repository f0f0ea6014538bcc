"""The page that compares Reports: tabs, bars with their values, and the settings that differ."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any
from urllib.parse import quote

from workbench.core.report import Report
from workbench.core.serial import write_text
from workbench.core.spread import Spread
from workbench.core.timeline import INVALID_MARK
from workbench.core.units import counted, with_capital
from workbench.runs.comparison import Side, plain_number, quantity, quantity_words, table, words_of


def write_page(compared: Sequence[Side], path: Path | str) -> Path:
    """Write a comparison as one HTML page that opens offline, and return its path, which gets the ending .html if it
    has none.

    Simulated, emulated and real numbers have a tab each.  A tab has a table, a file to download, and a figure for each
    result.
    """
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    from workbench.plots.export import page

    path = Path(path)
    path = path if path.suffix else path.with_suffix(".html")
    origins: dict[str, list[Side]] = {}
    for side in compared:
        origins.setdefault(side.label, []).append(side)
    tabs, panels, rules = [], [], []
    for number, (label, group) in enumerate(origins.items()):
        tab = "<input type='radio' name='origin' id='tab{0}'{1}><label for='tab{0}'>{2} ({3})</label>"
        tabs.append(Markup(tab).format(number, Markup("" if number else " checked"), label, len(group)))
        panel = _panel([side.without("label") for side in group], f"t{number}-")
        panels.append(Markup("<section id='panel{}' aria-label='{}'>{}</section>").format(number, label, panel))
        rules.append(f"#tab{number}:checked~#panel{number}{{visibility:visible;height:auto}}")
    settings = list(dict.fromkeys(name for side in compared for name in side.settings if name != "label"))
    named = ", ".join(map(quantity_words, settings))
    differ = f"The settings that differ: {named}." if settings else "All runs have the same settings."
    body = Markup("<p>{}</p><style>{}{}</style><script>{}</script>{}{}").format(
        differ,
        Markup(_LOOK),
        Markup("".join(rules)),
        Markup(get_plotlyjs()),
        Markup("").join(tabs),
        Markup("").join(panels),
    )
    num_runs = sum(len(side.files) for side in compared)
    write_text(path, page(f"{counted(num_runs, 'run')} compared", body))
    return path


# A hidden tab keeps its width: plotly would draw into none otherwise.
_LOOK = (
    "body{max-width:none} section{visibility:hidden;height:0;overflow:hidden;margin-top:1em} "
    "input[name=origin]{position:absolute;opacity:0} "
    "input[name=origin]+label{display:inline-block;padding:.4em 1.1em;border:1px solid var(--line);cursor:pointer;"
    "border-radius:7px 7px 0 0;color:var(--quiet)} "
    "input[name=origin]:checked+label{color:var(--text);font-weight:bold;box-shadow:inset 0 3px #0072B2} "
    "input[name=origin]:focus-visible+label{outline:2px solid #56B4E9;outline-offset:2px} "
    ".sides{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(30em,100%),1fr))} figure{min-width:0} "
    "figure:last-child{grid-column:1/-1}"
    "td,th{text-align:right} td.words,th.words{text-align:left}"
)


def _panel(compared: Sequence[Side], prefix: str) -> Any:
    """Return one tab's contents: a list of its figures, its table, a link to the table as CSV, the figures.  prefix: of
    its names.
    """
    from markupsafe import Markup

    from workbench.plots.export import Captioned, contents, html_table
    from workbench.plots.style import CONFIG

    heads, rows = table(compared)
    text = io.StringIO()
    csv.writer(text).writerows([heads, *rows])
    link = Markup(
        "<p><a download='comparison.csv' href='data:text/csv;charset=utf-8,{}'>Download the table as CSV</a></p>"
    )
    drawn = [Captioned(f"{prefix}{index}", "", figure) for index, figure in enumerate(figures(compared))]
    shown = Markup("").join(
        Markup("<figure id='{}'>{}</figure>").format(
            name, Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))
        )
        for name, _, figure in drawn
    )
    return Markup("{}{}{}<div class='sides'>{}</div>").format(
        contents(drawn), html_table(heads, rows), link.format(quote(text.getvalue())), shown
    )


LOWER_IS_BETTER = ("_s", " s", "_bytes", "loss", "error", "differ")
"""Endings of the names of results; of all others the higher is better."""


def better(name: str) -> str:
    """Return which direction is better for a result, in words."""
    is_rate = name.endswith(("per_s", "per s"))
    return "lower is better" if name.endswith(LOWER_IS_BETTER) and not is_rate else "higher is better"


def figures(compared: Sequence[Side]) -> list[Any]:
    """Return a plotly figure for each result that a side has, and one of the losses and metrics while it trained.

    The horizontal axis is the bandwidth, or else the last numeric setting that differs.  The other settings that differ
    name the series.
    A result that only one of several sides has is left to the table.
    """
    from workbench.plots import compared_bars, overlay

    keys = list(dict.fromkeys(name for side in compared for name in side.settings))
    numbers = [name for name in keys if all(isinstance(side.settings.get(name), Real) for side in compared)]
    axis = "bandwidth" if "bandwidth" in numbers else numbers[-1] if numbers else None
    label = ", ".join(dict.fromkeys(side.label for side in compared))
    note = (
        ""
        if all(side.is_valid for side in compared)
        else f"{INVALID_MARK} Host too busy in some of these runs: their times mean little."
    )
    drawn = []
    plain = "default settings" if len(keys) > 1 else "all runs"

    def series_of(side: Side) -> str:
        return words_of(side.without(axis).settings) or plain if axis else ""

    all_series = [series_of(side) for side in compared]  # each series has the same colour in all figures
    for name in dict.fromkeys(name for side in compared for name in side.results):
        having = [side for side in compared if name in side.results]
        if len(having) == 1 < len(compared):
            continue
        quantity_name, factor, unit = quantity(name)
        series_values: dict[str, dict[str, Spread]] = {series: {} for series in all_series}
        for side in sorted(having, key=lambda side: side.settings.get(axis, 0) if axis else 0):
            mean, deviation, _ = side.results[name]
            x = side.name if axis is None else f"{side.settings[axis]:g}"
            series = series_of(side)
            series_values[series][x] = Spread(mean, mean - deviation, mean + deviation).scaled(factor)
        x_title = {"bandwidth": "links (Mbit/s)", None: ""}.get(axis, quantity_words(axis or ""))
        words = {"title": with_capital(quantity_name), "label": label, "subtitle": better(name), "note": note}
        figure = compared_bars(series_values, x_title=x_title, unit=unit or name, **words)
        for bar in figure.data:
            bar.update(text=[plain_number(value) for value in bar.y], textposition="outside", cliponaxis=False)
        if len({x for points in series_values.values() for x in points}) * len(series_values) <= 6:
            figure.update_layout(bargap=0.7)  # few bars stay narrow
        drawn.append(figure)
    trainings = {side.name: [Report.read(file) for file in side.files] for side in compared}
    has_losses = any(
        step.loss is not None for reports in trainings.values() for report in reports for step in report.steps
    )
    return [*drawn, overlay(trainings)] if has_losses else drawn
