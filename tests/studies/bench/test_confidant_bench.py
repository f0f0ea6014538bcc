"""Confidant's benchmark: its sides train the same mini-batches, and the simulation keeps the order of its bounds."""

from __future__ import annotations

from dataclasses import replace

import made_up_report
import pytest

from tests.clusters import with_devices
from workbench import experiment
from workbench.core.errors import ConfigError
from workbench_studies.bench import confidant
from workbench_studies.bench.confidant import JOB, MINI_BATCHES, bench, kept_plans, points, table
from workbench_studies.bench.ringada import Side


@pytest.mark.parametrize("name", points())
def test_its_sides_train_as_many_samples(name: str) -> None:
    """What Confidant adds is faster in the simulation, and no more than the bound allows (by the catalogue's
    figures)."""
    point, seconds = points()[name], {}
    cluster = with_devices(
        point.cluster, model="some", flops_per_s=lambda one: 6e10 * (one.host_share or 1), host_share=None
    )
    for side, job in point.sides.items():
        report = experiment.run(replace(job, model="tiny-bert"), cluster, "simulate")
        assert sum(step.samples for step in report.steps) == JOB.batch_size * MINI_BATCHES
        seconds[side] = sum(step.predicted_s or 0.0 for step in report.steps)
    base, *others = seconds.values()
    assert base > others[-1]
    assert point.bound is None or base / min(others) <= point.bound * 1.001


def test_a_table_compares_round_by_round() -> None:
    example_report = made_up_report.report()

    def taking(seconds: float, other_s: float, busiest_s: float) -> Side:
        step = replace(example_report.steps[0], predicted_s=2.0)
        reports = [
            replace(example_report, steps=(replace(step, measured_s=one),), valid=one != 9.0)
            for one in (seconds, other_s)
        ]
        return Side(reports=reports, watched=[[3_000_000], []], busiest_s=busiest_s, peaks={1: (4_000_000, 1)})

    sides = {"one": taking(4.0, 6.0, 2.0), "two": taking(2.0, 4.0, 1.0), "busy": taking(9.0, 9.0, 4.0)}
    rows = {row["side"]: row for row in table("point", sides, 2.0)}
    assert (
        rows["two"]["speedup"] == 1.75 and rows["two"]["spread"] == "1.50-2.00" and rows["two"]["over_simulated"] == 1.5
    )
    assert (rows["one"]["bound"], rows["two"]["bound"], rows["two"]["share_of_bound"]) == (1.0, 2.0, 0.875)
    assert rows["two"]["valid"] and not rows["busy"]["valid"]
    assert (rows["one"]["mb"], rows["one"]["simulated_mb"]) == (3.0, 4.0)
    assert [row["bound"] for row in table("point", sides, None)] == [1.0, 2.0, 0.5]


def test_sides_that_keep_a_plan_have_its_stages_and_split_a_mini_batch_themselves() -> None:
    point = points()["schedule"]
    cluster = with_devices(point.cluster, model="some", flops_per_s=1.8e10, host_share=None)
    sides = {side: replace(job, model="tiny-bert") for side, job in point.sides.items()}
    plans = kept_plans(replace(point, cluster=cluster, sides=sides))
    assert [[stage.ranks for stage in plan.stages] for plan in plans.values()] == 2 * [[(0,), (1,), (2,), (3,)]]
    assert [(plan.method, plan.num_micro_batches) for plan in plans.values()] == [("fine_tuning", 4), ("confidant", 1)]
    assert kept_plans(points()["partition"]) == {}


def test_frameworks_are_compared_on_the_same_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setattr(confidant, "JOB", replace(JOB, model="tiny-bert"))
    monkeypatch.setattr(confidant, "STAGE_SIZES", ((2, 8),))
    rows = confidant.frameworks()
    assert [row["pass"] for row in rows] == ["forward", "back"]
    assert all(row["JAX_over_PyTorch"] == row["JAX_ms"] / row["PyTorch_ms"] > 0 for row in rows)


def test_only_its_points_can_be_chosen() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'7' of the benchmark was asked for. There are processors, schedule, partition, phones, frameworks",
    ):
        bench(print, only=["7"])
