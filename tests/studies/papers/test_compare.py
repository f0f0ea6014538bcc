"""The comparisons of all methods: their points, and what ships of them."""

from __future__ import annotations

import math
from dataclasses import replace
from operator import itemgetter

import pytest

from workbench.core.job import Job
from workbench.methods import load_method
from workbench_studies.papers import COMPARE, find_item
from workbench_studies.papers.compare import air, estimators
from workbench_studies.papers.compare import boards_executed as executed
from workbench_studies.papers.compare.boards import TOKENS, point
from workbench_studies.papers.compare.methods import compared
from workbench_studies.papers.compare.picture import figure
from workbench_studies.papers.compare.runs import SAME_LEARNING, SERVING, TRAININGS, Run, simulated, training
from workbench_studies.papers.drawing import pareto
from workbench_studies.papers.result import Settings, shipped_result


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
    result = shipped_result(COMPARE, "boards")
    [row] = [
        row for row in result.tables[0].records if (row["task"], row["model"], row["boards"], row["Mbit/s"]) == labels
    ]
    task, model, count, rate = labels
    outcome = point(task, model, count, rate)
    assert (row["best way"], row["decides"]) == (outcome.way, outcome.term)
    assert row["speedup"] == pytest.approx(outcome.speedup)


def test_the_picture_has_a_panel_for_each_task_and_number_of_boards():
    [drawn] = find_item(COMPARE, "boards").draw(shipped_result(COMPARE, "boards"))
    lines = [trace for trace in drawn.figure.data if trace.type == "contour" and trace.contours.type == "constraint"]
    assert len(lines) == 6 and all(line.contours.value == 0 for line in lines)
    letters = {
        letter
        for trace in drawn.figure.data
        if trace.type == "scatter" and trace.mode == "text"
        for letter in trace.text
    }
    assert {"C", "B", "L"} <= letters <= {"C", "B", "L", "W"}


def test_an_executed_point_is_over_one_executed_board_and_has_the_scales_colour():
    both = executed.Run(way="a", seconds=0.5, simulated_s=0.4, dilation=6.0, in_pace=True)
    alone = executed.Run(way="b", seconds=1.0, simulated_s=1.0, dilation=6.0, in_pace=True)
    place = executed.Place("train", "all-MiniLM-L6-v2", 2, 100)
    points = [
        executed.Point(place=place, run=both, alone=alone),
        executed.Point(place=place._replace(num_boards=4), run=replace(both, in_pace=False), alone=alone),
    ]
    result = executed.compared(find_item(COMPARE, "boards-executed"), points)
    row = result.tables[0].records[0]
    assert (row["speedup, executed"], row["speedup, simulated"], row["in pace"]) == (2.0, 2.5, "yes")
    assert "20.0 %" in result.findings[0] and "2 of 2" in result.findings[0] and "pace in 1" in result.findings[0]
    drawn = figure(shipped_result(COMPARE, "boards").tables[0], result.tables[0])
    [circles] = [trace for trace in drawn.data if trace.type == "scatter" and "markers" in trace.mode]
    assert circles.marker.color == (1.0,) and (circles.marker.cmin, circles.marker.cmax) == (-2, 2)


def test_the_shipped_executed_points_are_those_of_the_code():
    result = shipped_result(COMPARE, "boards-executed")
    assert [(row[0], row[1], row[2], row[3]) for row in result.tables[0].rows] == [
        tuple(one) for one in executed.PLACES
    ]


@pytest.mark.parametrize("place", [place for place in executed.PLACES if place.num_boards == 2][::4])
def test_texts_of_executed_points_have_the_pictures_tokens(place, tmp_path):
    executed.write_texts(tmp_path / "texts.jsonl", 64)
    [job, *_] = (job for _, job in executed.ways(place, tmp_path / "texts.jsonl"))
    prepared = load_method(job.method).prepare(job, print)
    assert {len(tokens) for tokens in prepared.test.ids} == {
        executed.PROMPT_TOKENS if place.task == "decode" else TOKENS
    }


