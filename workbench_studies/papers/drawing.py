"""Figures of reproductions, drawn as PAPER/items.toml says: bars of the paper's and our values, lines, memory by
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from statistics import fmean
from typing import Any, TypeVar

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.core.units import three_figures
from workbench.plots.breakdown import stacked_bars
from workbench.plots.export import Captioned
from workbench.plots.style import BLACK, BLUE, CYCLE, DARK_GREY, GREY, VERMILLION, finish
from workbench_studies.papers.charts import Chart, matches
from workbench_studies.papers.result import Comparison, Result

PAPER_COLOUR, OUR_COLOUR = GREY, BLUE
Panels = Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
T = TypeVar("T")
NAMES = {"lora": "LoRA", "parallel_adapters_cached": "parallel adapters from the cache"}


def draw(charts: Sequence[Chart], result: Result) -> list[Captioned]:
    """Return each chart, with the result's own title and the title of its first table if the texts require them."""
    texts = {"title": result.title, "table": result.tables[0].title if result.tables else ""}
    drawn = []
    for chart in charts:
        subtitle = "quick trial: a tiny model on a few samples" if result.quick else chart.subtitle.format(**texts)
        chart = replace(chart, title=chart.title.format(**texts), subtitle=subtitle)
        if chart.kind == "lines":
            figure = lines(result, _lines(chart, result), chart)
        else:
            kinds = {"bars": paired_bars, "words": words_table, "stacked": stacked}
            figure = kinds[chart.kind](result, _cells(chart, result), chart)
        figure.update_xaxes(**chart.x_axis)
        figure.update_yaxes(**chart.y_axis)
        drawn.append(Captioned(chart.name, chart.caption.format(**texts), figure))
    return drawn


def _chosen(chart: Chart, cells: Sequence[Comparison]) -> list[Comparison]:
    return (
        [cell for pattern in chart.only for cell in cells if matches(pattern, cell.labels)]
        if chart.only
        else list(cells)
    )


def _cells(chart: Chart, result: Result) -> list[Comparison]:
    """Return the cells to draw as bars: comparisons, or the parts of the first table's rows, labelled by the part and
    the row's values.
    """
    cells: Sequence[Comparison] = result.comparisons
    if chart.parts:
        rows, parts = result.tables[0].rows, chart.parts.items()
        cells = [
            Comparison(labels=(part, *map(str, row)), paper=None, ours=row[column])
            for row in rows
            for part, column in parts
        ]
    if not chart.labels:
        return _chosen(chart, cells)
    return [
        replace(cell, labels=tuple(text.format(*cell.labels) for text in chart.labels))
        for cell in _chosen(chart, cells)
    ]


