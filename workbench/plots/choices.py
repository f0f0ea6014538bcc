"""The adviser's combinations: time against energy, the size of a point is its memory, dominated ones are grey."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from workbench.plots.style import CYCLE, GREY, empty, finish

LARGEST_POINT = 34


def choices(points: Sequence[tuple[str, float | None, float | None, int, bool]], *, label: str) -> go.Figure:
    """Return the combinations as points.  points: name, seconds, joules, bytes of memory, whether it is dominated.

    A combination without seconds or joules has no place in it.
    """
    words = {"title": "Time, energy and memory of each combination", "label": label}
    placed = [point for point in points if point[1] is not None and point[2] is not None]
    if not placed:
        return empty(why="No combination has both a time and an energy: the devices have no power figures.", **words)
    most = max(nbytes for *_, nbytes, _ in placed) or 1
    figure = go.Figure()
    for is_dominated, colour, name in ((True, GREY, "dominated"), (False, CYCLE[0], "nothing is better in all")):
        own = [point for point in placed if point[4] == is_dominated]
        figure.add_scatter(
            x=[point[1] for point in own],
            y=[point[2] for point in own],
            mode="markers" if is_dominated else "markers+text",
            text=[point[0] for point in own],
            textposition="top center",
            name=name,
            showlegend=True,
            marker={
                "color": colour,
                "size": [8 + LARGEST_POINT * (point[3] / most) ** 0.5 for point in own],
                "line": {"width": 1},
                "opacity": 0.75,
            },
            customdata=[point[3] / 1e6 for point in own],
            hovertemplate="<b>%{text}</b><br>%{x:.3g} s, %{y:.3g} J, %{customdata:.0f} MB<extra></extra>",
        )
    figure.update_xaxes(title="seconds of the run", type="log")
    figure.update_yaxes(title="joules of all devices (modelled)", type="log")
    return finish(figure, subtitle="The size of a point is the largest memory of a device.", height=520, **words)
