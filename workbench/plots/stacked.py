"""Stacked horizontal bars: parts of a whole, side by side for several things."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.plots.style import BLUE, GREEN, GREY, LEGEND_BELOW, ORANGE, PURPLE, SKY_BLUE, finish

COLOURS = (BLUE, ORANGE, SKY_BLUE, GREEN, PURPLE, GREY)


def stacked_bars(
    names: Sequence[str], parts: Mapping[str, Sequence[float]], *, title: str, label: str, x_title: str, subtitle: str = ""
) -> go.Figure:
    """Return a bar for each name, its parts in a row; parts[part][i] belongs to names[i].  label: what the numbers are."""
    figure = go.Figure()
    for (part, values), colour in zip(parts.items(), COLOURS, strict=False):
        figure.add_bar(
            name=part,
            orientation="h",
            x=list(values),
            y=list(names),
            text=[(f"{value:,}" if isinstance(value, int) else f"{value:.3g}") if value else "" for value in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "white" if colour in (BLUE, GREEN) else "black"},
            marker={"color": colour},
            hovertemplate=f"%{{y}}: {part} %{{x:.4g}}<extra></extra>",
            showlegend=True,
        )
    figure.update_xaxes(title=x_title, zeroline=False, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False, ticksuffix=" ")
    return finish(
        figure,
        title=title,
        label=label,
        subtitle=subtitle,
        height=185 + 38 * len(names),
        margin={"b": 95},
        barmode="stack",
        bargap=0.3,
        uniformtext={"minsize": 9, "mode": "hide"},
        legend=LEGEND_BELOW | {"traceorder": "normal"},
    )