def _lines(chart: Chart, result: Result) -> Panels:
    """Return lines by panel: the result's series, or the comparisons over the product of the labels that `x` names.

    The paper's comparisons end in ', paper'.  Values at the same x are averaged.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    if not chart.x:
        for name, points in result.series.items():
            labels = name.split(", ")
            if points and matches(chart.only[0] if chart.only else (), labels):
                panels.setdefault(chart.panel.format(*labels), {})[
                    chart.line.format(*labels) if chart.line else name
                ] = list(points)
        return panels
    values: dict[tuple[str, str], dict[float, list[float]]] = {}
    for cell in _chosen(chart, result.comparisons):
        name = chart.line.format(*cell.labels)
        sides = {name: cell.ours} | ({f"{name.split(', ')[0]}, paper": cell.paper} if chart.paper else {})
        for line, value in sides.items():
            if isinstance(value, int | float):
                x = prod(float(cell.labels[index]) for index in chart.x)
                values.setdefault((chart.panel.format(*cell.labels), line), {}).setdefault(x, []).append(float(value))
    for (panel, line), ys_by_x in values.items():
        panels.setdefault(panel, {})[line] = sorted((x, fmean(ys)) for x, ys in ys_by_x.items())
    return panels


def paired_bars(result: Result, comparisons: Sequence[Comparison], chart: Chart) -> go.Figure:
    """Return horizontal bars, ours above the paper's, one panel for each value of the label at chart.facet.

    comparisons: those to draw; a word such as OOM appears as text in place of its bar.
    """
    facet = chart.facet
    panels: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        panels.setdefault("" if facet is None else comparison.labels[facet], []).append(comparison)
    has_paper = any(cell.paper is not None for cell in comparisons)
    has_bars = any(isinstance(value, int | float) for cell in comparisons for value in (cell.ours, cell.paper))
    figure = make_subplots(
        rows=1, cols=len(panels), subplot_titles=list(panels) if facet is not None else None, horizontal_spacing=0.05
    )
    for column, panel in enumerate(panels.values(), start=1):
        names = [", ".join(words(label) for index, label in enumerate(cell.labels) if index != facet) for cell in panel]
        for name, colour, values in (
            ("ours", OUR_COLOUR, [cell.ours for cell in panel]),
            ("the paper's", PAPER_COLOUR, [cell.paper for cell in panel]),
        ):
            if name != "ours" and not has_paper:
                continue
            bar = go.Bar(
                orientation="h",
                y=names,
                x=[value if isinstance(value, int | float) else None for value in values],
                text=["" if isinstance(value, str) else _text(value, chart.unit) for value in values],
                textposition="outside",
                textfont={"size": 11},
                cliponaxis=False,
                name=f"{name} ({result.source})" if name == "ours" else name,
                legendgroup=name,
                showlegend=has_bars and column == 1,
                marker={"color": colour},
                hovertemplate=f"%{{y}}: {name} %{{x:.4g}} {chart.unit}<extra></extra>",
            )
            figure.add_trace(bar, row=1, col=column)
        number = str(column) if column > 1 else ""
        for label, cell in zip(names, panel, strict=True):
            if isinstance(cell.paper, str) or isinstance(cell.ours, str):
                text = f"paper {_text(cell.paper)}, ours {_text(cell.ours)}" if has_paper else _text(cell.ours)
                position = names.index(label)
                place: dict[str, Any] = {
                    "xref": f"x{number} domain",
                    "yref": f"y{number}",
                    "x": 0.02,
                    "y": position,
                    "xanchor": "left",
                }
                colour = DARK_GREY if cell.agrees else VERMILLION
                figure.add_annotation(text=text, showarrow=False, font={"size": 11, "color": colour}, **place)
        both = [value for cell in panel for value in (cell.ours, cell.paper)]
        lengths = [float(value) for value in both if isinstance(value, int | float)]
        figure.update_xaxes(
            title=chart.unit,
            type="log" if chart.logarithmic else "linear",
            range=_with_room_for_text(lengths) if min(lengths, default=0) < 0 else None,
            visible=has_bars,
            row=1,
            col=column,
        )
        # A label may be a number, which is no place on the axis.
        figure.update_yaxes(
            type="category", autorange="reversed", showticklabels=column == 1 or facet is None, row=1, col=column
        )
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 13, "color": BLACK})
    return _finish(
        figure,
        result,
        chart,
        height=190 + 46 * max(map(len, panels.values())),
        margin={"t": 110},
        barmode="group",
        bargap=0.25,
    )


SAME, DIFFERENT = "#D6EFE4", "#F9D9C3"
"""Behind the words of a cell that agree, and that differ: a pale GREEN and a pale VERMILLION."""


def words_table(result: Result, comparisons: Sequence[Comparison], chart: Chart) -> go.Figure:
    """Return a field for each pair of labels with the paper's word and ours: equal ones are green, others are red and
    framed.
    """
    rows, columns = (list(dict.fromkeys(cell.labels[index] for cell in comparisons)) for index in (0, 1))
    figure = go.Figure()
    for agrees, colour, name in ((True, SAME, "the same"), (False, DIFFERENT, "different")):
        cells = [cell for cell in comparisons if cell.agrees is agrees]
        begin, end = ("", "") if agrees else ("<b>", "</b>")
        x, y = [columns.index(cell.labels[1]) for cell in cells], [rows.index(cell.labels[0]) for cell in cells]
        figure.add_bar(
            x=[0.94] * len(cells),
            base=[start - 0.47 for start in x],
            y=y,
            width=0.86,
            orientation="h",
            name=name,
            text=[f"{begin}paper {_text(cell.paper)}<br>ours {_text(cell.ours)}{end}" for cell in cells],
            textposition="inside",
            insidetextanchor="middle",
            insidetextfont={"color": BLACK, "size": 13},
            marker={"color": colour, "line": {"width": 0 if agrees else 2, "color": VERMILLION}},
            hovertext=[", ".join(cell.labels) for cell in cells],
            showlegend=bool(cells),
        )
    numbers = {"tickvals": list(range(len(columns))), "ticktext": columns, "range": [-0.5, len(columns) - 0.5]}
    figure.update_xaxes(**numbers, title=result.label_columns[1], side="top", showgrid=False)
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=[f"{row} " for row in rows],
        autorange="reversed",
        showgrid=False,
    )
    same = sum(cell.agrees is True for cell in comparisons)
    legend = "; ".join(
        filter(None, [chart.subtitle, f"{same} of {len(comparisons)} are the same; {chart.unit}".removesuffix("; ")])
    )
    chart = replace(chart, subtitle=legend)
    return _finish(figure, result, chart, height=200 + 62 * len(rows), margin={"t": 130}, barmode="overlay", bargap=0)


def lines(result: Result, panels: Panels, chart: Chart) -> go.Figure:
    """Return a panel of lines with markers for each name of `panels`; names that are equal up to chart.colour_up_to
    have one colour.  Where there are more lines than colours, the others are dashed.
    """
    titles = list(panels) if any(panels) else None
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.03)
    names = dict.fromkeys(name for shown in panels.values() for name in shown)
    groups = {name: name.split(chart.colour_up_to)[0] if chart.colour_up_to else name for name in names}
    order = list(dict.fromkeys(groups.values()))
    for column, shown in enumerate(panels.values(), start=1):
        for name, points in shown.items():
            earlier, colour = divmod(order.index(groups[name]), len(CYCLE))
            usual = ("solid", "dash", "dot")[min(earlier, 2)]
            line = go.Scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                name=words(name),
                mode="lines+markers",
                line={
                    "color": CYCLE[colour],
                    "dash": next((dash for part, dash in chart.dashes.items() if part in name), usual),
                },
                legendgroup=name,
                showlegend=name in names,
            )
            figure.add_trace(line, row=1, col=column)
            names.pop(name, None)
    figure.update_xaxes(title=chart.x_title, type="log" if chart.logarithmic else "linear")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title=chart.y_title, col=1)
    figure.update_annotations(font={"size": 13, "color": BLACK})
    return _finish(figure, result, chart, height=480, **({"margin": {"t": 110}} if titles else {}))


def stacked(result: Result, cells: Sequence[Comparison], chart: Chart) -> go.Figure:
    """Return a horizontal bar for each first label, divided by the second; the paper's value is marked where it is the
    'total'.
    """
    cells = [cell for cell in cells if isinstance(cell.ours, float)]
    names = list(dict.fromkeys(cell.labels[0] for cell in cells))
    totals = [cell for cell in cells if cell.labels[1] == "total"]
    values: dict[tuple[str, ...], Any] = {cell.labels: cell.ours for cell in cells}
    parts = {part: [values.get((name, part), 0.0) for name in names] for _, part in values if part != "total"}
    mark = {"symbol": "line-ns-open", "size": 20, "color": BLACK, "line": {"width": 3}}
    x, y = [cell.paper for cell in totals], [words(cell.labels[0]) for cell in totals]
    marks = [go.Scatter(x=x, y=y, mode="markers", name="the paper's", marker=mark)] if totals else []
    shown = {"title": chart.title, "label": result.source, "subtitle": chart.subtitle}
    return stacked_bars([*map(words, names)], parts, x_title=chart.unit, marks=marks, **shown)


def _finish(figure: go.Figure, result: Result, chart: Chart, **settings: Any) -> go.Figure:
    return finish(figure, title=chart.title, label=result.source, subtitle=chart.subtitle, **settings)


def words(name: str) -> str:
    """Return the readable form of a registry name: 'lora' as 'LoRA', 'data_parallel' as 'data parallel'."""
    return ", ".join(NAMES.get(part, part.replace("_", " ")) for part in name.split(", "))


def _text(value: object, unit: str = "") -> str:
    if isinstance(value, int | float):
        return f"{round(value, 2) + 0.0:.2f}" if unit == "points" else three_figures(value)  # no -0.00
    return "" if value is None else str(value)


def _with_room_for_text(values: Sequence[float]) -> list[float]:
    """Return the range of an axis from 0 to values on both sides, with room for the values' text beyond the bars."""
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.08 * (high - low)
    return [low - room, high + room]


def pareto(points: Iterable[T], cost: Callable[[T], float], score: Callable[[T], float]) -> list[T]:
    """Return the points for which no other costs as little and scores as much, by rising cost."""
    front: list[T] = []
    for point in sorted(points, key=lambda point: (cost(point), -score(point))):
        if not front or score(point) > score(front[-1]):
            front.append(point)
    return front
