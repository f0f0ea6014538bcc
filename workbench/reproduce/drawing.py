"""Figures of reproductions, drawn as data/papers/PAPER/items.toml says: bars of the paper's and our values, lines, memory by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.export import Captioned
from workbench.plots.style import BLACK, BLUE, CYCLE, GREY, VERMILLION, finish
from workbench.reproduce.items import Chart, matches
from workbench.reproduce.result import Comparison, Result

PAPER_COLOUR, OUR_COLOUR = GREY, BLUE
NAMES = {"lora": "LoRA", "parallel_adapters_cached": "parallel adapters from the cache"}
Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw(charts: Sequence[Chart], result: Result) -> list[Captioned]:
    """Return each chart, with the result's own title and the title of its first table if the texts require them."""
    said = {"title": result.title, "table": result.tables[0].title if result.tables else ""}
    drawn = []
    for chart in charts:
        figure = _draw(replace(chart, title=chart.title.format(**said), subtitle=chart.subtitle.format(**said)), result)
        figure.update_xaxes(**chart.x_axis)
        figure.update_yaxes(**chart.y_axis)
        figure.update_layout(**chart.layout)
        drawn.append(Captioned(chart.name, chart.caption.format(**said), figure))
    return drawn


def _draw(chart: Chart, result: Result) -> go.Figure:
    if chart.kind == "bars":
        return paired_bars(result, _cells(chart, result), chart)
    if chart.kind == "stacked":
        bars: dict[str, dict[str, float]] = {}
        for row in result.tables[0].rows:
            parts = {part: value for part, column in chart.parts.items() if isinstance(value := row[column], float)}
            if parts:
                bars[f"{row[0]}, {row[1]}"] = parts
        return stacked(result, bars, chart)
    if chart.x:
        panels = _points(chart, result)
    else:
        panels = {}
        for name, line_points in result.series.items():
            labels = name.split(", ")
            if matches(chart.only[0] if chart.only else (), labels):
                shown = panels.setdefault(chart.panel.format(*labels), {})
                line = chart.line.format(*labels) if chart.line else ", ".join(chart.rename.get(label, label) for label in labels)
                if line_points:
                    shown[line] = list(line_points)
    return line_panels(result, panels, chart) if chart.kind == "panels" else lines(result, panels[""], chart)


def _cells(chart: Chart, result: Result) -> list[Comparison]:
    """Return the cells to draw as bars: comparisons, or a column of the first table."""
    if chart.column is not None:
        cells = [Comparison(labels=tuple(map(str, row)), paper=None, ours=row[chart.column]) for row in result.tables[0].rows]
    else:
        cells = list(result.comparisons)
    chosen = [one for pattern in chart.only for one in cells if matches(pattern, one.labels)] if chart.only else cells
    if not chart.labels:
        return chosen
    templates = chart.labels
    return [replace(one, labels=tuple(text.format(*one.labels).removeprefix(chart.prefix) for text in templates)) for one in chosen]


def _points(chart: Chart, result: Result) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return lines by panel through the comparisons, over the product of the labels that `x` names; the paper's end in ', paper'."""
    sides: list[tuple[str, ...]] = (
        [("ours", "paper")] if chart.paper == "beside" else [("ours",), ("paper",)] if chart.paper else [("ours",)]
    )
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    cells = [one for one in result.comparisons if not chart.only or any(matches(pattern, one.labels) for pattern in chart.only)]
    for together in sides:
        for one in cells:
            x = 1.0
            for index in chart.x:
                x *= float(one.labels[index])
            name = chart.line.format(*one.labels)
            for side in together:
                value: Any = getattr(one, side)
                if isinstance(value, int | float):
                    line = name if side == "ours" else f"{name.split(', ')[0]}, paper"
                    found.setdefault(chart.panel.format(*one.labels), {}).setdefault(line, []).append((x, float(value)))
    for shown in found.values():
        for line, points in shown.items():
            at: dict[float, list[float]] = {}
            for x, y in points:
                at.setdefault(x, []).append(y)
            if chart.at_same_x != "each":
                points = [(x, fmean(ys) if chart.at_same_x == "mean" else ys[-1]) for x, ys in at.items()]
            shown[line] = sorted(points)
    return found


