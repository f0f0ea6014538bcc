"""A figure that can be drawn anew, as the browser gets it."""

from __future__ import annotations

from typing import Any

import comm
import plotly.graph_objects as go
import pytest

from workbench.widgets.controls import FigureBox


def test_a_figure_arrives_with_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    states, create = [], comm.create_comm

    def opened(**described: Any) -> Any:
        states.append(described["data"]["state"])
        return create(**described)

    monkeypatch.setattr(comm, "create_comm", opened)
    box = FigureBox()
    assert len(box.children) == 1  # nothing that would have to be replaced
    box.show(go.Figure(go.Scatter(x=[1], y=[2]), layout={"title": {"text": "t"}, "height": 300}))
    [state] = [one for one in states if "_widget_data" in one]
    assert state["_widget_data"][0]["y"] == [2] and state["_widget_layout"]["width"] > 0
    shown = box.shown
    box.show(go.Figure(go.Scatter(x=[1], y=[5]), layout={"title": {"text": "t"}, "height": 300}))
    assert box.shown is shown and list(shown.data[0].y) == [5]
