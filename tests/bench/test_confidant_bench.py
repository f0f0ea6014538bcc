"""Confidant's benchmark: its sides train the same mini-batches, and the simulation keeps the order of its bounds."""

from __future__ import annotations

from dataclasses import replace

import made_up_report
import pytest

from workbench import experiment
from workbench.bench.confidant import JOB, MINI_BATCHES, bench, points, table
from workbench.core.errors import ConfigError


@pytest.mark.parametrize("name", points())
def test_its_sides_train_as_many_samples(name: str) -> None:
    """What Confidant adds is faster in the simulation, and no more than the bound allows (by the catalogue's figures)."""
    point, seconds = points()[name], {}
    devices = tuple(replace(one, model="some", flops_per_s=6e10 * (one.host_share or 1), host_share=None) for one in point.cluster.devices)
    for side, job in point.sides.items():
        report = experiment.run(replace(job, model="tiny-bert"), replace(point.cluster, devices=devices), "simulate")
        assert sum(step.samples for step in report.steps) == JOB.batch_size * MINI_BATCHES
        seconds[side] = sum(step.predicted_s or 0.0 for step in report.steps)
    base, *others = seconds.values()
    assert base > others[-1]
    assert point.bound is None or base / min(others) <= point.bound * 1.001


def test_a_table_compares_round_by_round() -> None:
    made = made_up_report.report()

    def taking(seconds: float) -> object:
        return replace(made, steps=(replace(made.steps[0], predicted_s=2.0, measured_s=seconds),), valid=seconds != 9.0)

    reports = {"one": [taking(4.0), taking(6.0)], "two": [taking(2.0), taking(4.0)], "busy": [taking(9.0), taking(9.0)]}
    rows = {row["side"]: row for row in table("point", reports, 2.0, {})}  # type: ignore[arg-type]
    assert rows["two"]["speedup"] == 1.75 and rows["two"]["spread"] == "1.50-2.00" and rows["two"]["over_simulated"] == 1.5
    assert (rows["one"]["bound"], rows["two"]["bound"], rows["two"]["share_of_bound"]) == (1.0, 2.0, 0.875)
    assert rows["two"]["valid"] and not rows["busy"]["valid"]
    by_busiest = table("point", reports, None, {"one": 2.0, "two": 1.0, "busy": 4.0})  # type: ignore[arg-type]
    assert [row["bound"] for row in by_busiest] == [1.0, 2.0, 0.5]


def test_only_its_points_can_be_chosen() -> None:
    with pytest.raises(ConfigError, match=r"'7' of the benchmark was asked for. There are processors, schedule, partition"):
        bench(print, only=["7"])
