"""A plain line figure for what a notebook sweeps, in the look of all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.plots.style import CYCLE, LEGEND_BELOW, finish

SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up")


def lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    label: str,
    x_title: str,
    y_title: str,
    subtitle: str = "",
    logarithmic: str = "",
) -> go.Figure:
    """Return a figure with a line through the (x, y) points of each series.

    label: what the numbers are (simulated, measured).  logarithmic: the axes that are, such as 'x' or 'xy'.
    """
    figure = go.Figure()
    for index, (name, points) in enumerate(series.items()):
        figure.add_trace(
            go.Scatter(
                x=[x for x, _ in points],
                y=[y for _, y in points],
                mode="lines+markers",
                name=name,
                line={"color": CYCLE[index % len(CYCLE)], "width": 2},
                marker={"size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)]},
                showlegend=True,
            )
        )
    figure.update_xaxes(title=x_title, zeroline=False)
    figure.update_yaxes(title=y_title, zeroline=False, rangemode="tozero")
    if "x" in logarithmic:
        marked = sorted({x for points in series.values() for x, _ in points})
        figure.update_xaxes(type="log", tickvals=marked, ticktext=[f"{x:,g}" if x < 1e6 else f"{x:.3g}" for x in marked])
    if "y" in logarithmic:
        figure.update_yaxes(type="log", dtick=1)
    figure.update_layout(legend=LEGEND_BELOW)
    finish(figure, title=title, label=label, subtitle=subtitle, height=420)
    figure.update_layout(margin={"b": 95})
    return figure
