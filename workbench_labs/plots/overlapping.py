"""Figures of the costs and gains of cutting a layer for inference (Galaxy+).

Overlapping: communication alone, computation alone, both in turn, and overlapped (section III-D).  Trade: memory
against latency for every number of layers in scheme 2 (Table II, Algorithm 1 lines 18-26).  Bandwidths: latency over
bandwidth of several ways to split one sequence, and how much slower each is than ours (Fig. 12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from workbench.core.spread import Spread
from workbench.plots import style
from workbench.plots.predicted import compared_bars, lines

LINE_PIXELS = 480  # of the lines over all groups of bars together
ALLOWED = 1.10
"""Upper limit of an overlapped block's time divided by the longer of its two parts."""


class OverlapCell(NamedTuple):
    """A block's seconds: operations alone, transfers alone, both overlapped.  name: label of the bar group, such as the
    bandwidth.
    """

    name: str
    computation_s: Spread
    communication_s: Spread
    together_s: Spread

    @property
    def ratio(self) -> float:
        """Return the overlapped time divided by the longer part: 1 if the shorter part is hidden completely."""
        return self.together_s.median / max(self.computation_s.median, self.communication_s.median)


def overlap(cells: Sequence[OverlapCell], *, what: str = "one block", **words: Any) -> go.Figure:
    """Return three bars for each cell, lines for the longer part and the sum, the ratio in the third bar.

    what: the timed part.  words: title, label, subtitle and note, see style.finish.
    """
    if not cells:
        return style.empty(why="No block was timed.", **words)
    unit = style.time_unit(max(cell.computation_s.high + cell.communication_s.high for cell in cells))
    parts = {"computation alone": style.BLUE, "communication alone": style.GREEN, "overlapped": style.PURPLE}
    timed = {cell.name: (cell.computation_s, cell.communication_s, cell.together_s) for cell in cells}
    bars = {
        part: {name: spreads[at].scaled(unit.factor) for name, spreads in timed.items()}
        for at, part in enumerate(parts)
    }
    within = sum(cell.ratio <= ALLOWED for cell in cells)
    said = f"in the third bar: its ratio to the longer part; {within} of {len(cells)} at most {ALLOWED:.2f}"
    words["subtitle"] = "; ".join(filter(None, [words.get("subtitle"), said]))
    figure = compared_bars(bars, x_title="", unit=f"{what} ({unit.name})", bars="", **words)
    for bar, colour in zip(figure.data, parts.values(), strict=True):
        bar.marker.color = colour
    figure.data[2].update(
        text=[f"{cell.ratio:.2f}" for cell in cells], textposition="inside", insidetextanchor="middle", textangle=0
    )
    for line, colour, of in (
        ("the longer of the two", style.DARK_GREY, max),
        ("their sum (nothing hidden)", style.GREY, lambda a, b: a + b),
    ):
        heights = [of(cell.computation_s.median, cell.communication_s.median) * unit.factor for cell in cells]
        mark = {"symbol": "line-ew", "size": LINE_PIXELS / len(cells), "line": {"width": 2, "color": colour}}
        figure.add_scatter(x=figure.data[0].x, y=heights, mode="markers", name=line, marker=mark, hoverinfo="skip")
    most = max(max(cell.computation_s.median + cell.communication_s.median, cell.together_s.high) for cell in cells)
    figure.update_yaxes(range=[0, 1.1 * most * unit.factor])  # markers as wide as lines would take as much room above
    return figure


class TradePoint(NamedTuple):
    """A plan with a number of layers in scheme 2.  fullness: the largest share of its budget that a device needs."""

    layers: int
    seconds: float
    fullness: float


def trade(points: Sequence[TradePoint], mine: TradePoint, *, subtitle: str = "") -> go.Figure:
    """Return latency and the fullest device's memory over the number of layers in scheme 2, with `mine` marked.

    points: at least one, of plans that differ only in their schemes; plans that do not fit are drawn hollow.
    """
    ordered = sorted(points)
    unit = style.time_unit(max(point.seconds for point in (*ordered, mine)))
    words = {"title": "Scheme 2 trades memory for communication", "label": "simulated", "x_title": "layers in scheme 2"}
    words["subtitle"] = "; ".join(filter(None, [subtitle, "dotted: the budget; hollow: out of memory"]))
    latency = [(point.layers, point.seconds * unit.factor) for point in (*ordered, mine)]
    memory = [(point.layers, 100 * point.fullness) for point in (*ordered, mine)]
    series = {"latency": latency[:-1], "memory of the fullest device": memory[:-1]}
    figure = lines(series, y_title=f"one sequence ({unit.name})", **words)
    figure.data[1].line.dash = "dash"
    for trace, (x, y) in zip(figure.data, (latency[-1], memory[-1]), strict=True):
        trace.marker.symbol = [f"{trace.marker.symbol}{'-open' * (point.fullness > 1)}" for point in ordered]
        marker = {"size": 17, "symbol": "circle-open", "color": style.BLACK, "line": {"width": 2.5}}
        is_first = trace is figure.data[0]
        figure.add_scatter(
            x=[x], y=[y], mode="markers", name="yours", legendgroup="yours", showlegend=is_first, marker=marker
        )
    most = 108 * max(1.0, *(point.fullness for point in (*ordered, mine)))
    style.on_second_axis(figure, [1, 3], title="of its budget (%)", range=[0, most])
    line = {"color": style.VERMILLION, "width": 1.5, "dash": "dot"}
    return figure.add_shape(type="line", xref="paper", x0=0, x1=1, yref="y2", y0=100, y1=100, line=line)


