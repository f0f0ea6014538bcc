"""The item and the picture of boards.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log2
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import DOTTED, finish
from workbench_studies.papers.compare.boards import (
    COUNTS,
    MBIT_PER_S,
    MODELS,
    TASKS,
    TOKENS,
    WIRELESS_UP_TO,
    Point,
    points,
)
from workbench_studies.papers.items import COMPARE, Item
from workbench_studies.papers.result import Number, Record, Result, Row, Settings, Table, shipped_result

LETTERS = {"compute": "C", "bubble": "W", "bandwidth": "B", "latency": "L"}
TITLES = {
    "train": "train",
    "prefill": "a sequence",
    "decode": "a token",
}
TOGETHER = "only together"
SCALE = [[0, "#E58A57"], [0.5, "#F2F2F2"], [1, "#5BA3D0"]]
MARGIN = 1.2
INK = "#111111"
"""Colour of text on the filled panels, which keep their colours on a dark page."""
WORLD = {2: "two boards", 4: "four boards"}


def boards(item: Item, settings: Settings) -> Result:
    """Simulate every point."""
    models = MODELS[:1] if settings.quick else MODELS
    shown = [point for point in points(settings.progress, models) if point.seconds or point.alone_s]
    rates = {place: _break_even(shown, *place) for place in product(TASKS, COUNTS)}
    small = [point for point in shown if point.task == "train" and point.count == 2 and point.model == MODELS[0]]
    rows: list[Row] = [_row(point) for point in shown]
    together = sorted({point.model for point in shown if point.alone_s is None and point.seconds is not None})
    return item.result(
        tables={
            "points": rows,
            "even": [
                (task, model, *(rates[task, count].get(model) for count in COUNTS))
                for task in TASKS
                for model in models
                if model in rates[task, COUNTS[0]]
            ],
        },
        holds={
            "wifi": not all((point.speedup or 0) > 1 for point in small),
            "decode": all(_least(rates["decode", count]) >= _least(rates["train", count]) for count in COUNTS),
        },
        slow=min((point.speedup or 0) for point in small),
        rate=small[0].mbit_per_s,
        together=", ".join(together) or "none",
        decode=_least(rates["decode", 2]),
        train=_least(rates["train", 2]),
    )


def _least(rates: dict[str, Number]) -> float:
    """Return the slowest link on which any model gains."""
    return min((float(rate) for rate in rates.values() if isinstance(rate, int | float)), default=float("inf"))


def _break_even(shown: Sequence[Point], task: str, count: int) -> dict[str, Number]:
    """Return the slowest link on which the boards beat one, by model; 'only together', or 'never'."""
    rates: dict[str, Number] = {}
    for model in dict.fromkeys(point.model for point in shown):
        of_model = [point for point in shown if (point.task, point.count, point.model) == (task, count, model)]
        faster = [point.mbit_per_s for point in of_model if (point.speedup or 0) > 1]
        if of_model and of_model[0].alone_s is None:
            rates[model] = TOGETHER
        elif of_model:
            rates[model] = float(min(faster)) if faster else "never"
    return rates


def _row(point: Point) -> Row:
    return (
        point.task,
        point.model,
        float(point.parameters),
        float(point.count),
        float(point.mbit_per_s),
        point.way,
        point.seconds,
        point.alone_s,
        point.speedup,
        point.term,
    )


def draw_boards(result: Result) -> go.Figure:
    """Return the picture, with the points that were executed if their result ships."""
    executed = shipped_result(COMPARE, "boards-executed")
    return figure(result.tables[0], executed.tables[0] if executed else None)


def figure(table: Table, executed: Table | None = None) -> go.Figure:
    """Return a panel for each task and number of boards.

    table: the result's points.  executed: points of boards_executed.py.
    """
    executed_rows, rows = [] if executed is None else executed.records, table.records
    panels = list(product(COUNTS, TASKS))
    drawn = make_subplots(
        rows=len(COUNTS),
        cols=len(TASKS),
        shared_xaxes=True,
        shared_yaxes=True,
        horizontal_spacing=0.02,
        vertical_spacing=0.09,
        subplot_titles=[f"{WORLD[count]}: {TITLES[task]}" for count, task in panels],
    )
    models = list(dict.fromkeys((row["model"], row["parameters"]) for row in rows))
    for number, (count, task) in enumerate(panels):
        panel_rows = [row for row in rows if (row["boards"], row["task"]) == (count, task)]
        place: Any = {"row": number // len(TASKS) + 1, "col": number % len(TASKS) + 1}
        drawn.add_traces(_panel(panel_rows, models, is_first=number == 0), rows=place["row"], cols=place["col"])
        sizes = dict(models)
        in_panel = [
            (row, sizes[row["model"]])
            for row in executed_rows
            if (row["boards"], row["task"], row["in pace"]) == (count, task, "yes")
        ]
        if in_panel:
            drawn.add_trace(_executed(in_panel), row=place["row"], col=place["col"])
        drawn.add_vline(x=(WIRELESS_UP_TO * 500) ** 0.5, line=DOTTED, **place)
    drawn.update_xaxes(
        type="log",
        tickvals=MBIT_PER_S,
        ticktext=["20", "50", "100", "200", "500", "1k", "2.5k"],
        tickfont={"size": 10},
        tickangle=0,
    )
    drawn.update_xaxes(range=[1.18, 3.5], title_text="Mbit/s", row=len(COUNTS))
    drawn.update_xaxes(range=[1.18, 3.5])
    ticks = {"tickvals": [size for _, size in models], "ticktext": [name for name, _ in models]}
    drawn.update_yaxes(type="log", range=[7.2, 10.0], **ticks)
    drawn.update_annotations(font_size=12.5)
    return finish(
        drawn,
        title="When do two or four boards beat one?",
        label="simulated; circles executed" if executed else "simulated",
        subtitle=f"Seconds on one Raspberry Pi 5 over the best of all methods on several, {TOKENS} tokens. Black: "
        "break-even.<br>What decides: C computing, B bytes on the links, L their latency, W waiting for others.<br>"
        "Green: one board has too little memory. Left of the dots: Wi-Fi."
        + (" A circle has the colour of an executed point." if executed else ""),
        height=700,
        margin={"l": 20, "r": 20, "t": 150, "b": 50},
    )


def _panel(panel_rows: Sequence[Record], models: Sequence[tuple[str, float]], *, is_first: bool) -> list[Any]:
    speedups = {(row["model"], row["Mbit/s"]): row["speedup"] for row in panel_rows}
    z = [[_log(speedups.get((name, rate))) for rate in MBIT_PER_S] for name, _ in models]
    z = [[row[0], *row, row[-1]] for row in (z[0], *z, z[-1])]  # a margin, on which the letters of the edge stand
    sizes = [size for _, size in models]
    x = [MBIT_PER_S[0] / MARGIN, *MBIT_PER_S, MBIT_PER_S[-1] * MARGIN]
    y = [sizes[0] / MARGIN, *sizes, sizes[-1] * MARGIN]
    shared: dict[str, Any] = {"x": x, "y": y, "z": z, "hoverinfo": "skip"}
    bar = {"title": {"text": "times"}, "tickvals": [-2, -1, 0, 1, 2], "ticktext": ["¼", "½", "1", "2", "4"], "len": 0.9}
    fill = go.Contour(
        **shared,
        zmin=-2,
        zmax=2,
        colorscale=SCALE,
        showscale=is_first,
        colorbar=bar,
        contours={"start": -2, "end": 2, "size": 0.25, "coloring": "heatmap", "showlines": False},
    )
    line = go.Contour(
        **shared,
        showscale=False,
        line={"color": INK, "width": 2.5},
        contours={"type": "constraint", "operation": "=", "value": 0},
        showlegend=False,
    )
    shown_rows = [row for row in panel_rows if row["s"] is not None]
    letters = go.Scatter(
        x=[row["Mbit/s"] for row in shown_rows],
        y=[row["parameters"] for row in shown_rows],
        text=[LETTERS[row["decides"]] for row in shown_rows],
        mode="text",
        cliponaxis=False,
        textfont={"size": 11, "color": ["#009E73" if row["s on one board"] is None else INK for row in shown_rows]},
        hovertext=[_words(row) for row in shown_rows],
        showlegend=False,
    )
    return [fill, line, letters]


def _executed(rows: Sequence[tuple[Record, float]]) -> go.Scatter:
    """Return a panel's executed points, coloured by the simulated ones' scale.  rows: each with its model's size."""
    return go.Scatter(
        x=[row["Mbit/s"] for row, _ in rows],
        y=[size for _, size in rows],
        mode="markers+text",
        marker={
            "size": 20,
            "color": [_log(row["speedup, executed"]) for row, _ in rows],
            "colorscale": SCALE,
            "cmin": -2,
            "cmax": 2,
            "line": {"width": 1.5, "color": INK},
        },
        text=[f"{row['speedup, executed']:.1f}" for row, _ in rows],
        textfont={"size": 9, "color": INK},
        cliponaxis=False,
        hovertext=[
            f"{row['model']}, {row['Mbit/s']:.0f} Mbit/s, executed: {row['speedup, executed']:.2f} times as fast as "
            f"one; the same simulated: {row['speedup, simulated']:.2f}"
            for row, _ in rows
        ],
        showlegend=False,
    )


def _log(value: float | None) -> float | None:
    return None if value is None else log2(value)


def _words(row: Record) -> str:
    gain = "one board has too little memory" if row["speedup"] is None else f"{row['speedup']:.2f} times as fast as one"
    return f"{row['model']}, {row['Mbit/s']:.0f} Mbit/s: {row['best way']}, {row['s']:.3g} s, {gain}; {row['decides']}"
