from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_report import timeline

from workbench.core import Op, Span, Timeline
from workbench.plots import gantt, memory, style
from workbench.plots.gantt import COMPUTE, MAX_BARS, SENDING


def traces(figure):
    return {trace.name: trace for trace in figure.data}


def test_each_class_of_operation_is_one_trace_of_bars() -> None:
    result = traces(gantt(timeline()))
    assert set(result) == {"idle", "forward", "side forward", "side backward", "send", "receive", "optimizer"}
    forward = result["forward"]
    assert list(forward.base) == [0.0, 3.0]
    assert list(forward.x) == [1.0, 3.0]
    assert list(forward.y) == pytest.approx([0 + COMPUTE[0], 1 + COMPUTE[0]])
    assert list(forward.text) == ["0", "0"]
    assert list(result["send"].y) == pytest.approx([SENDING[0]])
    assert forward.marker.color == style.BLUE


def test_colours_are_distinct_and_from_the_palette() -> None:
    compute = [
        style.COLOURS[name]
        for name in ("forward", "side forward", "backward", "side backward", "optimizer", "send", "idle")
    ]
    assert len(set(compute)) == len(compute)


def test_idle_lies_behind_the_whole_lane_and_says_its_share() -> None:
    idle = traces(gantt(timeline()))["idle"]
    assert list(idle.x) == [10.0, 10.0]
    assert [text.split()[-1] for text in idle.hovertext] == ["60%", "50%"]  # 4 of 10 s and 5 of 10 s are busy


@pytest.mark.parametrize(
    ("source", "fidelity", "said"),
    [("simulated", "", "(simulated)"), ("emulated", "kernel", "(emulated, kernel links)"), ("real", "", "(real)")],
)
def test_title_says_what_the_numbers_are(source: str, fidelity: str, said: str) -> None:
    assert said in gantt(timeline(source, fidelity)).layout.title.text


def test_the_bound_of_real_devices_clocks_is_in_sight() -> None:
    assert "clocks" not in gantt(timeline()).layout.title.subtitle.text
    figure = gantt(replace(timeline("real"), clock_bound_s=0.004))
    assert "clocks agree to within 0.004 s" in figure.layout.title.subtitle.text.replace(style.BREAK, " ")


def test_note_is_in_sight() -> None:
    figure = gantt(timeline(), note="host too busy")
    assert "host too busy" in figure.layout.title.subtitle.text
    assert figure.layout.title.subtitle.font.color == style.VERMILLION


def test_lateness_and_bytes_are_in_the_hover() -> None:
    result = traces(gantt(timeline()))
    assert "late" in result["optimizer"].hovertext[0]
    assert "4.0 MB" in result["send"].hovertext[0]
    assert "rank 0 to rank 1" in result["send"].hovertext[0]


def test_two_compute_streams_share_the_lane() -> None:
    spans = (Span(0, Op("F", 0, 0), 0, 1), Span(0, Op("F", 0, 1, stream="compute.1"), 0, 1))
    forward = traces(gantt(Timeline(source="simulated", device_names=("a",), spans=spans)))["forward"]
    upper, lower = forward.y
    assert lower - upper == pytest.approx(COMPUTE[1] / 2)
    assert list(forward.width) == pytest.approx([COMPUTE[1] / 2] * 2)


def test_label_that_does_not_fit_is_left_out() -> None:
    spans = (Span(0, Op("F", 0, 0), 0, 99.9), Span(0, Op("F", 0, 1), 99.9, 100))
    assert list(traces(gantt(Timeline(source="simulated", device_names=("a",), spans=spans)))["forward"].text) == [
        "0",
        "",
    ]


def many(num_devices: int, operations: int) -> Timeline:
    spans = tuple(Span(rank, Op("F", rank, at), at, at + 1) for rank in range(num_devices) for at in range(operations))
    return Timeline(source="simulated", device_names=tuple(f"d{rank}" for rank in range(num_devices)), spans=spans)


def test_all_of_32_devices_with_thousands_of_spans_are_drawn() -> None:
    figure = gantt(many(32, 400))
    assert len(traces(figure)["forward"].x) == 32 * 400
    assert len(figure.layout.yaxis.ticktext) == 32
    assert len(figure.data) == 2


def test_too_much_for_a_browser_draws_fewer_devices_and_says_so() -> None:
    figure = gantt(many(200, 500))
    shown = len(figure.layout.yaxis.ticktext)
    assert len(traces(figure)["forward"].x) == shown * 500 <= MAX_BARS
    assert f"{shown} of 200 devices shown" in figure.layout.title.subtitle.text
    assert figure.layout.yaxis.ticktext[-1].startswith("199")


def test_one_endless_device_draws_the_beginning_and_says_so() -> None:
    figure = gantt(many(1, MAX_BARS + 1000))
    assert len(traces(figure)["forward"].x) == MAX_BARS
    assert "the first 16,000 s shown" in figure.layout.title.subtitle.text


def test_a_step_that_is_not_kept_is_said() -> None:
    for draw in (gantt, memory):
        assert "before the devices changed" in draw(None).layout.annotations[0].text


def test_nothing_executed_is_said() -> None:
    figure = gantt(Timeline(source="simulated", device_names=("a",), spans=()))
    assert "Nothing was executed" in figure.layout.annotations[0].text
