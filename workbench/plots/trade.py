"""Memory against latency: what every further layer in scheme 2 costs and brings (Galaxy+, Table II, Algorithm 1 lines 18-26)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.plots.style import BLACK, BLUE, LEGEND_BELOW, VERMILLION, finish, time_unit


class TradePoint(NamedTuple):
    """A plan with so many layers in scheme 2.  fullness: the largest share of its budget that a device needs."""

    layers: int
    seconds: float
    fullness: float


def trade(points: Sequence[TradePoint], mine: TradePoint, *, label: str = "simulated", subtitle: str = "") -> go.Figure:
    """Return latency and the fullest device's memory over the number of layers in scheme 2, and where `mine` stands.

    points: at least one, of plans that differ in nothing but their schemes; what does not fit is drawn hollow.
    """
    ordered = sorted(points)
    unit = time_unit(max(point.seconds for point in (*ordered, mine)))
    figure = make_subplots(specs=[[{"secondary_y": True}]])
    across = [point.layers for point in ordered]
    fits = [point.fullness <= 1 for point in ordered]
    series = (
        ("latency", [point.seconds * unit.factor for point in ordered], mine.seconds * unit.factor, BLUE, "circle", unit.name, False),
        ("memory of the fullest device", [100 * point.fullness for point in ordered], 100 * mine.fullness, VERMILLION, "square", "%", True),
    )
    for name, values, own, colour, symbol, of, secondary in series:
        figure.add_scatter(
            name=name,
            mode="lines+markers",
            x=across,
            y=values,
            line={"color": colour, "width": 2, "dash": "dash" if secondary else "solid"},
            marker={"size": 8, "symbol": [symbol if fit else f"{symbol}-open" for fit in fits]},
            hovertemplate=f"{name}: %{{y:.4g}} {of} with %{{x}} layers in scheme 2<extra></extra>",
            secondary_y=secondary,
        )
        figure.add_scatter(
            name="yours",
            legendgroup="yours",
            showlegend=not secondary,
            mode="markers",
            x=[mine.layers],
            y=[own],
            marker={"size": 17, "symbol": "circle-open", "color": BLACK, "line": {"width": 2.5}},
            hovertemplate=f"yours: %{{y:.4g}} {of}<extra></extra>",
            secondary_y=secondary,
        )
    most = 108 * max(1.0, mine.fullness, *(point.fullness for point in ordered))
    figure.add_hline(y=100, line={"color": VERMILLION, "width": 1.5, "dash": "dot"}, secondary_y=True)
    figure.update_xaxes(title="layers in scheme 2", zeroline=False)
    figure.update_yaxes(title=f"one sequence ({unit.name})", rangemode="tozero", zeroline=False, secondary_y=False)
    figure.update_yaxes(
        title="of its budget (%)", range=[0, most], zeroline=False, showgrid=False, tickmode="auto", nticks=6, secondary_y=True
    )
    said = "; ".join(filter(None, [subtitle, "dotted: the budget; hollow: out of memory"]))
    return finish(
        figure,
        title="Scheme 2 trades memory for communication",
        label=label,
        subtitle=said,
        height=430,
        margin={"b": 95, "r": 70},
        legend=LEGEND_BELOW,
    )
