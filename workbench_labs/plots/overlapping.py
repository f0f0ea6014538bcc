"""Figures of the costs and gains of cutting a layer for inference (Galaxy+).

Overlapping: communication alone, computation alone, both in turn, and overlapped (section III-D).  Trade: memory
against latency for every number of layers in scheme 2 (Table II, Algorithm 1 lines 18-26).
"""

from __future__ import annotations

from collections.abc import Sequence
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
        part: {name: spreads[number].scaled(unit.factor) for name, spreads in timed.items()}
        for number, part in enumerate(parts)
    }
    within = sum(cell.ratio <= ALLOWED for cell in cells)
    subtitle = f"in the third bar: its ratio to the longer part; {within} of {len(cells)} at most {ALLOWED:.2f}"
    words["subtitle"] = "; ".join(filter(None, [words.get("subtitle"), subtitle]))
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
