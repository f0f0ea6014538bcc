from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from widget_reports import CLUSTER, PLAN, make_report

from tests.plans import query_plan
from workbench.core.report import StepRecord, SweepPoint
from workbench.core.summary import headline
from workbench.widgets import Table, lines, output_folder, plan_table, report_table, sweep_table, tiny


def test_a_table_is_aligned_as_text_and_escaped_as_html() -> None:
    table = Table(("name", "n"), [("a<b", 1), ("longer", 20)], title="Title", note="Note")
    assert str(table) == "Title\nname     n\na<b      1\nlonger  20\nNote"
    assert "a&lt;b" in table._repr_html_() and "<b>Title</b>" in table._repr_html_()


def test_columns_of_numbers_are_flush_right_and_notes_wait_until_asked() -> None:
    table = Table(("name", "ms"), [("a", "7.5 (!)"), ("b", "1,200")], title="T", more=["one", "<two>"])
    html = table._repr_html_()
    assert html.count("text-align:right") == 3 and html.count("text-align:left") == 3
    assert "<details><summary>2 notes</summary>" in html and "&lt;two&gt;" in html
    assert str(table).endswith("one\n<two>")


def test_plan_table_names_devices_and_who_is_idle() -> None:
    text = str(plan_table(PLAN, CLUSTER))
    assert "stage 0        0-3" in text and "beta 8" in text
    assert "Idle in the first epoch: gamma, delta." in text


def test_report_table_compares_epochs_and_steps() -> None:
    text = str(report_table(make_report()))
    assert "8.0 s through the backbone" in text
    assert "2.0 s from the activation cache, 4.0 times shorter" in text
    assert (
        "100 ms predicted (simulated), 200 ms measured (simulated)" in text
        and "layers 0-3 on alpha (8 samples)" in text
    )


def test_a_report_begins_with_its_result_in_a_sentence() -> None:
    report = replace(make_report(mode="execute"), chosen_epoch=1)
    assert headline(report) == (
        "Accuracy 0.75 on the test split after 1 epoch; an epoch from the cache is 4.0 times shorter;"
        " steps were predicted within 50.0% (median)."
    )
    assert str(report_table(report)).startswith("Accuracy 0.75")
    swept = replace(
        report, sweep=(SweepPoint(name="mine", plan=PLAN, predicted_s=0.19, measured_s=0.2, overrun_share=0.2),)
    )
    assert "plans were predicted within 5.0% (!) (median)" in headline(swept)
    assert "50.0% (!)" in headline(replace(report, valid=False)) and "shorter (!)" in headline(
        replace(report, valid=False)
    )
    slower = make_report(first_s=2.0, cached_s=3.0)
    assert "an epoch from the cache is 1.5 times longer" in headline(slower)
    timed = replace(report, metrics={}, epochs=())
    assert headline(replace(timed, steps=report.steps[:1])).startswith("A step takes 200 ms (simulated)")
    assert headline(replace(timed, steps=(replace(report.steps[0], measured_s=588.0),))).startswith(
        "A step takes 588 s "
    )
    faster = tuple(replace(step, measured_s=0.01) if step.cached else step for step in report.steps)
    assert headline(replace(timed, steps=faster)).startswith("A step of the first epoch takes 200 ms (simulated)")


@pytest.mark.parametrize(("last_s", "timed"), [(0.2, "4"), (None, "4, 3 of them timed")])
def test_report_table_says_how_many_steps_of_forward_passes_were_timed(last_s: float | None, timed: str) -> None:
    """A step in which a device dies is made, and not timed."""
    measured = (0.2, 0.2, 0.2, last_s)
    steps = tuple(
        StepRecord(epoch=0, step=step, samples=8, cached=False, predicted_s=0.1, measured_s=seconds)
        for step, seconds in enumerate(measured)
    )
    plan = query_plan((6, {0: 3, 1: 1}))
    rows = report_table(replace(make_report(), plan=plan, steps=steps, mode="execute")).rows
    assert ("Steps", timed) in rows and ("", "layers 0-5 on alpha (3 queries) and beta (1 query)") in rows
    simulated = tuple(replace(step, measured_s=None) for step in steps)
    assert ("Steps", "4") in report_table(replace(make_report(), plan=plan, steps=simulated)).rows


@pytest.mark.parametrize("measured_s", [None, 0.2])
def test_sweep_table_shows_the_deviation_where_it_was_measured(measured_s: float | None) -> None:
    table = sweep_table([SweepPoint(name="mine", plan=PLAN, predicted_s=0.19, measured_s=measured_s)])
    assert ("-5.0%" in str(table)) == (measured_s is not None)
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_lines_names_axes_and_what_the_numbers_are() -> None:
    figure = lines({"a": [(1, 2), (10, 3)]}, title="T", label="simulated", x_title="x", y_title="y", logarithmic="x")
    assert figure.layout.xaxis.type == "log" and "(simulated)" in figure.layout.title.text and figure.data[0].showlegend


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("", False), ("0", False)])
def test_tiny_follows_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, expected: bool) -> None:
    monkeypatch.setenv("WORKBENCH_TINY", value)
    assert tiny() is expected
    # A test's tiny run must not replace the figures of a real one.
    assert (output_folder("x") == Path("../figures/x")) is not expected


def test_measured_times_of_an_invalid_run_are_marked() -> None:
    valid = make_report(mode="execute")
    invalid = str(report_table(replace(valid, valid=False, overrun_share=0.3)))
    for measured in (
        "8.0 s (!) through",
        "2.0 s (!) from",
        "4.0 times shorter (!)",
        "200 ms (!) measured",
        "(!) Host too busy: 30%",
    ):
        assert measured in invalid
    assert "100 ms predicted" in invalid and "accuracy 0.75" in invalid and "(!)" not in str(report_table(valid))
    point = SweepPoint(name="a", plan=PLAN, predicted_s=0.1, measured_s=0.2, overrun_share=0.2)
    assert "200 (!)" in str(sweep_table([point])) and "(!)" not in str(sweep_table([replace(point, overrun_share=0.0)]))