def made_run(name, seconds, scores=(), *, measured=(), in_pace=True, seed=0):
    sizes = {"memory_bytes": 10**6, "sent_bytes": 0, "joules": 1.0, "dilation": 1.0}
    return Run(
        name=name,
        seed=seed,
        devices=("a",),
        scores=scores,
        epochs_s=measured,
        predicted_s=seconds,
        in_pace=in_pace,
        **sizes,
    )


def test_a_quality_is_reached_at_the_end_of_an_epoch_and_measured_seconds_count_in_pace_only():
    priced = {name: made_run(name, (2.0, 1.0)) for name in (*TRAININGS, *SAME_LEARNING, *SERVING)}
    priced["PAC+"] = made_run("PAC+", (1.0, 0.5))
    runs = {name: [made_run(name, (2.0, 1.0), (60.0, 65.0), measured=(9.0, 9.0), in_pace=False)] for name in TRAININGS}
    runs["PAC+ (one device)"] = [
        made_run("PAC+ (one device)", (2.0, 1.0), (65.0, 72.0), measured=(2.0, 1.5)),
        made_run("PAC+ (one device)", (2.0, 1.0), (67.0, 70.0), measured=(8.0, 8.0), in_pace=False, seed=1),
    ]
    result = compared(find_item(COMPARE, "methods"), priced, runs)
    ways = {row[0]: dict(zip(result.tables[0].columns, row, strict=True)) for row in result.tables[0].rows}
    one, four, ring = ways["PAC+ (one device)"], ways["PAC+"], ways["RingAda"]
    assert (one["s to 70 %"], four["s to 70 %"], ring["s to 70 %"]) == (3.0, 1.5, None)
    assert (one["s, measured"], one["s, simulated"], ring["s, measured"]) == (3.5, 3.0, None)
    assert (four["accuracy, %"], four["seeds"]) == (71.0, 2.0)
    holds = {check.claim: check.holds for check in result.checks}
    assert holds["PAC+ on four devices takes less time than on one"]
    assert len(result.tables[2].rows) == len(TRAININGS) + 1


def test_every_way_has_simulated_figures_and_a_training_is_kept(tmp_path):
    shape = Job(model="tiny-bert", train_samples=32, validation_samples=16, test_samples=8, epochs=1)
    priced = simulated(shape)
    assert set(priced) == {*TRAININGS, *SAME_LEARNING, *SERVING}
    assert all(run.ends_s[-1] > 0 and run.memory_bytes > 0 and run.joules > 0 for run in priced.values())
    assert priced["LoRA (data parallel)"].sent_bytes > 0 == priced["LoRA (one device)"].sent_bytes
    run = training("LoRA (one device)", 3, shape, Settings(workdir=tmp_path))
    assert len(run.scores) == len(run.epochs_s) == 1 and run.predicted_s == priced["LoRA (one device)"].predicted_s
    assert training("LoRA (one device)", 3, shape, Settings(workdir=tmp_path)) == run


def test_the_shipped_comparison_draws_a_line_for_every_training():
    result = shipped_result(COMPARE, "methods")
    [drawn] = find_item(COMPARE, "methods").draw(result)
    assert {trace.name for trace in drawn.figure.data} == {*TRAININGS, *SAME_LEARNING}
    assert result.environment and {row[0] for row in result.tables[2].rows} == set(TRAININGS)


@pytest.mark.parametrize(
    ("way", "count", "rate"),
    [("Confidant", 4, 200), ("RingAda", 2, 20), ("PAC+, first epoch", 4, 20), ("P-RGE", 2, 20), ("Galaxy+", 4, 20)],
)
def test_sharing_the_air_never_pays_and_the_shipped_points_are_those_of_the_code(way, count, rate):
    shared, private = (air.point("all-MiniLM-L6-v2", way, count, rate, medium) for medium in air.MEDIA)
    assert shared.speedup <= private.speedup * 1.001
    assert shared.in_use > 1 or shared.speedup == pytest.approx(1, rel=0.02)
    _, table = shipped_result(COMPARE, "air").tables
    for one in (shared, private):
        labels = ("all-MiniLM-L6-v2", way, count, one.in_use, rate, one.medium)
        [row] = [row for row in table.rows if row[:6] == labels]
        assert row[8] == pytest.approx(one.speedup)


