"""Figures of the lab on zeroth-order gradients: what they draw is what the numbers say."""

from __future__ import annotations

import math

import pytest

from workbench_labs.plots.zeroth_order import (
    ARROW,
    MAX_PROBES,
    GradientError,
    Pass,
    Probe,
    bowl,
    gradient_error,
    learning,
    roofline,
    running_mean,
    slopes,
    traffic,
)


def trace(figure, name):
    [results] = [one for one in figure.data if one.name == name]
    return results


def test_the_bowl_shows_both_points_of_every_query_and_their_mean_at_the_gradients_scale() -> None:
    probes = [Probe((1.0, 0.0), 2.0), Probe((0.0, -1.0), 1.0)]
    figure = bowl(lambda x, y: x * x + y * y, [(3.0, 0.0), (1.0, 2.0)], probes, gradient=(2.0, 0.0), epsilon=0.5)
    plus, minus = trace(figure, "θ + εz"), trace(figure, "θ − εz")
    assert (list(plus.x), list(plus.y)) == ([1.5, 1.0], [2.0, 1.5]) and (list(minus.x), list(minus.y)) == (
        [0.5, 1.0],
        [2.0, 2.5],
    )
    exact, mean = trace(figure, "exact: −∇L"), trace(figure, "their mean")
    assert exact.x[:2] == (1.0, 1.0 - ARROW) and exact.y[:2] == (2.0, 2.0)
    # The mean of g z is (1, -1/2): half as long as the gradient in x, and up.
    assert mean.x[1] == pytest.approx(1.0 - ARROW / 2) and mean.y[1] == pytest.approx(2.0 + ARROW / 4)
    assert list(trace(figure, "path").x) == [3.0, 1.0]
    contour = figure.data[0]
    assert contour.z[0][0] == pytest.approx(contour.x[0] ** 2 + contour.y[0] ** 2, abs=1e-3)


def test_of_many_queries_some_are_drawn_and_all_are_averaged() -> None:
    probes = [Probe((1.0, 0.0), 1.0)] * MAX_PROBES + [Probe((0.0, 1.0), 1.0)] * MAX_PROBES
    figure = bowl(lambda x, y: x, [(0.0, 0.0)], probes, gradient=(1.0, 0.0), epsilon=0.1)
    assert len(trace(figure, "θ + εz").x) == MAX_PROBES
    assert trace(figure, "their mean").y[1] == pytest.approx(-ARROW / 2)


def test_errors_stand_beside_what_a_plane_has() -> None:
    actual = GradientError("d = 9", 9, ((1, 11.0), (4, 2.0)))
    figure = gradient_error([actual], label="computed")
    measured, expected = (one for one in figure.data if one.legendgroup == "d = 9")
    assert list(measured.y) == [11.0, 2.0] and list(expected.y) == [10.0, 2.5]


def test_slopes_lie_on_the_diagonal_if_they_agree_and_none_are_no_error() -> None:
    figure = slopes({"ε = 1": [(1.0, 0.5), (-2.0, -2.0), (1.0, math.nan)]}, label="measured")
    points = trace(figure, "ε = 1")
    assert list(zip(points.x, points.y, strict=True))[:2] == [(1.0, 0.5), (-2.0, -2.0)]
    assert "(!) Not drawn, because they are no numbers: 1 of 'ε = 1'" in figure.layout.title.subtitle.text
    assert "Not drawn" not in (slopes({"ε = 1": [(1.0, 0.5)]}, label="measured").layout.title.subtitle.text or "")
    assert list(trace(figure, "alike").x) == list(trace(figure, "alike").y)
    assert "no query" in slopes({}, label="").layout.annotations[0].text


def test_the_roof_is_memory_left_of_the_ridge_and_arithmetic_right_of_it() -> None:
    one = Pass(parts=4, flops=8e9, weight_bytes=1e9, seconds=0.5)
    figure = roofline({"passes": [one]}, flops_per_s=40e9, bytes_per_s=10e9, label="measured")
    roof = trace(figure, "the roof")
    assert roof.x[1] == 4.0 and list(roof.y[1:]) == [40.0, 40.0] and roof.y[0] == pytest.approx(10 * roof.x[0])
    points = trace(figure, "passes")
    assert list(points.x) == [8.0] and list(points.y) == [16.0] and list(points.text) == ["4"]
    assert any("10 GB/s" in annotation.text for annotation in figure.layout.annotations)
    assert any("40 GFLOP/s" in annotation.text for annotation in figure.layout.annotations)


def test_learning_has_losses_their_mean_scores_baselines_and_the_engine() -> None:
    losses = [(1, 4.0), (2, 2.0), (3, 3.0)]
    figure = learning(losses, [(0, 0.5), (3, 0.75)], baselines={"zero-shot": 0.5}, engine=[(4, 2.5)], label="measured")
    assert list(trace(figure, "loss of a step").y) == [4.0, 2.0, 3.0] and list(trace(figure, "its mean").y) == [
        4.0,
        3.0,
        3.0,
    ]
    scores, base = trace(figure, "validation accuracy"), trace(figure, "zero-shot 0.50")
    assert scores.yaxis == "y2" and list(scores.y) == [0.5, 0.75] and list(base.y) == [0.5, 0.5] and base.x[1] == 4
    assert list(trace(figure, "loss in the engine").x) == [4]
    assert running_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.0, 1.5, 2.5, 3.5]


def test_traffic_is_drawn_in_bytes_with_their_unit() -> None:
    figure = traffic({"seeds": 32, "gradient": 4e6})
    assert list(figure.data[0].x) == [32, 4e6] and list(figure.data[0].text) == [" 32 bytes", " 4.0 MB"]
    assert figure.layout.xaxis.range[1] > math.log10(4e6)