def paired_bars(result: Result, comparisons: Sequence[Comparison], chart: Chart) -> go.Figure:
    """Return horizontal bars, the paper's above ours, one panel for each value of the label at chart.facet.

    comparisons: those to draw; a word such as OOM appears as text in place of its bar.
    """
    facet = chart.facet
    panels: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        panels.setdefault("" if facet is None else comparison.labels[facet], []).append(comparison)
    has_paper = any(one.paper is not None for one in comparisons)
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels) if facet is not None else None, horizontal_spacing=0.05)
    for column, panel in enumerate(panels.values(), start=1):
        names = [", ".join(words(label) for index, label in enumerate(one.labels) if index != facet) for one in panel]
        for name, colour, values in (
            ("ours", OUR_COLOUR, [one.ours for one in panel]),
            ("the paper's", PAPER_COLOUR, [one.paper for one in panel]),
        ):
            if name != "ours" and not has_paper:
                continue
            bar = go.Bar(
                orientation="h",
                y=names,
                x=[value if isinstance(value, int | float) else None for value in values],
                text=[_text(value) for value in values],
                textposition="auto",
                textangle=0,
                name=f"{name} ({result.source})" if name == "ours" else name,
                legendgroup=name,
                showlegend=column == 1,
                marker={"color": colour},
                hovertemplate=f"%{{y}}: {name} %{{x:.4g}} {chart.unit}<extra></extra>",
            )
            figure.add_trace(bar, row=1, col=column)
        number = str(column) if column > 1 else ""
        for label, one in zip(names, panel, strict=True):
            if isinstance(one.paper, str) or isinstance(one.ours, str):
                text = f"paper {_text(one.paper)}, ours {_text(one.ours)}" if has_paper else _text(one.ours)
                place: dict[str, Any] = {"xref": f"x{number} domain", "yref": f"y{number}", "x": 0.02, "y": label, "xanchor": "left"}
                figure.add_annotation(text=text, showarrow=False, font={"size": 10, "color": VERMILLION}, **place)
        figure.update_xaxes(title=chart.unit, type="log" if chart.logarithmic else "linear", row=1, col=column)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1 or facet is None, row=1, col=column)
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 13, "color": BLACK})
    return _finish(
        figure,
        result,
        chart,
        height=190 + chart.width * max(map(len, panels.values())),
        margin={"t": 110},
        below=90,
        barmode="group",
        bargap=0.25,
    )


def lines(result: Result, series: Lines, chart: Chart) -> go.Figure:
    """Return one line with markers for each series; with colour_by_group, names that are equal up to the first comma share a colour."""
    figure = go.Figure()
    groups = list(dict.fromkeys(name.split(", ")[0] if chart.colour_by_group else name for name in series))
    for name, points in series.items():
        number = groups.index(name.split(", ")[0] if chart.colour_by_group else name)
        figure.add_trace(_line(name, points, number, chart))
    figure.update_xaxes(title=chart.x_title, type="log" if chart.logarithmic else "linear")
    figure.update_yaxes(title=chart.y_title, rangemode="tozero")
    return _finish(figure, result, chart, height=460)


def line_panels(result: Result, panels: Mapping[str, Lines], chart: Chart) -> go.Figure:
    """Return a panel of lines for each name of `panels`, with equal axes; a line of one name has the same colour in every panel.

    chart.at: where the x axis is labelled.  chart.logarithmic: both axes.
    """
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), shared_yaxes=True, horizontal_spacing=0.03)
    names = list(dict.fromkeys(name for shown in panels.values() for name in shown))
    seen: set[str] = set()
    for column, shown in enumerate(panels.values(), start=1):
        for name, points in shown.items():
            line = _line(name, points, names.index(name), chart).update(legendgroup=name, showlegend=name not in seen)
            figure.add_trace(line, row=1, col=column)
            seen.add(name)
    kind, at = "log" if chart.logarithmic else "linear", list(chart.at)
    figure.update_xaxes(title=chart.x_title, type=kind, tickmode="array" if at else "auto", tickvals=at or None)
    figure.update_yaxes(type=kind, rangemode="tozero", tickmode="array" if at and chart.logarithmic else "auto")
    if at and chart.logarithmic:
        figure.update_yaxes(tickvals=at)
    figure.update_yaxes(title=chart.y_title, col=1)
    figure.update_annotations(font={"size": 13, "color": BLACK})
    return _finish(figure, result, chart, height=480, margin={"t": 110}, below=110)


def _line(name: str, points: Sequence[tuple[float, float]], number: int, chart: Chart) -> go.Scatter:
    dash = next((dash for part, dash in chart.dashes.items() if part in name), "solid")
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        name=words(name),
        mode="lines+markers",
        line={"color": CYCLE[number % len(CYCLE)], "dash": dash},
    )


def stacked(result: Result, bars: Mapping[str, Mapping[str, float]], chart: Chart, marks: Mapping[str, float] | None = None) -> go.Figure:
    """Return a horizontal bar for each name, divided into its parts.  marks: a value of the paper to mark at a bar."""
    figure = go.Figure()
    for number, part in enumerate(dict.fromkeys(part for cut in bars.values() for part in cut)):
        figure.add_bar(
            orientation="h",
            y=[words(name) for name in bars],
            x=[cut.get(part, 0.0) for cut in bars.values()],
            name=part,
            marker={"color": CYCLE[number % len(CYCLE)]},
            hovertemplate=f"%{{y}}: {part} %{{x:.3g}} {chart.unit}<extra></extra>",
        )
    if marks:
        figure.add_scatter(
            x=list(marks.values()),
            y=[words(name) for name in marks],
            mode="markers",
            name="the paper's",
            marker={"symbol": "line-ns-open", "size": 20, "color": BLACK, "line": {"width": 3}},
        )
    figure.update_xaxes(title=chart.unit)
    figure.update_yaxes(autorange="reversed")
    order = {"traceorder": "normal"}
    return _finish(figure, result, chart, height=200 + 30 * len(bars), below=100, barmode="stack", bargap=0.3, legend=order)


def _finish(figure: go.Figure, result: Result, chart: Chart, **given: Any) -> go.Figure:
    return finish(figure, title=chart.title, label=result.source, subtitle=chart.subtitle, **given)


def words(name: str) -> str:
    """Return the readable form of a registry name: 'lora' as 'LoRA', 'data_parallel' as 'data parallel'."""
    return ", ".join(NAMES.get(part, part.replace("_", " ")) for part in name.split(", "))


def _text(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)
