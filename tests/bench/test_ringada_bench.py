"""The benchmark of the ring: its sides train the same mini-batches, and a point compares what runs took."""

from __future__ import annotations

from dataclasses import replace

import made_up_report
import pytest

from workbench import experiment
from workbench.bench.ringada import JOB, MINI_BATCHES, SIDES, _cluster, bench, point
from workbench.core.errors import ConfigError


def test_its_sides_train_as_many_samples_and_the_ring_wins_in_the_simulation() -> None:
    seconds = {}
    for name, job in SIDES.items():
        job = replace(job, model="tiny-bert", train_samples=JOB.batch_size * MINI_BATCHES)
        report = experiment.run(job, _cluster(1000), "simulate")
        assert sum(step.samples for step in report.steps) == pytest.approx(JOB.batch_size * MINI_BATCHES, rel=0.1)
        seconds[name] = sum(step.predicted_s or 0.0 for step in report.steps)
    assert seconds["RingAda"] < seconds["PipeAdapter"]


def test_a_point_compares_round_by_round() -> None:
    made = made_up_report.report()

    def taking(seconds: float) -> object:
        step = replace(made.steps[0], predicted_s=2.0, measured_s=seconds)
        return replace(made, steps=(step,), valid=seconds != 9.0)

    reports = {name: [taking(one), taking(2 * one)] for name, one in (("RingAda", 2.0), ("PipeAdapter", 3.0), ("Single", 6.0))}
    found = point(125, reports)  # type: ignore[arg-type]
    assert found["Single_over_RingAda"] == 3.0 and found["PipeAdapter_over_RingAda"] == 1.5
    assert found["over_bound"] == 1.5 and found["Single_spread"] == "3.00-3.00" and found["valid"]
    assert not point(125, {**reports, "Single": [taking(9.0), taking(9.0)]})["valid"]  # type: ignore[arg-type]


def test_only_its_rates_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match=r"'7' of the benchmark was asked for. There are 1000, 125 Mbit/s"):
        bench(print, only=["7"])
