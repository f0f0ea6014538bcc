"""Colours, units and titles shared by all figures: Okabe-Ito's colour-blind safe palette, and a label for the kind of
numbers.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.io import templates

from workbench.core.catalogue import data_folder
from workbench.core.schedule import NONE, Op
from workbench.core.serial import read_toml
from workbench.core.spread import Spread
from workbench.core.timeline import INVALID_MARK
from workbench.core.units import three_figures

# Okabe and Ito, 'Color Universal Design' (2008).
BLACK, ORANGE, SKY_BLUE, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
PALE_GREEN, DARK_GREY, GREY, MID_GREY, LIGHT_GREY = "#86D0BA", "#4D4D4D", "#999999", "#C4C4C4", "#E8E8E8"
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
CYCLE = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY_BLUE, BLACK)

DOTTED = {"color": DARK_GREY, "width": 1, "dash": "dot"}
"""A line that a figure compares with, or a border."""
INSIDE = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
"""Properties of a trace of bars: its text is inside, upright."""
LEGEND_BELOW = {"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0, "traceorder": "normal"}

LEGEND_LINE_PIXELS, LEGEND_MARK_PIXELS, CHARACTER_PIXELS = 620, 50, 7.5
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
"""Notebooks have the same, so figures and tables look alike."""

OPERATIONS = read_toml(data_folder() / "operations.toml")
"""Words and colours for classes of operations, in the order of the legend; words for values."""
COLOURS: dict[str, str] = {name: globals()[colour] for name, colour in OPERATIONS["colours"].items()}

PATTERNS: dict[str, dict[str, Any]] = {
    "waiting for data": {"shape": "/", "fgcolor": GREY, "bgcolor": LIGHT_GREY, "size": 6}
}
RESTING = ("waiting for data", "idle")
"""A device that does not compute is grey in all figures; hatched while it waits for data."""
LEGEND_RANK = {name: 1 + index for index, name in enumerate(COLOURS)}
CLASS_OF_KIND = {kind: name for name, kinds in OPERATIONS["classes"].items() for kind in kinds}

TILED = frozenset({"ENTER", "QKV", "UP", "CQ", "CKV", "ATT", "CATT", "OUT", "DOWN", "COUT", "ADD", "CONN"})
"""Operations on tiles of one sequence: they are labelled with their part, the tile, and not with a micro-batch."""

MODE_BAR = {
    "orientation": "v",  # along the right edge it keeps the end of a long title visible
    "bgcolor": "rgba(255,255,255,0)",
    # Only download as a picture, zoom and reset remain: selections have no function here, and nothing is
    # uploaded.
    "remove": ["sendChartToCloud", "select2d", "lasso2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
}
"""The buttons of every figure, notebooks and exported pages alike."""
TITLE_CHARACTERS, NOTE_CHARACTERS, SUBTITLE_CHARACTERS = 52, 68, 78
"""Maximum length of a line, so that a page of 640 pixels (or of 1280 at 200 %) shows all of it."""
BREAK = " <br>"
"""Between the lines of a long text.  Without the tag, as where HTML breaks lines itself, a blank is left."""
templates["workbench"] = go.layout.Template(layout={axis: {"zeroline": False} for axis in ("xaxis", "yaxis")})
CONFIG = {"displaylogo": False, "displayModeBar": "hover", "responsive": True}
"""Plotly's settings that do not travel with a figure: whoever shows one passes them on."""


@cache
def notebook_renderers() -> Any:
    """Return plotly's renderers, by name, with our settings of those for notebooks.

    Plotly imports nbformat for them, which takes 1.3 s: of all processes, only those that show figures need it.
    """
    from plotly.io import renderers

    for name in ("plotly_mimetype", "notebook"):
        renderers[name].config.update(CONFIG)
    # JupyterLab fits a figure to its cell itself.  If plotly did, too, a smaller window would leave 15 pixels of it.
    renderers["plotly_mimetype"].config["responsive"] = False
    return renderers


if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
    notebook_renderers()  # a notebook shows a figure without asking us


def dark_css(scope: str) -> str:
    """Return the style of figures on a dark page: colours keep their hue, black, white and grey change (see dark.css).

    scope: the selector of a figure's element on a dark page.
    """
    return Path(__file__).with_name("dark.css").read_text(encoding="utf-8").replace("FIGURE", scope)


DARK_PAGE = "@media (prefers-color-scheme: dark) {{ {} }}".format
"""A style for readers whose system is dark."""

MAX_DEVICES = 64  # more rows cannot be distinguished on a screen


def text_on(colour: str) -> str:
    """Return the colour of text on a colour of this palette."""
    return "white" if colour in (BLACK, BLUE, GREEN, VERMILLION, DARK_GREY) else "black"


def class_of(op: Op) -> str:
    """Return the class of an operation; kinds that only one method has are 'other compute'."""
    return CLASS_OF_KIND.get(op.kind, "other compute")


