"""Joules for accuracy: modelled joules of executed curves, and what ships."""

from __future__ import annotations

import pytest

from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare.joules import AGAIN, FORWARD_ONLY, NAMES, Reached, front, reached
from workbench_studies.papers.result import shipped_result


def made(way: str, joules: float, accuracy: float | None) -> Reached:
    return Reached(way=way, model="m", steps=1, joules=joules, accuracy=accuracy, points=None)


def test_the_front_leaves_out_what_another_reaches_with_fewer_joules():
    several = [made("a", 1, 60), made("b", 2, 60), made("c", 3, 70), made("d", 3, 65), made("e", 4, None)]
    assert [one.way for one in front(several)] == ["a", "c"]


def test_every_curve_has_joules_and_ships_as_it_is_modelled():
    results = list(reached())
    assert {*NAMES, AGAIN, *FORWARD_ONLY} <= {one.way for one in results}
    ends = {one.way: one for one in results}
    # A backbone of F and B becomes F, F and B: at most half as many joules again, whatever else is in a step.
    assert 1.3 < ends[AGAIN].joules / ends["LoRA"].joules < 1.5
    assert ends[AGAIN].accuracy == ends["LoRA"].accuracy
    cached = [one.joules for one in results if one.way == "Parallel Adapters, cached"]
    assert cached[2] - cached[1] < cached[0] / 4  # later epochs read the cache, which the first one of several fills
    assert cached[1] - cached[0] > cached[2] - cached[1]
    shipped = shipped_result(COMPARE, "joules").tables[0].records
    assert [row["J"] for row in shipped] == pytest.approx([one.joules for one in results])
    assert [row["accuracy, %"] for row in shipped] == [one.accuracy for one in results]


def test_the_picture_has_the_front_and_a_line_for_each_executed_curve():
    [drawn] = find_item(COMPARE, "joules").draw(shipped_result(COMPARE, "joules"))
    names = [trace.name for trace in drawn.figure.data]
    assert names[0] == "Pareto front" and len(names) == 1 + len(NAMES) + 1 + len(FORWARD_ONLY)
