"""The benchmark of the ring: its sides train the same mini-batches, and a point compares what runs took."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import made_up_report
import pytest

from workbench import experiment
from workbench.core.errors import ConfigError
from workbench.methods.base import Event
from workbench.runtime.memory import MemoryReading
from workbench_studies.bench.ringada import (
    JOB,
    MINI_BATCHES,
    SIDES,
    Side,
    Watch,
    bench,
    bounds,
    cluster_of,
    depth_table,
    side_table,
    small_jobs,
)


def test_its_sides_train_as_many_samples_and_the_ring_wins_in_the_simulation() -> None:
    seconds, nbytes = {}, {}
    for name, job in SIDES.items():
        job, cluster = replace(job, model="tiny-bert"), cluster_of("unequal,1000")
        report = experiment.run(job, cluster, "simulate")
        assert sum(step.samples for step in report.steps) == pytest.approx(JOB.batch_size * MINI_BATCHES, rel=0.1)
        seconds[name] = sum(step.predicted_s or 0.0 for step in report.steps)
        bound_s, peaks = bounds(job, cluster, report.plan)
        nbytes[name] = max(peaks.values())[0]
        assert len(peaks) == (6 if "unfreeze_every" in job.options else 1) and all(
            0 < bare <= whole for whole, bare in peaks.values()
        )
        assert bound_s <= seconds[name] * 1.001
    assert seconds["RingAda"] < seconds["PipeAdapter"]
    assert nbytes["RingAda"] < nbytes["Single"]


def test_a_point_compares_round_by_round_and_by_trained_layers() -> None:
    example_report = made_up_report.report()
    layers, size = example_report.plan.num_layers, example_report.job.batch_size

    def side(seconds: float, lowest: int | None = None) -> Side:
        step = replace(
            example_report.steps[0], samples=2 * size, predicted_s=2.0, measured_s=seconds, lowest_trained=lowest
        )
        runs = [
            replace(example_report, steps=(replace(step, measured_s=one),), valid=seconds != 9.0)
            for one in (seconds, 2 * seconds)
        ]
        return Side(
            reports=runs, watched=[[7_000_000], []], busiest_s=1.5, peaks={layers - (lowest or 0): (40_000_000, 4)}
        )

    sides = {"RingAda": side(2.0, 0), "PipeAdapter": side(3.0), "PipeAdapter stashing": side(1.0), "Single": side(6.0)}
    results = {row["side"]: row for row in side_table("equal,125", sides)}
    assert results["Single"]["over_RingAda"] == 3.0 and results["PipeAdapter"]["over_RingAda"] == 1.5
    assert results["RingAda"]["over_simulated"] == 1.5 and results["RingAda"]["over_bound"] == 2.0
    assert results["RingAda"]["step_off"] == 0.5 and results["RingAda"]["step_off_p95"] == 1.0
    assert (
        results["Single"]["spread"] == "3.00-3.00"
        and results["Single"]["MB_measured"] == 7.0
        and results["Single"]["valid"]
    )
    [row] = depth_table("equal,125", sides)
    assert (
        row["trained"] == layers
        and row["s"] == 1.5
        and row["PipeAdapter stashing over it"] == 0.5
        and row["of_Single"] == 1.0
    )
    assert row["at_most_.36"] == "no / no"
    assert row["MB"] == row["Single MB"] == "40 / 7"
    assert not side_table("equal,125", {**sides, "Single": side(9.0)})[-1]["valid"]


def test_a_larger_model_trains_smaller_mini_batches() -> None:
    jobs = small_jobs("a folder")
    assert {job.micro_batches for job in jobs.values()} == {1, 4} and jobs["RingAda"].options["unfreeze_every"] == 2
    assert all((job.train_samples or 0) * job.epochs == job.batch_size * MINI_BATCHES for job in jobs.values())


def test_a_steps_peak_counts_from_the_beginning_of_the_training(monkeypatch) -> None:
    megabyte, now = 2**20, {"rss_bytes": 60, "peak_rss_bytes": 90, "anonymous_bytes": 50}
    reading = lambda pid: MemoryReading(data_bytes=0, **{key: value * megabyte for key, value in now.items()})  # noqa: E731
    monkeypatch.setattr("workbench_studies.bench.ringada.read_memory", reading)
    with subprocess.Popen(["sleep", "60"]) as child:
        watch = Watch()
        watch(Event("phase", stage="train"))
        now |= {"rss_bytes": 65, "peak_rss_bytes": 70, "anonymous_bytes": 55}
        watch(Event("step"))
        child.kill()
    assert watch.peak_bytes == [10 * megabyte]


def test_only_its_rates_can_be_chosen() -> None:
    with pytest.raises(
        ConfigError, match=r"'7' of the benchmark was asked for. There are equal, 1000, 125, unequal, bert-base"
    ):
        bench(print, only=["7"])
