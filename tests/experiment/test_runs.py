"""What a run reports and leaves, and what it leaves alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_job import EPOCHS, two_devices

from tests.experiment.running import KEPT_AFTER_A_RUN, predicted, run
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.errors import ConfigError, DivergedError
from workbench.core.report import TRAINED_WEIGHTS, SweepPoint
from workbench.core.serial import from_json, to_json
from workbench.core.summary import summary_rows
from workbench.methods import calibration, load_method
from workbench.runtime.engines import EngineCluster, default_pool


def test_a_run_reports_every_step_and_leaves_what_the_readme_says(whole: tuple[Report, Path]) -> None:
    report, folder = whole
    assert [(epoch.epoch, epoch.cached) for epoch in report.epochs] == [(0, False), (1, True), (2, True)]
    assert all(step.loss is not None and step.predicted_s and step.measured_s for step in report.steps)
    assert {path.name for path in folder.iterdir()} == KEPT_AFTER_A_RUN
    measured = [report.timelines[f"{name} epoch, measured"] for name in ("first", "cached")]
    assert all(any(timeline.in_use_bytes) for timeline in measured) or sys.platform != "linux"
    assert Report.read(folder / "report.json").steps == report.steps
    assert report.artifacts["adapter"] == str(folder / "adapter")
    assert from_json(to_json(report), Report) == report


def test_a_simulation_counts_the_weights_that_a_run_trains(whole: tuple[Report, Path], job: Job) -> None:
    executed, simulated = whole[0], experiment.run(job, two_devices(), "simulate")
    assert simulated.bytes[TRAINED_WEIGHTS] == executed.bytes[TRAINED_WEIGHTS] > 0
    [row] = [text for label, text in summary_rows(simulated) if label == "Weights"]
    assert row == dict(summary_rows(executed))["Weights"]
    assert row.endswith(f"% are trained: {executed.bytes[TRAINED_WEIGHTS] // 4:,} numbers")


def test_the_saved_adapter_predicts_the_same_in_a_fresh_process(whole: tuple[Report, Path], job: Job) -> None:
    report, folder = whole
    payload = folder / "adapter", job.task, job.data, job.max_length
    [result] = default_pool().acquire(two_devices().part([0]), "paced").run(predicted, [payload])
    assert result == report.metrics


def test_diverged_training_is_told(job: Job, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"learning_rate = 1000.*loss is (nan|inf) in step \d of epoch 1"):
        run(replace(job, learning_rate=1e3), tmp_path)


@pytest.mark.parametrize(
    "changes", [{"epochs": 1}, {"train_samples": 3}, {"batch_size": 1, "micro_batches": 1, "train_samples": 4}]
)
def test_small_jobs(changes: dict, job: Job, tmp_path: Path) -> None:
    report = run(replace(job, **changes), tmp_path)
    assert len(report.epochs) == changes.get("epochs", EPOCHS)
    assert all(step.loss for step in report.steps)


def test_a_dilation_is_found_once_stated_and_divided_out(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[float] = []
    monkeypatch.delenv("WORKBENCH_DILATION", raising=False)

    def three_times(late_share: Callable[[float], float], **_: float) -> float:
        results.append(late_share(3.0))
        return 3.0

    monkeypatch.setattr(calibration, "find_dilation", three_times)
    monkeypatch.setattr(experiment, "BUSY_OVERRUN_SHARE", 1.0)  # however busy this machine is
    brief = replace(job, batch_size=8)
    for folder in ("first", "second"):
        report = run(brief, tmp_path / folder)
        assert report.dilation == 3
        assert any(note.startswith("Time dilation 3x") for note in report.notes)
        assert 3 * sum(step.measured_s or 0.0 for step in report.steps) < report.spent_s["train"]
        assert from_json(to_json(report), Report) == report
    assert len(results) == 1
    assert 0 <= results[0] < 1


def test_a_run_that_is_late_all_the_same_is_invalid_and_calibrated_again(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[float] = []
    monkeypatch.delenv("WORKBENCH_DILATION", raising=False)

    def not_enough(late_share: Callable[[float], float], **_: float) -> float:
        results.append(1.0)
        return 1.0

    monkeypatch.setattr(calibration, "find_dilation", not_enough)
    monkeypatch.setattr(experiment, "BUSY_OVERRUN_SHARE", -1.0)
    brief = replace(job, batch_size=4, epochs=1)
    for folder in ("first", "second"):
        report = run(brief, tmp_path / folder)
        assert (report.valid, report.dilation) == (False, 1.0)
    assert len(results) == 2


def test_a_sweep_may_have_more_steps_than_the_job(job: Job) -> None:
    """A job of two steps: both, after a warm-up, simulated and measured."""
    short = replace(job, epochs=1, train_samples=32)
    (point,) = experiment.sweep(
        short, two_devices(), {"own": experiment.plan(short, two_devices(), "execute")}, num_steps=4, fidelity="paced"
    )
    assert point.name == "own" and point.num_steps == 2
    assert point.predicted_s > 0 and point.measured_s


def test_a_sweep_begins_where_the_run_before_ended_and_leaves_a_late_round(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the devices' dilation on; the first plan that is late ends the round, and the next one measures all."""
    monkeypatch.delenv("WORKBENCH_DILATION", raising=False)
    monkeypatch.setattr(experiment, "BUSY_OVERRUN_SHARE", 0.1)
    cluster, short = two_devices(), replace(job, epochs=1, train_samples=32)
    engines = default_pool().acquire(cluster, "paced")
    measured: list[float] = []

    def sweep_point(self: object, planned: object, name: str, engines: EngineCluster | None, **_: object) -> SweepPoint:
        if engines is not None:
            measured.append(engines.dilation)
        share = 0.4 if engines is not None and engines.dilation < 3 else 0.0
        return SweepPoint(name=name, plan=plan, predicted_s=1.0, measured_s=1.0, num_steps=2, overrun_share=share)

    plan = experiment.plan(short, cluster, "execute")
    monkeypatch.setattr(type(load_method(short.method)), "sweep_point", sweep_point)
    engines.dilate(2.0)
    points = experiment.sweep(short, cluster, {"one": plan, "other": plan}, fidelity="paced")
    assert [(point.name, point.dilation) for point in points] == [("one", 4.0), ("other", 4.0)]
    assert measured == [2.0, 4.0, 4.0]


def test_files_of_other_people_stay(job: Job, tmp_path: Path) -> None:
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="holds snapshots, which no run of the workbench wrote"):
        run(job, tmp_path)
    (tmp_path / "snapshots").rename(tmp_path / "thesis")
    run(replace(job, epochs=1), tmp_path)
    run(replace(job, epochs=1), tmp_path)
    assert (tmp_path / "thesis" / "precious").read_text() == "mine"