def test_the_picture_of_shared_air_has_every_point():
    [drawn] = find_item(COMPARE, "air").draw(shipped_result(COMPARE, "air"))
    _, points = shipped_result(COMPARE, "air").tables
    assert sum(len(trace.x) for trace in drawn.figure.data) == len(points.rows)
    assert [line.x0 for line in drawn.figure.layout.shapes] == [1] * len(air.MODELS) * len(air.COUNTS)


def test_estimators_are_drawn_over_all_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained with a tiny model; the memory's processes are left out."""
    monkeypatch.setattr(estimators, "measured_in_child", lambda measure, name, model: 1_000_000 * len(name))
    item = find_item(COMPARE, "estimators")
    result = item.run(Settings(quick=True, seeds=(0,)))
    rows = {(row[0], row[1]): row for row in result.tables[0].rows}
    assert {name for name, _ in rows} == set(estimators.WAYS) and len(rows) == 2 * len(estimators.WAYS)
    passes = {name: rows[name, 4][2] / 4 / way.batch_size for name, way in estimators.WAYS.items()}
    assert list(passes.values()) == [8, 5, 8, 8, 8, 4]  # q = 4: 2q, q + 1, 2q twice, q with derivatives; LoRA's 4
    for row in rows.values():
        assert 0 <= row[6] <= 100 and min(row[3:6]) > 0
    joules = [rows[name, 4][4] for name in estimators.WAYS]
    assert joules[1] < joules[0] == pytest.approx(joules[2]) == pytest.approx(joules[3])
    assert joules[4] > 1.5 * joules[0]
    [captioned] = item.draw(result)
    assert {trace.name for trace in captioned.figure.data} == {*estimators.WAYS, "Pareto front"}


@pytest.mark.parametrize(
    ("best", "rates"), [(2, [1, 3, 9]), (10, [1, 3, 9, 27]), (500, [1, 3, 9, 27, 81]), (0.3, [1 / 9, 1 / 3, 1, 3, 9])]
)
def test_learning_rates_are_tried_until_the_best_lies_between_two(best: float, rates: list[float]) -> None:
    def training(way: estimators.Way) -> estimators.Training:
        score = -abs(math.log(way.learning_rate / best))
        return estimators.Training(way=way, seed=0, scores=(), validation_score=score, seconds=0.0)

    tried = estimators.bracketed(estimators.Way(learning_rate=3.0), training, 5)
    assert [one.way.learning_rate for one in tried] == pytest.approx(rates)


def test_the_shipped_estimators_have_three_seeds_each_and_name_their_machine() -> None:
    result = shipped_result(COMPARE, "estimators")
    points, seeds, rates = result.tables
    assert {name for name, *_ in seeds.rows} == set(estimators.WAYS)
    for name in estimators.WAYS:
        tried = [row for row in rates.rows if row[0] == name]
        [best] = [row for row in tried if row[3] == "yes"]
        assert tried[0] != best != tried[-1] and best[2] == max(row[2] for row in tried)
    assert len(seeds.rows) == 3 * len(estimators.WAYS) and result.environment["seeds"] == "0, 1, 2"
    for name in estimators.WAYS:
        ends = [float(row[2].split(", ")[-1]) for row in seeds.rows if row[0] == name]
        assert [row[6] for row in points.rows if row[0] == name][-1] == pytest.approx(sum(ends) / 3)
    assert find_item(COMPARE, "estimators").draw(result)


def test_nothing_beats_a_point_of_the_front() -> None:
    points = [(3.0, 60.0), (1.0, 50.0), (2.0, 70.0), (2.0, 65.0), (4.0, 70.0), (5.0, 71.0)]
    assert pareto(points, itemgetter(0), itemgetter(1)) == [(1.0, 50.0), (2.0, 70.0), (5.0, 71.0)]
