"""What more devices bring: weak and strong scaling beside the straight line (Galaxy+, Fig. 14 and 15)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import plotly.graph_objects as go

from workbench.plots.bandwidths import colour_of
from workbench.plots.style import DARK_GREY, LEGEND_BELOW, SYMBOLS, empty, finish

WORDS = {
    "weak": ("work per second over one device's", "the sequence grows with the devices"),
    "strong": ("speed-up over one device", "the sequence stays as long"),
}


def scaling(
    points: Mapping[str, Mapping[int, float]],
    *,
    kind: Literal["weak", "strong"],
    title: str,
    label: str,
    subtitle: str = "",
    paper: Mapping[int, float] | None = None,
    note: str = "",
) -> go.Figure:
    """Return a line for each system over the number of devices, and the straight line that nobody beats.

    points: system -> devices -> work per second (weak) or speed (strong), over one device's.  paper: what the paper states, as stars.
    The share of linear stands at the last point of each system.
    """
    counts = sorted({count for shown in points.values() for count in shown})
    if not counts:
        return empty(title=title, label=label, why="Nothing was timed.", note=note)
    logarithmic = counts[-1] > 16
    figure = go.Figure()
    figure.add_scatter(
        x=counts, y=counts, mode="lines", name="linear", line={"color": DARK_GREY, "dash": "dash", "width": 1.5}, hoverinfo="skip"
    )
    for index, (name, shown) in enumerate(points.items()):
        ordered = dict(sorted(shown.items()))
        last = max(ordered, default=0)
        figure.add_scatter(
            name=name,
            mode="lines+markers+text",
            x=list(ordered),
            y=list(ordered.values()),
            text=[f"{value / count:.0%}" if count == last and count > 1 else "" for count, value in ordered.items()],
            textposition="middle right",
            textfont={"size": 11},
            line={"color": colour_of(name, index), "width": 2},
            marker={"size": 8, "symbol": SYMBOLS[index % len(SYMBOLS)]},
            customdata=[[value / count] for count, value in ordered.items()],
            hovertemplate=f"<b>{name}</b><br>%{{x}} devices: %{{y:.3g}}, %{{customdata[0]:.0%}} of linear<extra></extra>",
            cliponaxis=False,
        )
    if paper:
        figure.add_scatter(
            name="stated in the paper",
            mode="markers",
            x=list(paper),
            y=list(paper.values()),
            marker={"symbol": "star", "size": 13, "color": "black"},
            hovertemplate="the paper: %{y:.3g} with %{x} devices<extra></extra>",
        )
    axis = {"type": "log"} if logarithmic else {"rangemode": "tozero"}
    figure.update_xaxes(
        title="devices", tickvals=counts, zeroline=False, **({"type": "log"} if logarithmic else {"range": [0.8, counts[-1] * 1.06]})
    )
    figure.update_yaxes(title=WORDS[kind][0], zeroline=False, **axis)
    if logarithmic:
        figure.update_yaxes(tickvals=counts)
    said = "; ".join(filter(None, [subtitle, WORDS[kind][1], "at the end: the share of linear"]))
    return finish(figure, title=title, label=label, subtitle=said, note=note, height=460, margin={"b": 100}, legend=LEGEND_BELOW)
