"""The adviser's combinations: time against energy, the size of a point is its memory, dominated ones are grey."""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.plots.style import BLACK, CYCLE, GREY, LIGHT_GREY, empty, finish

SMALLEST_POINT, LARGEST_POINT = 16, 30


def choices(points: Sequence[tuple[str, float | None, float | None, int, bool]], *, label: str) -> go.Figure:
    """Return the combinations as points, numbered from 1.  points: name, seconds, joules, bytes of memory, whether it
    is dominated.

    A combination without seconds or joules has no place in it.
    """
    words = {"title": "Time, energy and memory of each combination", "label": label}
    placed = [point for point in points if point[1] is not None and point[2] is not None]
    if not placed:
        return empty(why="No combination has both a time and an energy: the devices have no power figures.", **words)
    most = max(nbytes for *_, nbytes, _ in placed) or 1
    figure = go.Figure()
    for number, (name, seconds, joules, nbytes, is_dominated) in enumerate(points, 1):
        if seconds is None or joules is None:
            continue
        figure.add_scatter(
            x=[seconds],
            y=[joules],
            mode="markers+text",
            text=[f"{number}"],
            textfont={"size": 11, "color": BLACK if is_dominated else "white"},
            name=f"{number}: {name}",
            showlegend=not is_dominated,
            marker={
                "color": LIGHT_GREY if is_dominated else CYCLE[0],
                "size": SMALLEST_POINT + LARGEST_POINT * (nbytes / most) ** 0.5,
                "line": {"width": 1, "color": GREY},
                "opacity": 0.85,
            },
            customdata=[nbytes / 1e6],
            hovertemplate="<b>%{fullData.name}</b><br>%{x:.3g} s, %{y:.3g} J, %{customdata:.0f} MB<extra></extra>",
        )
    for axis, values in (("x", [point[1] for point in placed]), ("y", [point[2] for point in placed])):
        ticks = log_ticks([value for value in values if value])
        figure.update_layout(
            {f"{axis}axis": {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}}
        )
    figure.update_xaxes(title="seconds of the run")
    figure.update_yaxes(title="joules of all devices (modelled)")
    subtitle = (
        "Numbers as in the table. Grey: another is at least as good in time, energy and memory. "
        "The larger a point, the more memory its largest device needs."
    )
    return finish(figure, subtitle=subtitle, height=560, **words)


def log_ticks(values: Sequence[float]) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten around some values."""
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    return [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
