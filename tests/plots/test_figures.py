from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from made_up_report import cluster, report, timeline

from tests.clusters import cluster_of
from workbench.core import MemorySample
from workbench.core.report import Recovery, busy_note
from workbench.core.summary import summary_rows
from workbench.plots import (
    breakdown,
    curves,
    epoch_times,
    gantt,
    memory,
    overlay,
    predicted_against_measured,
    style,
    time_by_class,
)
from workbench.plots import cluster as cluster_figure
from workbench.plots.memory import MAX_POINTS
from workbench.plots.overlay import smoothed
from workbench.plots.style import BREAK


def named(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_a_subtitle_of_several_lines_keeps_them() -> None:
    lines = ["yours: " + "short " * 15, "another"]
    figure = style.finish(go.Figure(), title="Three", label="", subtitle="<br>".join(lines))
    first, second, third = figure.layout.title.subtitle.text.split(BREAK)
    assert f"{first} {second}" == lines[0].strip() and third == "another"


def test_memory_has_a_panel_per_device_against_its_budget() -> None:
    figure = memory(timeline())
    [fast], [slow] = named(figure, "fast"), named(figure, "slow")
    assert list(fast.y) == [100, 180, 180]
    assert list(fast.x) == [0, 2, 10]
    assert [list(trace.y) for trace in named(figure, "budget")] == [[150, 150], [200, 200]]
    assert (fast.line.color, slow.line.color) == (style.VERMILLION, style.BLUE)
    headings = [annotation.text for annotation in figure.layout.annotations]
    assert any("fast: peak 180 MB of 150 MB: too much" in heading for heading in headings)
    assert "(simulated)" in figure.layout.title.text


def test_a_budget_far_above_the_bytes_in_use_does_not_press_the_curve_flat() -> None:
    figure = memory(replace(timeline(), budget_bytes=(900_000_000, 300_000_000)))
    assert len(named(figure, "budget")) == 1  # the heading of the other panel names its budget
    assert [axis.range[1] for axis in figure.select_yaxes()] == pytest.approx([336, 336])
    assert any("peak 180 MB of 900 MB" in annotation.text for annotation in figure.layout.annotations)


def test_memory_in_use_stands_beside_the_bytes_of_values() -> None:
    figure = memory(replace(timeline(), in_use_bytes=(250_000_000, 0)))
    assert [list(trace.y) for trace in named(figure, "in use")] == [[250, 250]]
    headings = [annotation.text for annotation in figure.layout.annotations]
    assert any("peak 180 MB of values, 250 MB in use, of 150 MB" in heading for heading in headings)
    example_report = report()
    measured = replace(example_report.timelines["first epoch, measured"], in_use_bytes=(250_000_000, 0))
    rows = dict(
        summary_rows(replace(example_report, timelines=example_report.timelines | {"first epoch, measured": measured}))
    )
    assert rows["Memory"].startswith("fast 180 and 250 MB (first epoch")


def test_memory_keeps_the_peak_when_it_thins_out() -> None:
    samples = tuple(MemorySample(float(at), 7_000_000_000 if at == 4_999 else 1_000) for at in range(10_000))
    figure = memory(replace(timeline(), memory=(samples, ()), budget_bytes=()))
    [fast] = named(figure, "fast")
    assert len(fast.y) <= MAX_POINTS + 1
    assert max(fast.y) == 7.0


def test_memory_without_samples_says_so() -> None:
    assert "No memory" in memory(replace(timeline(), memory=())).layout.annotations[0].text


def test_predicted_against_measured_takes_the_sweep() -> None:
    figure = predicted_against_measured(report())
    [points] = named(figure, "plan")
    assert list(points.x) == pytest.approx([1000, 950, 800])
    assert list(points.y) == pytest.approx([1000, 1000, 1000])
    assert "median deviation 5.0%" in figure.layout.title.text.replace(BREAK, " ")
    assert "2 of 3 plans within 10%" in figure.layout.title.subtitle.text
    assert "simulated against emulated, kernel links" in figure.layout.title.text
    [band] = named(figure, "within 10%")
    assert [y / x for x, y in zip(band.x, band.y, strict=True)] == pytest.approx([1.1, 1.1, 0.9, 0.9])
    [equal] = named(figure, "equal")
    assert list(equal.x) == list(equal.y)


def test_predicted_against_measured_falls_back_on_steps() -> None:
    figure = predicted_against_measured(replace(report(), sweep=()))
    assert len(named(figure, "step through the backbone")[0].x) == 2
    assert len(named(figure, "step from the cache")[0].x) == 4
    assert "median deviation 20.0%" in figure.layout.title.text.replace(BREAK, " ")


def test_names_of_crowded_points_do_not_collide() -> None:
    crowd = tuple(
        replace(report().sweep[0], name=f"plan {n}", predicted_s=1 + n * 1e-4, measured_s=1 + n * 1e-4)
        for n in range(10)
    )
    [points] = named(predicted_against_measured(replace(report(), sweep=crowd)), "plan")
    placed = [place for text, place in zip(points.text, points.textposition, strict=True) if text]
    assert 1 <= len(placed) < 10  # one spot has room for some of them only; the hover has all
    assert list(points.hovertext) == [f"plan {n}" for n in range(10)]


def test_simulated_run_has_nothing_to_compare() -> None:
    assert "Nothing was measured" in predicted_against_measured(report(executed=False)).layout.annotations[0].text


@pytest.mark.parametrize("figure", [predicted_against_measured, epoch_times])
def test_invalid_run_carries_the_note(figure) -> None:
    assert "Host too busy: 23%" in figure(replace(report(valid=False), sweep=())).layout.title.subtitle.text
    assert "busy" not in (figure(report()).layout.title.subtitle.text or "")


def test_a_sweep_is_marked_for_its_own_plans_and_not_for_the_run_beside_it() -> None:
    busy, quiet = report(valid=False), report()
    clean = predicted_against_measured(busy).to_json()  # the run's host was busy, the sweep's was not
    assert "(!)" not in clean and "busy" not in clean
    assert dict(summary_rows(busy))["Prediction"] == "median deviation 5.0% over 3 plans"
    late = replace(quiet, sweep=(replace(quiet.sweep[0], overrun_share=0.2), *quiet.sweep[1:]))
    figure = predicted_against_measured(late)
    [plans] = named(figure, "plan")
    assert [text.strip() for text in plans.text] == ["[6] (!)", "[3, 3]", "[2, 4]"]
    assert list(plans.marker.symbol) == ["circle-open", "circle", "circle"]
    assert "deviation 5.0% (!)" in figure.layout.title.text and "host too busy" in figure.layout.yaxis.title.text
    assert "during 1 of 3 plans: up to 20% of the paced time" in figure.layout.title.subtitle.text


def test_every_measured_number_of_an_invalid_run_is_marked() -> None:
    busy, quiet = report(valid=False), report()
    bars = [trace.text for trace in epoch_times(busy).data if trace.text]
    assert bars == [("2 s (!)",), ("0.25 s (!)", "0.25 s (!)")]
    figure = predicted_against_measured(replace(busy, sweep=()))
    for steps in (trace for trace in figure.data if str(trace.name).startswith("step")):
        assert all(text.strip().endswith("(!)") for text in steps.text if text)
        assert set(steps.marker.symbol) <= {"circle-open", "diamond-open"}
    assert "deviation 20.0% (!)" in figure.layout.title.text and "host too busy" in figure.layout.yaxis.title.text
    note = busy_note(busy)
    chart = gantt(busy.timelines["first epoch, measured"], note=note)
    assert "10 s (!) in all" in chart.layout.title.subtitle.text and chart.layout.xaxis.title.text == "time (s) (!)"
    panels = breakdown(busy.timelines, note=note).layout
    assert (panels.xaxis.title.text, panels.xaxis2.title.text) == ("time (s)", "time (s) (!)")
    for figure in (
        epoch_times(quiet),
        predicted_against_measured(quiet),
        gantt(quiet.timelines["first epoch, measured"]),
    ):
        assert "(!)" not in figure.to_json()


def test_the_panels_of_one_step_have_one_range() -> None:
    slower = replace(
        timeline(), source="emulated", spans=tuple(span._replace(end_s=2 * span.end_s) for span in timeline().spans)
    )
    figure = breakdown(
        {"first epoch, predicted": timeline(), "first epoch, measured": slower, "from the cache, predicted": timeline()}
    )
    first, second, third, _ = [axis.range for axis in figure.select_xaxes()]
    assert first == second == (0, 2 * third[1])


def test_no_button_of_a_figure_uploads_or_selects() -> None:
    removed = set(curves(report()).layout.modebar.remove)
    assert {"sendChartToCloud", "select2d", "lasso2d"} <= removed
    renderers = style.notebook_renderers()
    assert all(renderers[name].config["displaylogo"] is False for name in ("plotly_mimetype", "notebook"))


def test_figures_are_made_without_what_a_notebook_shows_them_with() -> None:
    """nbformat and what it imports take seven times as long as plotly's figures."""
    words = (
        "import sys, workbench.plots as plots, plotly.graph_objects as go; go.Figure(layout={'title': 'a'}).to_html(); "
        "print({'nbformat', 'jsonschema', 'IPython'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_curves_show_every_step_and_epochs_from_one() -> None:
    figure = curves(report())
    [loss] = named(figure, "loss of a step")
    assert list(loss.x) == [1, 2, 3, 4, 5, 6]
    assert list(loss.y) == pytest.approx([0.7, 0.7, 0.6, 0.6, 0.5, 0.5])
    [accuracy] = named(figure, "validation accuracy")
    assert list(accuracy.x) == [1, 2, 3]
    assert list(accuracy.y) == pytest.approx([0.7, 0.75, 0.8])
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert {"epoch 1", "epoch 2, cached", "epoch 3, cached"} <= set(texts)
    assert "accuracy 0.800" in figure.layout.title.subtitle.text
    assert not named(figure, "trained layers")


def test_curves_and_summary_show_when_layers_are_unfrozen() -> None:
    reference = report()
    steps = tuple(replace(step, lowest_trained=max(0, 5 - number // 2)) for number, step in enumerate(reference.steps))
    unfrozen = replace(reference, steps=steps)
    [trained] = named(curves(unfrozen), "trained layers")
    assert (list(trained.y), trained.yaxis) == ([1, 1, 2, 2, 3, 3], "y2")
    assert ("Trained", "layers from the top: 1 from step 1, 2 from step 3, 3 from step 5") in summary_rows(unfrozen)
    assert "Trained" not in dict(summary_rows(reference))


def test_curves_show_where_a_device_was_lost() -> None:
    lost = Recovery(what="kill slow", step=3, noticed_s=0.1, planned_s=0.2, resumed_s=0.2)
    figure = curves(replace(report(), recoveries=(lost,)))
    [mark] = [annotation for annotation in figure.layout.annotations if "kill" in annotation.text]
    assert (mark.x, mark.text) == (3.5, "kill slow, 0.5 s")


@pytest.mark.parametrize(
    ("axis", "at", "ends"),
    [
        ("steps", [1, 2, 3, 4, 5, 6], [2, 4, 6]),
        ("epochs", [0.5, 1, 1.5, 2, 2.5, 3], [1, 2, 3]),
        ("seconds", [1, 2, 2.125, 2.25, 2.375, 2.5], [2, 2.25, 2.5]),
    ],
)
def test_trainings_lie_over_each_other(axis: Any, at: list[float], ends: list[float]) -> None:
    """Two runs of one series are its mean; only a single run has a chosen epoch; the lowest loss is marked."""
    one = replace(report(), chosen_epoch=2)
    higher = replace(one, steps=tuple(replace(step, loss=step.loss + 0.2) for step in one.steps))
    figure = overlay({"one": [one], "both": [one, higher], "simulated": [report(executed=False)]}, axis=axis)
    loss, lowest, metric, star = named(figure, "one")
    assert list(loss.x) == pytest.approx(at) and list(metric.x) == pytest.approx(ends)
    assert (lowest.x[0], lowest.y[0]) == pytest.approx((at[4], 0.5)) and star.x[0] == pytest.approx(ends[1])
    mean_loss, _, mean_metric = named(figure, "both")
    assert list(mean_loss.y) == pytest.approx([0.8, 0.8, 0.7, 0.7, 0.6, 0.6])
    assert list(mean_metric.y) == pytest.approx(list(metric.y)) and not named(figure, "simulated")
    assert [trace.name for trace in figure.data if trace.showlegend] == ["one", "both"]


def test_smoothing_keeps_a_constant_and_the_losses_stay_visible() -> None:
    assert smoothed([2.0, 2.0, 2.0], 0.9) == pytest.approx([2.0] * 3) and smoothed([1.0, 3.0], 0.0) == [1.0, 3.0]
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, (0.25 + 1.5) / 0.75])
    pale, smooth, *_ = named(overlay({"one": [report()]}, smoothing=0.5), "one")
    assert pale.opacity < 1 and not pale.showlegend and smooth.y[2] > pale.y[2]
    text = overlay({"one": [report(executed=False)]}).layout.annotations[0].text
    assert "None of these runs has losses" in text


def test_epoch_times_with_and_without_cache() -> None:
    figure = epoch_times(report())
    [full], [cached] = named(figure, "through the backbone"), named(figure, "from the activation cache")
    assert (list(full.x), list(full.y)) == ([1], [2.0])
    assert (list(cached.x), list(cached.y)) == ([2, 3], [0.25, 0.25])
    assert "8.0 times shorter" in figure.layout.title.subtitle.text
    [predicted] = named(figure, "predicted (simulated)")
    assert list(predicted.y) == pytest.approx([1.6, 0.2, 0.2])


def test_breakdown_adds_up_to_the_makespan() -> None:
    fast, slow = time_by_class(timeline())
    assert fast == pytest.approx({"forward": 1, "side forward": 1, "waiting for data": 1, "idle": 5, "optimizer": 2})
    assert slow == pytest.approx({"idle": 4, "waiting for data": 1, "forward": 3, "side backward": 2})


def test_hidden_transfer_costs_nothing() -> None:
    from workbench.core import Op, Span, Timeline, Value
    from workbench.core.schedule import send

    spans = (Span(0, Op("F", 0, 0), 0, 4), Span(0, send(Value("x"), 0, 1), 1, 3, 8), Span(0, Op("B", 0, 0), 3, 5))
    [seconds] = time_by_class(Timeline(source="simulated", device_names=("a",), spans=spans))
    assert seconds == pytest.approx({"forward": 4, "backward": 1})


def test_breakdown_has_one_legend_entry_per_class() -> None:
    figure = breakdown({"predicted": timeline(), "measured": timeline("emulated", "paced")})
    in_legend = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(in_legend) == sorted(set(in_legend))
    assert "simulated and emulated, paced links" in figure.layout.title.text


def test_cluster_shows_speed_memory_and_link() -> None:
    figure = cluster_figure(cluster())
    assert [list(trace.x) for trace in figure.data] == [[0.5, 0.25], [5, 2.5], [400, 400], [1000, 1000]]
    assert [trace.name for trace in figure.data][:2] == ["share of a core (emulated)", "sustained GFLOP/s (fp32)"]


def test_described_cluster_is_not_called_measured() -> None:
    figure = cluster_figure(cluster_of(1, flops_per_s=8e9, memory_bytes=4 * 10**9, bytes_per_s=62.5e6))
    assert list(figure.data[0].x) == [8.0]
    assert "as described, not measured" in figure.layout.title.text
