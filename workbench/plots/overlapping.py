"""Is communication hidden behind computation?  Each alone, both in turn, and overlapped (Galaxy+, section III-D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from workbench.core.spread import Spread
from workbench.plots.style import BLACK, BLUE, DARK_GREY, GREEN, LEGEND_BELOW, PURPLE, empty, error_bars, finish, time_unit

ALLOWED = 1.10
"""An overlapped block may take this many times the longer of its two parts."""


class OverlapCell(NamedTuple):
    """A block's seconds: its operations alone, its transfers alone, and both together.  name: such as the bandwidth."""

    name: str
    computation_s: Spread
    communication_s: Spread
    together_s: Spread

    @property
    def ratio(self) -> float:
        """Return the overlapped time over the longer of the two parts: 1 if the shorter is hidden whole."""
        return self.together_s.median / max(self.computation_s.median, self.communication_s.median)


def overlap(
    cells: Sequence[OverlapCell], *, title: str, label: str, what: str = "one block", subtitle: str = "", note: str = ""
) -> go.Figure:
    """Return three bars for each cell, the longer of the two parts and their sum as lines; the ratio above the third.  what: was timed."""
    if not cells:
        return empty(title=title, label=label, why="No block was timed.", note=note)
    unit = time_unit(max(cell.computation_s.high + cell.communication_s.high for cell in cells))
    width = 0.26
    figure = go.Figure()
    parts = (("computation alone", BLUE), ("communication alone", GREEN), ("overlapped", PURPLE))
    for index, (name, colour) in enumerate(parts):
        spreads = [(cell.computation_s, cell.communication_s, cell.together_s)[index].scaled(unit.factor) for cell in cells]
        figure.add_bar(
            name=name,
            x=[place + (index - 1) * width for place in range(len(cells))],
            y=[spread.median for spread in spreads],
            width=width * 0.94,
            marker={"color": colour},
            error_y=error_bars(spreads, color=BLACK, visible=any(spread.high > spread.low for spread in spreads)),
            hovertext=[f"{cell.name}: {name} {spread.median:.4g} {unit.name}" for cell, spread in zip(cells, spreads, strict=True)],
            hovertemplate="%{hovertext}<extra></extra>",
        )
    for line, dash, of in (("the longer of the two", "solid", max), ("their sum (nothing hidden)", "dot", lambda a, b: a + b)):
        xs: list[float | None] = []
        ys: list[float | None] = []
        for place, cell in enumerate(cells):
            height = of(cell.computation_s.median, cell.communication_s.median) * unit.factor
            xs += [place - 1.5 * width, place + 1.5 * width, None]
            ys += [height, height, None]
        figure.add_scatter(x=xs, y=ys, mode="lines", name=line, line={"color": DARK_GREY, "width": 2, "dash": dash}, hoverinfo="skip")
    for place, cell in enumerate(cells):
        figure.add_annotation(
            x=place + width,
            y=cell.together_s.high * unit.factor,
            yshift=10,
            text=f"{cell.ratio:.2f}",
            showarrow=False,
            font={"size": 11.5, "color": BLACK},
        )
    figure.update_xaxes(tickvals=list(range(len(cells))), ticktext=[cell.name for cell in cells], showgrid=False, zeroline=False)
    figure.update_yaxes(title=f"{what} ({unit.name})", rangemode="tozero", zeroline=False)
    within = sum(cell.ratio <= ALLOWED for cell in cells)
    said = f"above the third bar: its ratio to the longer part; {within} of {len(cells)} at most {ALLOWED:.2f}"
    return finish(
        figure,
        title=title,
        label=label,
        subtitle="; ".join(filter(None, [subtitle, said])),
        note=note,
        height=440,
        margin={"b": 95},
        barmode="overlay",
        bargap=0,
        legend=LEGEND_BELOW,
    )
