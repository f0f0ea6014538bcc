"""A figure that can be drawn again, as the browser gets it."""

from __future__ import annotations

from typing import Any

import comm
import plotly.graph_objects as go
import pytest

from workbench.widgets.figure_box import FigureBox


def test_a_figure_arrives_with_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    states, create = [], comm.create_comm

    def opened(**described: Any) -> Any:
        states.append(described["data"]["state"])
        return create(**described)

    monkeypatch.setattr(comm, "create_comm", opened)
    box = FigureBox()
    assert box.shown is None  # nothing that would have to be replaced
    box.show(go.Figure(go.Scatter(x=[1], y=[2]), layout={"title": {"text": "t"}, "height": 300}))
    [state] = [state for state in states if "_widget_data" in state]
    FigureBox(go.Figure(layout={"title": {"text": "t"}, "height": 300}))
    sent = [state for state in states if any(len(value) > 10**6 for value in state.values() if isinstance(value, str))]
    assert len(sent) <= 1 and not any("_widget_data" in state for state in sent)  # plotly's code, once a process
    assert state["_widget_data"][0]["y"] == [2] and state["_widget_layout"]["width"] > 0
    shown = box.shown
    box.show(go.Figure(go.Scatter(x=[1], y=[5]), layout={"title": {"text": "t"}, "height": 300}))
    assert box.shown is shown and list(shown.data[0].y) == [5]


def test_a_figure_of_the_same_kinds_is_redrawn_in_one_message_without_bare_axes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A figure that grows while something runs does not flicker; nothing of the former one is left."""

    def figure(*traces: Any) -> go.Figure:
        return go.Figure(list(traces), layout={"title": {"text": "t"}, "height": 300})

    box = FigureBox(figure(go.Scatter(x=[1, 2], y=[2, 3], text=["a", "b"], line={"width": 3}), go.Bar(x=[1], y=[2])))
    sent: list[str] = []
    for message in (
        "_send_update_msg",
        "_send_restyle_msg",
        "_send_relayout_msg",
        "_send_addTraces_msg",
        "_send_deleteTraces_msg",
    ):
        send = getattr(box.shown, message)

        def told(*given: Any, _send: Any = send, _name: str = message, **named: Any) -> None:
            sent.append(_name)
            _send(*given, **named)

        monkeypatch.setattr(box.shown, message, told)
    traces = box.shown.data
    box.show(figure(go.Scatter(x=[1, 2, 3], y=[2, 3, 4], name="longer"), go.Bar(x=[1], y=[7])))
    assert sent == ["_send_update_msg"] and box.shown.data == traces
    line, bar = box.shown.data
    assert list(line.y) == [2, 3, 4] and line.name == "longer" and list(bar.y) == [7]
    assert line.text is None and line.line.width is None
    box.show(figure(go.Bar(x=[1], y=[9])))
    assert "_send_deleteTraces_msg" in sent and [trace.type for trace in box.shown.data] == ["bar"]