def number_of(op: Op) -> str:
    """Return the number written on an operation's bar: its tile or its micro-batch; '' if it has none."""
    number = op.part if op.kind in TILED else op.microbatch
    return "" if number == NONE else str(number)


class Unit(NamedTuple):
    """A unit for seconds or bytes in a figure: shown = value * factor."""

    name: str
    factor: float

    def text(self, value: float) -> str:
        """Return a value with its unit, to three significant digits or as a whole number."""
        return f"{three_figures(value * self.factor)} {self.name}"


def time_unit(longest_s: float) -> Unit:
    """Return the unit that suits durations up to longest_s."""
    if longest_s < 1e-3:
        return Unit("µs", 1e6)
    return Unit("ms", 1e3) if longest_s < 2.0 else Unit("s", 1.0)


def byte_unit(most: float) -> Unit:
    """Return the unit that suits sizes up to `most` bytes."""
    for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if most >= 2 * size:
            return Unit(name, 1 / size)
    return Unit("B", 1.0)


def time_words(seconds: float) -> str:
    """Return a duration with its unit."""
    return time_unit(seconds).text(seconds)


def evenly_spaced(world_size: int, limit: int = MAX_DEVICES) -> tuple[int, ...]:
    """Return the ranks that a figure draws: all, or `limit` of them, evenly spaced with both ends."""
    if world_size <= limit:
        return tuple(range(world_size))
    return tuple(round(index * (world_size - 1) / (limit - 1)) for index in range(limit))


