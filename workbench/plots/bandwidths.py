"""Latency over bandwidth: several ways to split one sequence, and how much slower each is than ours (Galaxy+, Fig. 12)."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from workbench.core.spread import Spread
from workbench.plots.style import (
    BLACK,
    BLUE,
    CYCLE,
    DARK_GREY,
    GREEN,
    GREY,
    LEGEND_BELOW,
    ORANGE,
    PURPLE,
    SKY_BLUE,
    SYMBOLS,
    VERMILLION,
    empty,
    error_bars,
    finish,
    time_unit,
)

COLOUR_OF = {
    "Galaxy+": BLUE,
    "Algorithm 1": SKY_BLUE,
    "Galaxy": GREEN,
    "Megatron-LM": VERMILLION,
    "sequence parallel": PURPLE,
    "EdgeShard": ORANGE,
    "one device": GREY,
}
"""The systems keep their colours in all figures; another name takes the next colour of the cycle."""

Found = Mapping[str, Mapping[float, Spread]]


def latencies(
    found: Found,
    *,
    title: str,
    label: str,
    subtitle: str = "",
    predicted: Mapping[str, Mapping[float, float]] | None = None,
    note: str = "",
) -> go.Figure:
    """Return a line for each system: seconds of one sequence over the links' Mbit/s, the middle half of the rounds as bars.

    found: system -> Mbit/s -> seconds.  predicted: the same, simulated; drawn hollow and dotted.  A system may lack bandwidths.
    """
    values = [spread.high for points in found.values() for spread in points.values()]
    values += [seconds for points in (predicted or {}).values() for seconds in points.values()]
    if not values:
        return empty(title=title, label=label, why="Nothing was timed.", note=note)
    unit = time_unit(max(values))
    figure = go.Figure()
    for index, name in enumerate(dict.fromkeys([*found, *(predicted or {})])):
        colour, symbol = colour_of(name, index), SYMBOLS[index % len(SYMBOLS)]
        points = dict(sorted(found.get(name, {}).items()))
        if points:
            figure.add_scatter(
                name=name,
                mode="lines+markers",
                x=list(points),
                y=[spread.median * unit.factor for spread in points.values()],
                error_y=error_bars([spread.scaled(unit.factor) for spread in points.values()]),
                line={"color": colour, "width": 2},
                marker={"size": 8, "symbol": symbol},
                hovertemplate=f"<b>{name}</b><br>%{{y:.4g}} {unit.name} at %{{x:,g}} Mbit/s<extra></extra>",
            )
        simulated = dict(sorted((predicted or {}).get(name, {}).items()))
        if simulated:
            figure.add_scatter(
                name=f"{name}, simulated",
                mode="lines+markers",
                x=list(simulated),
                y=[seconds * unit.factor for seconds in simulated.values()],
                line={"color": colour, "width": 1.5, "dash": "dot"},
                marker={"size": 9, "symbol": f"{symbol}-open", "line": {"width": 1.5}},
                showlegend=not points,
                hovertemplate=f"<b>{name}</b>, simulated<br>%{{y:.4g}} {unit.name} at %{{x:,g}} Mbit/s<extra></extra>",
            )
    if predicted and any(found.values()):
        hollow = {"size": 9, "symbol": "circle-open", "color": DARK_GREY, "line": {"width": 1.5}}
        line = {"color": DARK_GREY, "width": 1.5, "dash": "dot"}
        figure.add_scatter(x=[None], y=[None], mode="lines+markers", name="simulated (hollow)", marker=hollow, line=line)
    marked = sorted({rate for points in (*found.values(), *(predicted or {}).values()) for rate in points})
    ticks = {"tickvals": marked, "ticktext": [f"{rate:,g}" for rate in marked], "minor": {"ticks": ""}}
    figure.update_xaxes(title="links (Mbit/s)", type="log", zeroline=False, **ticks)
    figure.update_yaxes(title=f"one sequence ({unit.name})", rangemode="tozero", zeroline=False)
    below = {"legend": LEGEND_BELOW, "margin": {"b": 105}}
    return finish(figure, title=title, label=label, subtitle=subtitle, note=note, height=460, **below)


def speedups(found: Found, *, title: str, label: str, subtitle: str = "", note: str = "") -> go.Figure:
    """Return, for each bandwidth, how many times longer each baseline takes than ours, the middle half of the rounds as bars.

    found: baseline -> Mbit/s -> ratio of its latency to ours.
    """
    marked = sorted({rate for points in found.values() for rate in points})
    if not marked:
        return empty(title=title, label=label, why="Nothing was compared.", note=note)
    places = {rate: place for place, rate in enumerate(marked)}
    width = 0.8 / len(found)
    figure = go.Figure()
    for index, (name, points) in enumerate(found.items()):
        shown = dict(sorted(points.items()))
        at = [places[rate] + (index - (len(found) - 1) / 2) * width for rate in shown]
        figure.add_bar(
            name=name,
            x=at,
            y=[spread.median for spread in shown.values()],
            width=width * 0.94,
            error_y=error_bars([*shown.values()], color=BLACK, visible=any(spread.high > spread.low for spread in shown.values())),
            marker={"color": colour_of(name, index)},
            hovertext=[
                f"{name} at {rate:,g} Mbit/s: {spread.median:.2f} times ours ({spread.low:.2f}-{spread.high:.2f})"
                for rate, spread in shown.items()
            ],
            hovertemplate="%{hovertext}<extra></extra>",
        )
        for x, spread in zip(at, shown.values(), strict=True):
            figure.add_annotation(
                x=x,
                y=spread.high,
                yshift=9,
                text=f"{spread.median:.2f}",
                showarrow=False,
                bgcolor="rgba(255,255,255,0.85)",
                borderpad=0,
                font={"size": 10.5, "color": BLACK},
            )
    figure.add_hline(y=1.0, line={"color": BLACK, "width": 1.5})
    figure.update_xaxes(
        title="links (Mbit/s)", tickvals=list(places.values()), ticktext=[f"{rate:,g}" for rate in places], showgrid=False, zeroline=False
    )
    figure.update_yaxes(title="latency over ours", rangemode="tozero", zeroline=False)
    spreads = any(spread.high > spread.low for points in found.values() for spread in points.values())
    said = "; ".join(filter(None, [subtitle, "bars: the middle half of the rounds" if spreads else ""]))
    bars = {"barmode": "overlay", "bargap": 0, "legend": LEGEND_BELOW, "margin": {"b": 105}}
    return finish(figure, title=title, label=label, subtitle=said, note=note, height=460, **bars)


def colour_of(name: str, index: int) -> str:
    """Return a system's colour, the cycle's for an unknown one."""
    return COLOUR_OF.get(name, CYCLE[index % len(CYCLE)])
