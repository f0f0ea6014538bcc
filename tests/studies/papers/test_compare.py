"""The comparisons of all methods: their points, and what ships of them."""

from __future__ import annotations

import pytest

from workbench.core.serial import from_json
from workbench_studies.papers import COMPARE, Result, find_item
from workbench_studies.papers.compare.boards import point
from workbench_studies.papers.compare.picture import COLUMNS
from workbench_studies.papers.result import paper_folder


def shipped(name):
    return from_json((paper_folder(COMPARE) / "results" / f"{name}.json").read_text("utf-8"), Result, source=name)


def test_a_fast_link_helps_and_slow_wifi_does_not():
    slow, fast = (point("train", "all-MiniLM-L6-v2", 2, rate) for rate in (20, 2500))
    assert slow.speedup < 1 < 1.9 < fast.speedup < 2.001
    assert (slow.term, fast.term) == ("bandwidth", "compute")


def test_a_model_too_large_for_one_board_has_no_speedup_and_an_encoder_generates_nothing():
    large, encoder = point("train", "Llama2-7B", 2, 1000), point("decode", "DistilBERT", 2, 1000)
    assert large.seconds and large.alone_s is None and large.speedup is None
    assert encoder.seconds is None and encoder.way == ""


@pytest.mark.parametrize("labels", [("train", "DistilBERT", 2, 100), ("decode", "SmolLM2-135M", 4, 500)])
def test_the_shipped_points_are_those_of_the_code(labels):
    result = shipped("boards")
    [row] = [
        row
        for row in map(dict, (zip(COLUMNS, row, strict=True) for row in result.tables[0].rows))
        if (row["task"], row["model"], row["boards"], row["Mbit/s"]) == labels
    ]
    task, model, count, rate = labels
    made = point(task, model, count, rate)
    assert (row["best way"], row["decides"]) == (made.way, made.term)
    assert row["speedup"] == pytest.approx(made.speedup)


def test_the_picture_has_a_panel_for_each_task_and_number_of_boards():
    [drawn] = find_item(COMPARE, "boards").draw(shipped("boards"))
    lines = [trace for trace in drawn.figure.data if trace.type == "contour" and trace.contours.type == "constraint"]
    assert len(lines) == 6 and all(line.contours.value == 0 for line in lines)
    letters = {letter for trace in drawn.figure.data if trace.type == "scatter" for letter in trace.text}
    assert {"C", "B", "L"} <= letters <= {"C", "B", "L", "W"}