def rows_for(names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a y axis with a row for each name, the first at the top."""
    count = len(names)
    return {"tickvals": list(range(count)), "ticktext": [f"{name} " for name in names], "range": [count - 0.5, -0.5]}


def whole_ticks(most: int) -> dict[str, Any]:
    """Return the settings of an axis that counts up to `most`: all ticks are whole numbers."""
    return {"dtick": 1} if most <= 8 else {}


def panel_of_bars(
    figure: go.Figure,
    values: Sequence[float],
    texts: Sequence[str],
    colours: Sequence[str],
    hovers: Sequence[str],
    **place: Any,
) -> None:
    """Draw one panel of a figure with a row for each device (see rows_for): a bar for each value, with its text and its
    hover.

    place: row and col, and a name of the values.
    """
    figure.add_bar(
        orientation="h",
        y=list(range(len(values))),
        x=values,
        width=0.75,
        text=texts,
        textposition="auto",
        textangle=0,
        insidetextfont={"color": [text_on(colour) for colour in colours]},
        marker={"color": colours},
        hovertext=hovers,
        showlegend=False,
        **place,
    )
    figure.update_xaxes(range=[0, max(values, default=0) * 1.12 or 1], nticks=5, row=place["row"], col=place["col"])


def error_bars(spreads: Sequence[Spread], **more: Any) -> dict[str, Any]:
    """Return the error bars of a trace, around the medians of its spreads.  more: plotly's further settings."""
    high, low = [spread.high - spread.median for spread in spreads], [spread.median - spread.low for spread in spreads]
    return {"type": "data", "symmetric": False, "array": high, "arrayminus": low, "thickness": 1.5, "width": 4, **more}


def more_devices(world_size: int, shown: int) -> str:
    """Return the words that follow a subtitle if a figure does not show all devices, else ''."""
    return f"; {shown} of {world_size:,} devices shown" if world_size > shown else ""


def mark_of(note: str) -> str:
    """Return the mark for each measured number of a figure with such a note (see busy_note)."""
    return f" {INVALID_MARK}" if note.startswith(INVALID_MARK) else ""


_FOREIGN_TAG = re.compile(r"<(?!/?(?:b|br|sub|sup|extra)>)")


def only_our_tags(text: str) -> str:
    """Return text that keeps only the tags of our titles and hovers; tags in a name, an error or a metric become plain
    text.
    """
    return _FOREIGN_TAG.sub("&lt;", text)


def _with_only_our_tags(value: Any) -> Any:
    """Return a figure's value with its texts escaped this way; the same object if nothing changes."""
    if isinstance(value, str):
        return only_our_tags(value)
    if not isinstance(value, dict | list | tuple):
        return value
    entries = value if isinstance(value, dict) else dict(enumerate(value))
    checked = {key: _with_only_our_tags(child) for key, child in entries.items()}
    if all(checked[key] is entries[key] for key in entries):
        return value
    return checked if isinstance(value, dict) else [*checked.values()]


def _not_numbers(figure: go.Figure) -> dict[str, int]:
    """Return how many values of each trace are NaN or infinite; None is an intended gap."""
    lost: dict[str, int] = {}
    for trace in figure.data:
        values = [value for axis in ("x", "y") if axis in trace and trace[axis] is not None for value in trace[axis]]
        if count := sum(isinstance(value, float) and not math.isfinite(value) for value in values):
            lost[trace.name or trace.type] = lost.get(trace.name or trace.type, 0) + count
    return lost


def _in_lines(text: str, characters: int) -> str:
    """Return a text whose lines are at most so long, and that keeps its own lines."""
    return BREAK.join(part for line in text.split("<br>") for part in wrap(line, characters))


def finish(
    figure: go.Figure, *, title: str, label: str, subtitle: str = "", note: str = "", height: int = 420, **layout: Any
) -> go.Figure:
    """Give a figure its title with the kind of its numbers, a visible note, and the common style; return it.

    A legend is under the axes.  layout: plotly's further settings.  NaN and infinite values are not drawn: a second
    note says how many, and of which trace.  A trace with hovertext shows that alone.
    """
    in_legend = [trace.name for trace in figure.data if trace.name and trace.showlegend is not False]
    has_legend = len(in_legend) > 1 or any(trace.showlegend for trace in figure.data)
    # A legend of one line leaves no empty band above it.
    one_line = sum(LEGEND_MARK_PIXELS + CHARACTER_PIXELS * len(name) for name in in_legend) < LEGEND_LINE_PIXELS
    legend_pixels = (82 if one_line else 100) if has_legend else 0
    lost = ", ".join(f"{count} of '{name}'" for name, count in _not_numbers(figure).items())
    notes = [note, f"{INVALID_MARK} Not drawn, because they are no numbers: {lost}" if lost else ""]
    lines = [f"<b>{_in_lines(line, NOTE_CHARACTERS)}</b>" for line in notes if line]
    if subtitle:
        lines.append(_in_lines(subtitle, SUBTITLE_CHARACTERS))
    parts = [title] if len(title) <= TITLE_CHARACTERS else title.replace(": ", ":\n", 1).splitlines()
    head = f"<b>{BREAK.join(line for part in parts for line in wrap(part, TITLE_CHARACTERS))}</b>"
    if label:
        head += f"{' ' if len(title) + len(label) < TITLE_CHARACTERS else BREAK}({label})"
    # Further lines move the axes down; their height stays.
    more_pixels = 21 * head.count(BREAK) + 16 * max(0, "<br>".join(lines).count("<br>") - 1)
    margin = {"l": 20, "r": 45, "t": 92 if len(lines) > 1 else 76, "b": legend_pixels or 50} | layout.pop("margin", {})
    margin["t"] += more_pixels
    height += more_pixels
    figure.update_layout(
        template="plotly_white+workbench",
        title={
            "text": head,
            "x": 0.01,
            "xanchor": "left",
            "yref": "container",
            "y": 1 - 18 / height,
            "yanchor": "top",
            "font": {"size": 17, "color": BLACK},
            "subtitle": {
                "text": "<br>".join(lines),
                "font": {"size": 12.5, "color": VERMILLION if any(notes) else DARK_GREY},
            },
        },
        height=height,
        modebar=MODE_BAR,
        margin=margin,
        font={"family": FONT, "size": 12, "color": BLACK},
        legend={"title": {"text": ""}} | LEGEND_BELOW,
        hoverlabel={"namelength": -1},
    )
    figure.update_layout(**layout)
    for trace in figure.data:
        if "hovertext" in trace and trace.hovertext is not None and trace.hovertemplate is None:
            trace.hovertemplate = "%{hovertext}<extra></extra>"
    # Plotly reads tags in every text that it shows, and any text may contain a name from a cluster's or a report's
    # file.
    for part in (figure.layout, *figure.data):
        properties = part.to_plotly_json()
        safe = _with_only_our_tags(properties)
        part.update({key: value for key, value in safe.items() if value is not properties[key]}, overwrite=True)
    return figure


def on_second_axis(figure: go.Figure, numbers: Iterable[int], *, title: str, **axis: Any) -> None:
    """Move some traces of a finished figure, by their numbers, to a second vertical axis, on the right."""
    for number in numbers:
        figure.data[number].yaxis = "y2"
    # Plotly would place the ticks next to those of the left axis, at numbers such as 0.247 and 0.494.
    look = {"overlaying": "y", "side": "right", "showgrid": False, "nticks": 6, "tickmode": "auto"}
    figure.update_layout(yaxis2={"title": {"text": only_our_tags(title)}, **look, **axis}, margin_r=70)


def not_recorded(title: str, note: str) -> go.Figure:
    """Return the figure of a measured step that was done before the devices changed: its spans were lost with them."""
    return empty(
        title=title, label="", why="This step was done before the devices changed; its times are not kept.", note=note
    )


def empty(*, why: str, **words: str) -> go.Figure:
    """Return a figure that says why there is nothing to draw.  words: title, label and note, see finish."""
    figure = go.Figure()
    figure.add_annotation(
        text=why, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14, "color": DARK_GREY}
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return finish(figure, title=words["title"], label=words["label"], note=words.get("note", ""), height=260)
