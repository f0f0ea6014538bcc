"""How far a zeroth-order gradient is from the exact one: over the number of queries, and slope by slope (P-RGE, section 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from workbench.plots.style import BLUE, CYCLE, DARK_GREY, LEGEND_BELOW, SYMBOLS, empty, finish


class GradientError(NamedTuple):
    """Estimates of one gradient.  dimension: d.  points: (q, squared error over the exact gradient's squared length), means."""

    name: str
    dimension: int
    points: tuple[tuple[int, float], ...]


def gradient_error(found: Sequence[GradientError], *, label: str, subtitle: str = "") -> go.Figure:
    """Return the squared error over q, measured (symbols), and (d + 1) / q, what it is where the loss is a plane (lines)."""
    figure = go.Figure()
    for index, one in enumerate(found):
        colour = CYCLE[index % len(CYCLE)]
        across = [queries for queries, _ in one.points]
        figure.add_scatter(
            name=one.name,
            legendgroup=one.name,
            mode="markers",
            x=across,
            y=[error for _, error in one.points],
            marker={"size": 9, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": colour},
            hovertemplate=f"{one.name}: q = %{{x}}, error %{{y:.3g}}<extra></extra>",
        )
        figure.add_scatter(
            legendgroup=one.name,
            showlegend=False,
            mode="lines",
            x=across,
            y=[(one.dimension + 1) / queries for queries in across],
            line={"color": colour, "width": 1.5},
            hoverinfo="skip",
        )
    line = {"color": DARK_GREY, "width": 1.5}
    figure.add_scatter(x=[None], y=[None], mode="lines", name="(d + 1) / q", line=line)
    figure.add_hline(y=1, line={"color": DARK_GREY, "width": 1, "dash": "dot"})
    marked = sorted({queries for one in found for queries, _ in one.points})
    figure.update_xaxes(title="queries q", type="log", tickvals=marked, ticktext=[str(one) for one in marked], zeroline=False)
    figure.update_yaxes(title="squared error, of the gradient's", type="log", dtick=1, exponentformat="power", zeroline=False)
    said = "; ".join(filter(None, [subtitle, "dotted: the error is as long as the gradient"]))
    return finish(
        figure,
        title="More queries, less error",
        label=label,
        subtitle=said,
        height=460,
        margin={"b": 95},
        legend=LEGEND_BELOW,
        colorway=[BLUE],
    )


def slopes(found: Mapping[str, Sequence[tuple[float, float]]], *, label: str, subtitle: str = "") -> go.Figure:
    """Return measured slopes g against exact ones z * gradient, a symbol for each query; on the diagonal they are the same.

    found: by what was varied, such as epsilon.
    """
    title = "The slope along each direction"
    values = [value for pairs in found.values() for value, _ in pairs]
    if not values:
        return empty(title=title, label=label, why="There is no query.")
    most = 1.15 * max(max(map(abs, values)), 1e-12)
    figure = go.Figure()
    diagonal = {"color": DARK_GREY, "width": 1, "dash": "dot"}
    figure.add_scatter(x=[-most, most], y=[-most, most], mode="lines", line=diagonal, name="alike", hoverinfo="skip")
    for index, (name, pairs) in enumerate(found.items()):
        marker = {"size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)], "color": CYCLE[index % len(CYCLE)]}
        x, y = [exact for exact, _ in pairs], [measured for _, measured in pairs]
        hover = f"{name}: exact %{{x:.3g}}, measured %{{y:.3g}}<extra></extra>"
        figure.add_scatter(name=name, mode="markers", x=x, y=y, marker=marker, hovertemplate=hover)
    figure.update_xaxes(title="exact, by a backward pass: z · ∇L", range=[-most, most], zeroline=True, zerolinecolor="#DDDDDD")
    figure.update_yaxes(title="by two forward passes: g", range=[-1.3 * most, 1.3 * most], zeroline=True, zerolinecolor="#DDDDDD")
    return finish(figure, title=title, label=label, subtitle=subtitle, height=460, margin={"b": 95}, legend=LEGEND_BELOW, colorway=[BLUE])


def angle_between(dimension: int, queries: int) -> float:
    """Return the degrees that an estimate from q queries is usually beside the gradient in d dimensions: cos = sqrt(q / (q + d + 1))."""
    return math.degrees(math.acos(math.sqrt(queries / (queries + dimension + 1))))
