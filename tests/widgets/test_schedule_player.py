from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from widget_reports import TIMELINE

from workbench.widgets import SchedulePlayer
from workbench.widgets.schedule_player import TICKS, moments


def test_moments_tell_what_each_device_does() -> None:
    alpha, beta, gamma, delta = moments(TIMELINE, 0.45)
    assert alpha == ("alpha", (), ("send activation 0 to beta",), 2_000_000)
    assert beta == ("beta", (), ("receive activation 0 from alpha",), 50)
    assert gamma == ("gamma", (), (), None) and delta.nbytes is None
    assert moments(TIMELINE, 0.399)[0] == ("alpha", ("forward 0F0",), (), 100)
    assert moments(TIMELINE, 1.0)[1].computes == ()  # an operation has ended at its end


def test_the_slider_moves_cursor_clock_and_table() -> None:
    player = SchedulePlayer(TIMELINE)
    player.slider.value = round(0.45 * TICKS)
    assert player.time_s == pytest.approx(0.45)
    assert player.figure.shown.layout.shapes[0].x0 == pytest.approx(450)
    assert "450 ms" in player.clock.value
    assert (
        player.map.time_s == pytest.approx(0.45)
        and "alpha: send activation 0 to beta, waits for data" in player.map.map
    )
    assert 'data-times="0.4:0.5"' in player.map.map  # by which the page moves packets
    assert "waits for data" in player.table.value and "2.0 MB of 800 MB" in player.table.value


def test_another_timeline_can_be_chosen() -> None:
    player = SchedulePlayer(
        {"one": TIMELINE, "other": replace(TIMELINE, title="Another <step>", spans=TIMELINE.spans[:1])}
    )
    assert "A step" in player.figure.heading.value
    traces = len(player.figure.shown.data)
    player.slider.value = TICKS
    player.choice.value = "other"
    assert "Another" in player.figure.heading.value and len(player.figure.shown.data) < traces
    assert player.time_s == pytest.approx(0.4) and player.figure.shown.layout.shapes[0].x0 == pytest.approx(400)


def test_all_timelines_are_saved_as_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    player, sent = SchedulePlayer({"one": TIMELINE, "other": TIMELINE}), list[Any]()
    monkeypatch.setattr(player.trace, "send", sent.append)
    player.trace._handle_custom_msg({"kind": "asked"}, [])
    [message] = sent
    steps = {event["name"] for event in json.loads(message["text"])["traceEvents"] if event.get("cat") == "step"}
    assert message["name"].endswith("-trace.json") and steps == {"one", "other"}
