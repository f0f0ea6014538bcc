"""Figures that several reproductions share: bars of the paper's and our values, lines, and memory by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import BLACK, BLUE, CYCLE, GREY, VERMILLION, finish
from workbench.reproduce.result import Comparison, Result

PAPER_COLOUR, OUR_COLOUR = GREY, BLUE
NAMES = {"lora": "LoRA", "parallel_adapters_cached": "parallel adapters from the cache"}


def paired_bars(
    result: Result,
    comparisons: Sequence[Comparison],
    *,
    title: str,
    subtitle: str,
    unit: str,
    facet: int | None = None,
    logarithmic: bool = False,
    width: int = 46,
) -> go.Figure:
    """Return horizontal bars, the paper's above ours, one panel for each value of the label at `facet`.

    comparisons: those to draw; a word such as OOM stands as text where its bar would be.
    """
    panels: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        panels.setdefault("" if facet is None else comparison.labels[facet], []).append(comparison)
    rows = max(len(panel) for panel in panels.values())
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
            figure.add_trace(
                go.Bar(
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
                    hovertemplate=f"%{{y}}: {name} %{{x:.4g}} {unit}<extra></extra>",
                ),
                row=1,
                col=column,
            )
        told = [(label, one) for label, one in zip(names, panel, strict=True) if isinstance(one.paper, str) or isinstance(one.ours, str)]
        for label, one in told:
            text = f"paper {_text(one.paper)}, ours {_text(one.ours)}" if has_paper else _text(one.ours)
            place = {"xref": f"x{column} domain" if column > 1 else "x domain", "yref": f"y{column}" if column > 1 else "y"}
            figure.add_annotation(
                x=0.02, y=label, text=text, showarrow=False, xanchor="left", font={"size": 10, "color": VERMILLION}, **place
            )
        figure.update_xaxes(title=unit, type="log" if logarithmic else "linear", row=1, col=column)
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1 or facet is None, row=1, col=column)
    figure.update_layout(
        barmode="group", bargap=0.25, legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0}
    )
    figure.update_annotations(selector={"yref": "paper"}, font={"size": 13, "color": BLACK})
    finish(figure, title=title, label=result.source, subtitle=subtitle, height=190 + width * rows)
    figure.update_layout(margin={"t": 110, "b": 90})
    return figure


def lines(
    result: Result,
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    subtitle: str,
    x_title: str,
    y_title: str,
    dashes: Mapping[str, str] | None = None,
    logarithmic_x: bool = False,
    colour_by_group: bool = False,
) -> go.Figure:
    """Return one line with markers for each series.

    colour_by_group: series whose names agree up to the first comma share a colour, and dashes tell them apart.
    """
    figure = go.Figure()
    groups = list(dict.fromkeys(name.split(", ")[0] if colour_by_group else name for name in series))
    for name, points in series.items():
        number = groups.index(name.split(", ")[0] if colour_by_group else name)
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                name=words(name),
                mode="lines+markers",
                line={"color": CYCLE[number % len(CYCLE)], "dash": (dashes or {}).get(name, "solid")},
            )
        )
    figure.update_xaxes(title=x_title, type="log" if logarithmic_x else "linear")
    figure.update_yaxes(title=y_title, rangemode="tozero")
    return finish(figure, title=title, label=result.source, subtitle=subtitle, height=460)


def line_panels(
    result: Result,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    *,
    title: str,
    subtitle: str,
    x_title: str,
    y_title: str,
    dashes: Mapping[str, str] | None = None,
    at: Sequence[float] = (),
    logarithmic: bool = False,
) -> go.Figure:
    """Return a panel of lines for each name of `panels`, their axes alike; a line of one name has one colour everywhere.

    at: where the x axis is labelled.  logarithmic: both axes.
    """
    figure = make_subplots(rows=1, cols=len(panels), subplot_titles=list(panels), shared_yaxes=True, horizontal_spacing=0.03)
    names = list(dict.fromkeys(name for shown in panels.values() for name in shown))
    told: set[str] = set()
    for column, shown in enumerate(panels.values(), start=1):
        for name, points in shown.items():
            line = {"color": CYCLE[names.index(name) % len(CYCLE)], "dash": (dashes or {}).get(name, "solid")}
            figure.add_trace(
                go.Scatter(
                    x=[x for x, _ in points],
                    y=[y for _, y in points],
                    name=words(name),
                    legendgroup=name,
                    showlegend=name not in told,
                    mode="lines+markers",
                    line=line,
                ),
                row=1,
                col=column,
            )
            told.add(name)
    kind = "log" if logarithmic else "linear"
    figure.update_xaxes(title=x_title, type=kind, tickmode="array" if at else "auto", tickvals=list(at) or None)
    figure.update_yaxes(type=kind, rangemode="tozero", tickmode="array" if at and logarithmic else "auto")
    if at and logarithmic:
        figure.update_yaxes(tickvals=list(at))
    figure.update_yaxes(title=y_title, col=1)
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0})
    figure.update_annotations(font={"size": 13, "color": BLACK})
    finish(figure, title=title, label=result.source, subtitle=subtitle, height=480)
    figure.update_layout(margin={"t": 110, "b": 110})
    return figure


def stacked(
    result: Result,
    bars: Mapping[str, Mapping[str, float]],
    *,
    title: str,
    subtitle: str,
    unit: str,
    marks: Mapping[str, float] | None = None,
) -> go.Figure:
    """Return a horizontal bar for each name, cut into its parts.  marks: a value of the paper's to set beside a bar."""
    figure = go.Figure()
    parts = list(dict.fromkeys(part for cut in bars.values() for part in cut))
    for number, part in enumerate(parts):
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=[words(name) for name in bars],
                x=[cut.get(part, 0.0) for cut in bars.values()],
                name=part,
                marker={"color": CYCLE[number % len(CYCLE)]},
                hovertemplate=f"%{{y}}: {part} %{{x:.3g}} {unit}<extra></extra>",
            )
        )
    if marks:
        figure.add_trace(
            go.Scatter(
                x=list(marks.values()),
                y=[words(name) for name in marks],
                mode="markers",
                name="the paper's",
                marker={"symbol": "line-ns-open", "size": 20, "color": BLACK, "line": {"width": 3}},
            )
        )
    figure.update_xaxes(title=unit)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        barmode="stack",
        bargap=0.3,
        legend={"orientation": "h", "yref": "container", "y": 0.01, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    finish(figure, title=title, label=result.source, subtitle=subtitle, height=200 + 30 * len(bars))
    figure.update_layout(margin={"b": 100})
    return figure


def words(name: str) -> str:
    """Return a name of the registry's data as people write it: 'lora' as 'LoRA', 'data_parallel' as 'data parallel'."""
    return ", ".join(NAMES.get(part, part.replace("_", " ")) for part in name.split(", "))


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "" if value is None else str(value)
