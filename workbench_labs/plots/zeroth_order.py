"""Training with forward passes: a loss as a bowl, the error of estimated gradients, curves and traffic, rooflines
(P-RGE, 2 and 3).

A pass is limited by reading weights below the ridge, by arithmetic above (sections 3.1-3.2).  The roofline: Williams,
Waterman and Patterson, Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from workbench.core.units import size_words, three_figures
from workbench.plots import style
from workbench.plots.breakdown import stacked_bars
from workbench.plots.predicted import lines

Point = tuple[float, float]
HALF_WIDTH, HALF_HEIGHT = 6.0, 3.0
ARROW = 1.5  # drawn length of the exact gradient
MAX_PROBES = 24  # more arrows cannot be distinguished
_CELLS = 96


class Probe(NamedTuple):
    """One query.  direction: z.  slope: g, the difference of both losses divided by 2 epsilon."""

    direction: Point
    slope: float


def bowl(
    loss: Callable[[float, float], float],
    path: Sequence[Point],
    probes: Sequence[Probe],
    *,
    gradient: Point,
    epsilon: float,
) -> go.Figure:
    """Return the bowl from above: contours, the path so far, the queries at its last point, their mean next to the
    exact gradient.

    path: at least one point.  gradient: exact, at the last point; sets the scale of all arrows.
    """
    x, y = path[-1]
    figure = go.Figure(_contours(loss))
    if len(path) > 1:
        line, marker = {"color": style.BLACK, "width": 1.5}, {"symbol": "circle", "size": 5}
        x_path, y_path = zip(*path, strict=True)
        figure.add_scatter(
            name="path", mode="lines+markers", x=x_path, y=y_path, line=line, marker=marker, hoverinfo="skip"
        )
    shown = probes[:MAX_PROBES]
    tips = [
        (x + side * epsilon * probe.direction[0], y + side * epsilon * probe.direction[1])
        for side in (1, -1)
        for probe in shown
    ]
    scale = ARROW / max(math.hypot(*gradient), 1e-9)
    parts = [(-scale * probe.slope * probe.direction[0], -scale * probe.slope * probe.direction[1]) for probe in shown]
    figure.add_trace(_arrows("each query: −g z", (x, y), parts, style.SKY_BLUE, width=1.5, size=9))
    for name, symbol, colour, some in (
        ("θ + εz", "cross", style.VERMILLION, tips[: len(shown)]),
        ("θ − εz", "circle", style.ORANGE, tips[len(shown) :]),
    ):
        marker = {"symbol": symbol, "size": 8, "color": colour, "line": {"color": style.BLACK, "width": 0.5}}
        figure.add_scatter(
            name=name,
            mode="markers",
            x=[point[0] for point in some],
            y=[point[1] for point in some],
            marker=marker,
            cliponaxis=False,
            hoverinfo="skip",
        )
    mean = tuple(sum(probe.slope * probe.direction[axis] for probe in probes) / max(1, len(probes)) for axis in (0, 1))
    figure.add_trace(
        _arrows("their mean", (x, y), [(-scale * mean[0], -scale * mean[1])], style.BLUE, width=4, size=15)
    )
    figure.add_trace(
        _arrows(
            "exact: −∇L",
            (x, y),
            [(-scale * gradient[0], -scale * gradient[1])],
            style.BLACK,
            width=2.5,
            size=13,
            dash="dot",
        )
    )
    marker_style = {"symbol": "circle", "size": 11, "color": style.GREEN, "line": {"color": style.BLACK, "width": 1}}
    figure.add_scatter(name="θ", mode="markers", x=[x], y=[y], marker=marker_style, cliponaxis=False, hoverinfo="skip")
    figure.update_xaxes(title="θ<sub>1</sub>", range=[-HALF_WIDTH, HALF_WIDTH], showgrid=False, constrain="domain")
    figure.update_yaxes(
        title="θ<sub>2</sub>",
        range=[-HALF_HEIGHT, HALF_HEIGHT],
        showgrid=False,
        scaleanchor="x",
        constrain="domain",
    )
    return style.finish(figure, title="What forward passes say of the slope", label="computed", height=600)


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
        line={"color": style.GREY, "width": 0.7},
        showscale=False,
        hovertemplate="loss %{z:.3g}<extra></extra>",
        name="loss",
    )


def _arrows(
    name: str, start: Point, ways: Sequence[Point], colour: str, *, width: float, size: float, dash: str = "solid"
) -> go.Scatter:
    """Return arrows from one point in one trace: start, tip and gap for each."""
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


class GradientError(NamedTuple):
    """Estimates of one gradient.  dimension: d.  points: (q, squared error over the exact gradient's squared length),
    means.
    """

    name: str
    dimension: int
    points: tuple[tuple[int, float], ...]


def gradient_error(errors: Sequence[GradientError], *, label: str) -> go.Figure:
    """Return the squared error over q: measured (symbols), and (d + 1) / q, its value if the loss is a plane
    (lines).
    """
    texts = {
        "title": "More queries, less error",
        "label": label,
        "subtitle": "dotted: the error is as long as the gradient",
    }
    points = {error.name: error.points for error in errors}
    figure = lines(points, x_title="queries q", y_title="squared error, of the gradient's", logarithmic="xy", **texts)
    for error, trace in zip(errors, figure.data, strict=True):
        trace.update(legendgroup=trace.name, mode="markers")
        expected = [(error.dimension + 1) / queries for queries in trace.x]
        look: dict[str, Any] = {
            "line": {"color": trace.line.color, "width": 1.5},
            "legendgroup": trace.name,
            "showlegend": False,
        }
        figure.add_scatter(mode="lines", x=trace.x, y=expected, hoverinfo="skip", **look)
    line = {"color": style.DARK_GREY, "width": 1.5}
    figure.add_scatter(x=[None], y=[None], mode="lines", name="(d + 1) / q", line=line, showlegend=True)
    return figure.add_hline(y=1, line=style.DOTTED)


def slopes(
    slopes_by_setting: Mapping[str, Sequence[tuple[float, float]]], *, label: str, subtitle: str = ""
) -> go.Figure:
    """Return measured slopes g over exact slopes z * gradient, a symbol for each query; on the diagonal they are equal.

    slopes_by_setting: by the varied setting, such as epsilon.
    """
    title = "The slope along each direction"
    values = [value for pairs in slopes_by_setting.values() for value, _ in pairs]
    if not values:
        return style.empty(title=title, label=label, why="There is no query.")
    most = 1.15 * max(max(map(abs, values)), 1e-12)
    words = {"title": title, "label": label, "subtitle": subtitle, "y_title": "by two forward passes: g"}
    figure = lines(slopes_by_setting, x_title="exact, by a backward pass: z · ∇L", **words).update_traces(
        mode="markers"
    )
    figure.add_scatter(
        x=[-most, most], y=[-most, most], mode="lines", line=style.DOTTED, name="alike", hoverinfo="skip"
    )
    zero: dict[str, Any] = {"zeroline": True, "zerolinecolor": "#DDDDDD"}
    figure.update_xaxes(range=[-most, most], **zero)
    return figure.update_yaxes(range=[-1.3 * most, 1.3 * most], **zero)


DASHES = ("dot", "dash", "dashdot")
MEAN_OF = 15  # steps: one batch has few samples


def learning(
    losses: Sequence[tuple[int, float]],
    scores: Sequence[tuple[int, float]],
    *,
    baselines: Mapping[str, float] | None = None,
    engine: Sequence[tuple[int, float]] = (),
    label: str,
    metric: str = "accuracy",
    subtitle: str = "",
) -> go.Figure:
    """Return each step's loss with its running mean, and the validation score on a separate axis.

    losses, scores: (step, value).  baselines: scores to compare with, by name.  engine: losses of the steps of the same
    training that an inference engine continues.
    """
    values = [loss for _, loss in losses]
    means = [(step, mean) for (step, _), mean in zip(losses, running_mean(values), strict=True)]
    last = max([1, *(step for step, _ in (*losses, *engine))])
    lost = {"loss of a step": losses, "its mean": means} | ({"loss in the engine": engine} if engine else {})
    scored = {f"validation {metric}": scores}
    scored |= {f"{name} {value:.2f}": [(0, value), (last, value)] for name, value in (baselines or {}).items()}
    words = {"title": "Learning by forward passes", "label": label, "subtitle": subtitle}
    figure = lines(lost | scored, x_title="steps", y_title="loss", **words)
    for name, look in (
        ("loss of a step", {"color": style.SKY_BLUE, "width": 1}),
        ("its mean", {"color": style.BLUE, "width": 2.5}),
        ("loss in the engine", {"color": style.VERMILLION, "width": 2.5}),
    ):
        figure.update_traces(mode="lines", line=look, selector={"name": name})
    figure.data[len(lost)].line.color = style.GREEN
    for index, line in enumerate(figure.data[len(lost) + 1 :]):
        line.update(
            mode="lines",
            hoverinfo="skip",
            line={"color": style.DARK_GREY, "width": 1.5, "dash": DASHES[index % len(DASHES)]},
        )
    style.on_second_axis(figure, range(len(lost), len(figure.data)), title=metric, range=[0, 1])
    return figure.update_xaxes(rangemode="tozero").update_layout(yaxis_rangemode="normal")


def running_mean(values: Sequence[float], size: int = MEAN_OF) -> list[float]:
    """Return the mean of each value and up to size - 1 before it."""
    return [sum(values[max(0, end + 1 - size) : end + 1]) / min(size, end + 1) for end in range(len(values))]


def traffic(nbytes: Mapping[str, float], *, subtitle: str = "") -> go.Figure:
    """Return a bar for each way to train on several devices, on a logarithmic axis.  nbytes: above 0."""
    sizes, words = (
        list(nbytes.values()),
        {"title": "What a device receives for a step", "label": "counted", "subtitle": subtitle},
    )
    figure = stacked_bars(list(nbytes), {"bytes": sizes}, x_title="bytes", **words)
    texts = [f" {size_words(size)}" for size in sizes]
    figure.update_traces(text=texts, textposition="outside", textfont_color="black", cliponaxis=False, showlegend=False)
    # Room on the right for the text of the longest bar.
    return figure.update_xaxes(
        type="log", dtick=1, exponentformat="power", range=[0, len(str(int(max(sizes, default=1)))) + 1]
    )


class Pass(NamedTuple):
    """One forward pass.  parts: P, the copies in one batch.  flops: their FLOPs together.  weight_bytes: bytes of
    weights, which are read once for all copies.
    """

    parts: int
    flops: float
    weight_bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """Return FLOPs for each byte of weights."""
        return self.flops / self.weight_bytes

    @property
    def flops_per_s(self) -> float:
        """Return the achieved rate, in FLOP/s."""
        return self.flops / self.seconds


def roofline(
    passes_by_name: Mapping[str, Sequence[Pass]],
    *,
    flops_per_s: float,
    bytes_per_s: float,
    label: str,
    title: str = "Roofline",
    subtitle: str = "",
) -> go.Figure:
    """Return the machine's roof and the rates that passes reach under it, with the number of parts next to each.

    flops_per_s: the rate of arithmetic.  bytes_per_s: the rate at which weights are read.  passes_by_name: at
    least one.
    """
    ridge = flops_per_s / bytes_per_s
    passes = [single for several in passes_by_name.values() for single in several]
    low = min([ridge, *(single.intensity for single in passes)]) / 2.5
    high = max([ridge, *(single.intensity for single in passes)]) * 2.5
    rate, unit = (1e-12, "TFLOP/s") if flops_per_s >= 2e12 else (1e-9, "GFLOP/s")
    series = {
        name: [(single.intensity, single.flops_per_s * rate) for single in several]
        for name, several in passes_by_name.items()
    }
    text = "; ".join(filter(None, [subtitle, "numbers: parts in the pass; green: the ridge"]))
    words = {
        "title": title,
        "label": label,
        "subtitle": text,
        "x_title": "FLOPs for each byte of weights that is read",
        "y_title": unit,
    }
    figure = lines(series, **words)
    for trace, several in zip(figure.data, passes_by_name.values(), strict=True):
        trace.update(mode="lines+markers+text", textposition="bottom center", line_width=1.5, line_dash="dot")
        trace.text = [f"{single.parts}" for single in several]
        trace.hovertemplate = [
            f"{trace.name}: {single.parts} parts, {single.seconds * 1e3:.3g} ms<extra></extra>" for single in several
        ]
    x, y = zip(
        *((intensity, min(flops_per_s, intensity * bytes_per_s) * rate) for intensity in (low, ridge, high)),
        strict=True,
    )
    figure.add_scatter(
        name="the roof", mode="lines", x=x, y=y, line={"color": style.BLACK, "width": 3}, hoverinfo="skip"
    )
    figure.add_vline(x=ridge, line={"color": style.GREEN, "width": 1.5, "dash": "dash"})
    sides = (
        (f"bound by reading weights: {three_figures(bytes_per_s / 1e9)} GB/s", 0.0, "left"),
        (f"bound by arithmetic: {three_figures(flops_per_s * rate)} {unit}", 1.0, "right"),
    )
    for text, position, anchor in sides:
        place = {"x": position, "xref": "paper", "xanchor": anchor, "y": 1.0, "yref": "paper", "yanchor": "bottom"}
        figure.add_annotation(text=text, showarrow=False, font={"size": 12, "color": style.DARK_GREY}, **place)
    figure.update_xaxes(type="log", range=[math.log10(low), math.log10(high)])
    figure.update_yaxes(type="log", exponentformat="none", dtick="D2")
    return figure.update_layout(margin_t=105)