Found = Mapping[str, Mapping[float, Spread]]
SIMULATED = ", simulated"


def latencies(found: Found, *, predicted: Mapping[str, Mapping[float, float]] | None = None, **words: Any) -> go.Figure:
    """Return a line for each system: seconds of one sequence over the links' Mbit/s; bars show the middle half of the
    rounds.

    found: system -> Mbit/s -> seconds.  predicted: the same, simulated; drawn hollow and dotted.  A system may lack
    bandwidths.
    words: title, label, subtitle and note, see style.finish.
    """
    timed = {name: dict(sorted(points.items())) for name, points in found.items() if points}
    simulated = {f"{name}{SIMULATED}": sorted(points.items()) for name, points in (predicted or {}).items() if points}
    values = [spread.high for points in timed.values() for spread in points.values()]
    values += [seconds for points in simulated.values() for _, seconds in points]
    if not values:
        return style.empty(why="Nothing was timed.", **words)
    unit, names = style.time_unit(max(values)), list(dict.fromkeys([*found, *(predicted or {})]))
    series = {
        name: [(rate, spread.median * unit.factor) for rate, spread in points.items()] for name, points in timed.items()
    }
    series |= {name: [(rate, seconds * unit.factor) for rate, seconds in points] for name, points in simulated.items()}
    figure = lines(series, x_title="links (Mbit/s)", y_title=f"one sequence ({unit.name})", logarithmic="x", **words)
    for trace, key in zip(figure.data, series, strict=True):
        name = key.removesuffix(SIMULATED)
        index = names.index(name)
        trace.update(line_color=colour_of(name, index), marker_symbol=style.SYMBOLS[index % len(style.SYMBOLS)])
        trace.hovertemplate = f"%{{y:.4g}} {unit.name} at %{{x:,g}} Mbit/s<extra>{trace.name}</extra>"
        if key in timed:
            trace.error_y = style.error_bars([spread.scaled(unit.factor) for spread in timed[key].values()])
        else:
            trace.update(
                line_dash="dot",
                line_width=1.5,
                marker_symbol=f"{trace.marker.symbol}-open",
                showlegend=name not in timed,
            )
    if simulated and timed:
        hollow = {"size": 9, "symbol": "circle-open", "color": style.DARK_GREY, "line": {"width": 1.5}}
        line = {"color": style.DARK_GREY, "width": 1.5, "dash": "dot"}
        figure.add_scatter(
            x=[None], y=[None], mode="lines+markers", name="simulated (hollow)", marker=hollow, line=line
        )
    return figure


def speedups(found: Found, **words: Any) -> go.Figure:
    """Return each baseline's latency divided by ours, for each bandwidth; bars show the middle half of the rounds.

    found: baseline -> Mbit/s -> ratio of its latency to ours.  words: title, label, subtitle and note, see
    style.finish.
    """
    rates = sorted({rate for points in found.values() for rate in points})
    if not rates:
        return style.empty(why="Nothing was compared.", **words)
    named = {name: {f"{rate:,g}": points[rate] for rate in rates if rate in points} for name, points in found.items()}
    words["bars"] = "bars: the middle half of the rounds"
    figure = compared_bars(named, x_title="links (Mbit/s)", unit="latency over ours", **words)
    for index, bar in enumerate(figure.data):
        bar.update(
            marker_color=colour_of(bar.name, index), text=[f"{ratio:.2f}" for ratio in bar.y], textposition="outside"
        )
    figure.update_xaxes(categoryarray=[f"{rate:,g}" for rate in rates])
    figure.add_hline(y=1.0, line={"color": style.BLACK, "width": 1.5})
    return figure


def colour_of(name: str, index: int) -> str:
    """Return a system's colour; an unknown system gets the cycle's."""
    return style.SYSTEM_COLOURS.get(name, style.CYCLE[index % len(style.CYCLE)])
