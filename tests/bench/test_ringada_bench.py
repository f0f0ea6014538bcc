"""The benchmark of the ring: its sides train the same mini-batches, and a point compares what runs took."""

from __future__ import annotations

from dataclasses import replace

import made_up_report
import pytest

from workbench import experiment
from workbench.bench.ringada import JOB, MINI_BATCHES, SIDES, bench, bounds, cluster_of, point
from workbench.core.errors import ConfigError


def test_its_sides_train_as_many_samples_and_the_ring_wins_in_the_simulation() -> None:
    seconds, nbytes = {}, {}
    for name, job in SIDES.items():
        job, cluster = replace(job, model="tiny-bert"), cluster_of("unequal,1000")
        report = experiment.run(job, cluster, "simulate")
        assert sum(step.samples for step in report.steps) == pytest.approx(JOB.batch_size * MINI_BATCHES, rel=0.1)
        seconds[name] = sum(step.predicted_s or 0.0 for step in report.steps)
        bound_s, nbytes[name] = bounds(job, cluster, report.plan)
        assert bound_s <= seconds[name] * 1.001
    assert seconds["RingAda"] < seconds["PipeAdapter"]
    assert nbytes["RingAda"] < nbytes["Single"]


def test_a_point_compares_round_by_round() -> None:
    made = made_up_report.report()

    def taking(seconds: float) -> object:
        step = replace(made.steps[0], predicted_s=2.0, measured_s=seconds, lowest_trained=4 if seconds < 3 else 1)
        return replace(made, steps=(step,), valid=seconds != 9.0)

    reports = {name: [taking(one), taking(2 * one)] for name, one in (("RingAda", 2.0), ("PipeAdapter", 3.0), ("Single", 6.0))}
    bound = {"RingAda": (1.5, 30), "PipeAdapter": (1.0, 40), "Single": (1.0, 100)}
    found = point("equal,125", reports, bound)  # type: ignore[arg-type]
    assert found["Single_over_RingAda"] == 3.0 and found["PipeAdapter_over_RingAda"] == 1.5
    assert found["RingAda_over_predicted"] == 1.5 and found["RingAda_over_bound"] == 2.0
    assert found["RingAda_over_predicted_by_trained_layers"] == "2: 1.000, 5: 2.000" and found["RingAda_round_off_p95"] == 1.0
    assert found["RingAda_memory_over_Single"] == 0.3 and found["Single_spread"] == "3.00-3.00" and found["valid"]
    assert not point("equal,125", {**reports, "Single": [taking(9.0), taking(9.0)]}, bound)["valid"]  # type: ignore[arg-type]


def test_only_its_rates_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match=r"'7' of the benchmark was asked for. There are equal,1000; equal,125; unequal,1000 "):
        bench(print, only=["7"])
