"""A zeroth-order gradient on a two-dimensional bowl: where the loss was asked for, what was made of it (P-RGE, section 2, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from workbench.plots.style import BLACK, BLUE, GREEN, GREY, LEGEND_BELOW, ORANGE, SKY_BLUE, VERMILLION, finish

Point = tuple[float, float]
HALF_WIDTH, HALF_HEIGHT = 5.2, 2.6
ARROW = 1.5  # as long as this is the exact gradient drawn
MAX_PROBES = 24  # more cannot be told apart
_CELLS = 96


class Probe(NamedTuple):
    """One query.  direction: z.  slope: g, the difference of both losses over 2 epsilon."""

    direction: Point
    slope: float


def bowl(
    loss: Callable[[float, float], float],
    path: Sequence[Point],
    probes: Sequence[Probe],
    *,
    gradient: Point,
    epsilon: float,
    title: str = "What forward passes say of the slope",
    label: str = "computed",
    subtitle: str = "",
) -> go.Figure:
    """Return the bowl from above: contours, the path so far, the queries at its last point, their mean beside the exact gradient.

    path: at least one point.  gradient: exact, at the last point; sets the scale of all arrows.
    """
    x, y = path[-1]
    figure = go.Figure(_contours(loss))
    if len(path) > 1:
        line, marker = {"color": BLACK, "width": 1.5}, {"symbol": "circle", "size": 5}
        x_path, y_path = zip(*path, strict=True)
        figure.add_scatter(name="path", mode="lines+markers", x=x_path, y=y_path, line=line, marker=marker, hoverinfo="skip")
    shown = probes[:MAX_PROBES]
    tips = [(x + side * epsilon * probe.direction[0], y + side * epsilon * probe.direction[1]) for side in (1, -1) for probe in shown]
    scale = ARROW / max(math.hypot(*gradient), 1e-9)
    parts = [(-scale * probe.slope * probe.direction[0], -scale * probe.slope * probe.direction[1]) for probe in shown]
    figure.add_trace(_arrows("each query: −g z", (x, y), parts, SKY_BLUE, width=1.5, size=9))
    for name, symbol, colour, some in (
        ("θ + εz", "cross", VERMILLION, tips[: len(shown)]),
        ("θ − εz", "circle", ORANGE, tips[len(shown) :]),
    ):
        marker = {"symbol": symbol, "size": 8, "color": colour, "line": {"color": BLACK, "width": 0.5}}
        figure.add_scatter(name=name, mode="markers", x=[at[0] for at in some], y=[at[1] for at in some], marker=marker, hoverinfo="skip")
    mean = tuple(sum(probe.slope * probe.direction[axis] for probe in probes) / max(1, len(probes)) for axis in (0, 1))
    figure.add_trace(_arrows("their mean", (x, y), [(-scale * mean[0], -scale * mean[1])], BLUE, width=4, size=15))
    figure.add_trace(_arrows("exact: −∇L", (x, y), [(-scale * gradient[0], -scale * gradient[1])], BLACK, width=2.5, size=13, dash="dot"))
    here = {"symbol": "circle", "size": 11, "color": GREEN, "line": {"color": BLACK, "width": 1}}
    figure.add_scatter(name="θ", mode="markers", x=[x], y=[y], marker=here, hoverinfo="skip")
    figure.update_xaxes(title="θ<sub>1</sub>", range=[-HALF_WIDTH, HALF_WIDTH], zeroline=False, showgrid=False, constrain="domain")
    figure.update_yaxes(
        title="θ<sub>2</sub>", range=[-HALF_HEIGHT, HALF_HEIGHT], zeroline=False, showgrid=False, scaleanchor="x", constrain="domain"
    )
    return finish(figure, title=title, label=label, subtitle=subtitle, height=600, margin={"b": 100}, legend=LEGEND_BELOW)


def _contours(loss: Callable[[float, float], float]) -> go.Contour:
    across = [HALF_WIDTH * (2 * index / _CELLS - 1) for index in range(_CELLS + 1)]
    up = [HALF_HEIGHT * (2 * index / (_CELLS // 2) - 1) for index in range(_CELLS // 2 + 1)]
    heights = [[round(loss(x, y), 4) for x in across] for y in up]
    return go.Contour(
        x=across,
        y=up,
        z=heights,
        ncontours=18,
        contours={"coloring": "heatmap"},
        colorscale=[[0, "#FFFFFF"], [1, "#C9C9C9"]],
        line={"color": GREY, "width": 0.7},
        showscale=False,
        hovertemplate="loss %{z:.3g}<extra></extra>",
        name="loss",
    )


def _arrows(name: str, start: Point, ways: Sequence[Point], colour: str, *, width: float, size: float, dash: str = "solid") -> go.Scatter:
    """Return arrows from one point, all one trace: start, tip, gap, again and again."""
    x: list[float | None] = []
    y: list[float | None] = []
    for way in ways:
        x += [start[0], start[0] + way[0], None]
        y += [start[1], start[1] + way[1], None]
    return go.Scatter(
        name=name,
        mode="lines+markers",
        x=x,
        y=y,
        line={"color": colour, "width": width, "dash": dash},
        marker={"symbol": "arrow", "angleref": "previous", "size": [0, size, 0] * len(ways), "color": colour},
        hoverinfo="skip",
    )
