from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import pytest

from workbench.plots.shared_axes import ROOM, share_axes


def bars(*values: float, title: str = "ms", **layout: Any) -> go.Figure:
    figure = go.Figure([go.Bar(orientation="h", y=["alpha"], x=[value]) for value in values])
    figure.update_layout(xaxis_title=title, barmode="stack", **layout)
    return figure


def dots(*values: float, kind: str = "linear") -> go.Figure:
    return go.Figure(go.Scatter(x=list(range(len(values))), y=list(values)), layout={"yaxis": {"type": kind}})


@pytest.mark.parametrize(
    ("first", "second", "axis", "low", "high"),
    [
        (bars(3, 4), bars(10), "xaxis", 0, 10 * (1 + ROOM)),
        (bars(3, 4), bars(5), "xaxis", 0, 7 * (1 + ROOM)),  # stacked
        (bars(1500), bars(3, title="s"), "xaxis", 0, 3 * (1 + ROOM)),
        (bars(1, xaxis_range=[0, 40]), bars(5), "xaxis", 0, 40),
        (dots(2, 4), dots(3, 6), "yaxis", 2 - 2 * ROOM, 6 + 3 * ROOM),
        (dots(10, 100, kind="log"), dots(10, 1000, kind="log"), "yaxis", 1 - 2 * ROOM, 3 + 2 * ROOM),
    ],
)
def test_both_get_a_range_that_holds_all(
    first: go.Figure, second: go.Figure, axis: str, low: float, high: float
) -> None:
    share_axes(first, second)
    assert first.layout[axis].range == second.layout[axis].range == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("first", "second", "axis"),
    [
        (bars(1), bars(2, title="MB"), "xaxis"),
        (dots(1, 2), dots(1, 10, kind="log"), "yaxis"),
        (bars(1), bars(2), "yaxis"),
    ],
)
def test_axes_that_count_something_else_keep_their_own(first: go.Figure, second: go.Figure, axis: str) -> None:
    share_axes(first, second)
    assert first.layout[axis].range is None and second.layout[axis].range is None
