"""Many runs side by side: bars with their spread for one quantity, and curves of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.plots.style import BLACK, CYCLE, LEGEND_BELOW, finish

DASHES = ("solid", "dash", "dot", "dashdot")


def compared_bars(
    found: Mapping[str, Mapping[str, tuple[float, float]]], *, title: str, label: str, x_title: str, unit: str = "", note: str = ""
) -> go.Figure:
    """Return a group of bars for each x and a colour for each series.  found: series -> x -> (mean, standard deviation)."""
    figure = go.Figure()
    order = list(dict.fromkeys(x for points in found.values() for x in points))
    for index, (name, points) in enumerate(found.items()):
        deviations = [deviation for _, deviation in points.values()]
        figure.add_bar(
            name=name,
            x=list(points),
            y=[mean for mean, _ in points.values()],
            error_y={"type": "data", "array": deviations, "visible": any(deviations), "color": BLACK, "thickness": 1.5, "width": 4},
            marker={"color": CYCLE[index % len(CYCLE)], "pattern": {"shape": ("", "/", "x", ".")[index // len(CYCLE) % 4]}},
            hovertemplate=f"<b>{name}</b>, %{{x}}: %{{y:.4g}} {unit}<extra></extra>",
            showlegend=len(found) > 1,
        )
    figure.update_xaxes(title=x_title, type="category", categoryorder="array", categoryarray=order, showgrid=False)
    figure.update_yaxes(title=unit, rangemode="tozero", zeroline=False)
    spreads = any(deviation for points in found.values() for _, deviation in points.values())
    said = "mean, with the standard deviation over runs" if spreads else ""
    return finish(
        figure, title=title, label=label, subtitle=said, note=note, height=430, barmode="group", margin={"b": 105}, legend=LEGEND_BELOW
    )


def compared_losses(curves: Mapping[str, Sequence[float]], *, title: str, label: str) -> go.Figure:
    """Return a line for each series of losses, one value for each optimizer step."""
    figure = go.Figure()
    for index, (name, losses) in enumerate(curves.items()):
        line = {"color": CYCLE[index % len(CYCLE)], "width": 2, "dash": DASHES[index // len(CYCLE) % len(DASHES)]}
        figure.add_scatter(name=name, mode="lines", x=list(range(1, len(losses) + 1)), y=list(losses), line=line, showlegend=True)
    figure.update_xaxes(title="optimizer step", zeroline=False)
    figure.update_yaxes(title="loss", zeroline=False)
    return finish(figure, title=title, label=label, subtitle="mean over runs", height=430, margin={"b": 105}, legend=LEGEND_BELOW)
