"""A run that was interrupted on four devices goes on with others, another number of them in another order, as if
nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stopped_run import stop_in_the_first_epoch, stop_in_the_second_epoch, train_rank

from tests.methods.builders import PLANS, losses_of, make_rank_job
from tests.methods.conftest import four_devices
from tests.methods.test_fine_tuning_equality import rank_job as fine_tuning_job
from tests.plans import plan_of, stage
from tests.weights import same_weights
from workbench.core import Cluster, Plan
from workbench.methods.common.rank_results import RankResult
from workbench.methods.training.interrupted import begin, take_up
from workbench.methods.training.phases import RankJob
from workbench.models.loading import load_stack
from workbench.runtime.engines import EngineCluster

SAMPLES, EPOCHS = 22, 3
CACHED = stage(0, 6, {0: 2, 1: 2, 2: 2, 3: 2})
FOUR = plan_of(PLANS["[2, 2, 1, 1] on [1-1-1-1]"], method="pac_plus", micro_batches=2, cached=CACHED)
THREE = replace(FOUR, stages=(stage(0, 3, {2: 2, 0: 2}), stage(3, 6, {1: 4})), cached=stage(0, 6, {0: 3, 1: 3, 2: 2}))


def three_devices() -> Cluster:
    """Without the second one, and the others in another order."""
    devices = four_devices().devices
    return replace(four_devices(), devices=(devices[3], devices[0], devices[2]))


@pytest.fixture(scope="module")
def three(engines: EngineCluster) -> Iterator[EngineCluster]:
    with EngineCluster.start(three_devices(), fidelity="paced") as cluster:
        yield cluster


def on_three(job: RankJob, plan: Plan) -> Any:
    cut = tuple(job.profile.layers[rank] for rank in range(3))
    return replace(job, cluster=three_devices(), plan=plan, profile=replace(job.profile, layers=cut))


def go_on(job: Any, engines: EngineCluster) -> tuple[list[RankResult], tuple[int, int], dict]:
    """Return what ranks did of the rest, where they began, and all losses."""
    former = take_up(job)
    message = replace(job, start_epoch=former.epochs, start_step=former.step, state=former.state)
    results = engines.run(train_rank, [message] * job.cluster.world_size)
    return results, (former.epochs, former.step), losses_of([*former.results, *results])


@pytest.fixture(scope="module")
def pac_plus_whole(
    three: EngineCluster, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, dict[tuple[int, int], float]]:
    """An unbroken PAC+ run on the three devices, and its losses."""
    job = on_three(pac_plus_job(tmp_path_factory.mktemp("whole")), THREE)
    return job, losses_of(three.run(train_rank, [job] * 3))


def pac_plus_job(folder: Path, plan: Plan = FOUR) -> Any:
    job = make_rank_job(
        load_stack("tiny-bert"), "tiny-bert", plan.stages, four_devices(), folder, samples=SAMPLES, epochs=EPOCHS
    )
    return replace(job, plan=plan)


def test_pac_plus_goes_on_in_its_first_epoch(
    engines: EngineCluster, three: EngineCluster, pac_plus_whole, tmp_path: Path
) -> None:
    """After two steps on four devices: the rest on three; what these have not taped of the two steps, their backbone
    fills."""
    job = pac_plus_job(tmp_path)
    begin(job)
    engines.run(stop_in_the_first_epoch, [job] * 4)
    others, again = (
        take_up(on_three(job, THREE)) for _ in range(2)
    )  # the second time they were interrupted before a step
    assert not others.is_same and again.is_same and len(again.results) == 4
    joined = again.joined([RankResult(rank=rank) for rank in range(3)])  # ranks of the four are not theirs
    assert not any(trace.spans for result in joined for trace in result.steps)
    results, at, losses = go_on(on_three(job, THREE), three)
    assert at == (0, 2)
    assert "filling the cache again" in results[0].phases_s
    assert losses == pytest.approx(pac_plus_whole[1], rel=1e-4)
    actual, expected = (run.trained(EPOCHS - 1) for run in (on_three(job, THREE), pac_plus_whole[0]))
    same_weights(actual, expected, 1e-3, 2e-4, noise="query_key_value.bias")


def test_pac_plus_moves_the_shards_to_other_devices(
    engines: EngineCluster, three: EngineCluster, pac_plus_whole, tmp_path: Path
) -> None:
    """In a cached epoch on four devices; a lost one's samples are filled again, otherwise the shards move and no
    backbone runs.

    The mini-batches of cached epochs follow the devices' shares, so the epoch is done again, and the run ends as one
    does whose first epoch was that of the four and whose others were those of the three: first epochs do not depend on
    the devices.
    """
    job = pac_plus_job(tmp_path / "run")
    begin(job)
    engines.run(stop_in_the_second_epoch, [job] * 4)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    again = replace(FOUR, stages=PLANS["[3, 3] on [2-2]"], cached=stage(0, 6, {0: 4, 1: 2, 3: 2}))
    results, at, moved = go_on(replace(job, plan=again), engines)
    assert at == (1, 0)
    assert not any("filling the cache again" in result.phases_s for result in results)
    assert any("sharing the activations" in result.phases_s for result in results)
    assert sum(span.nbytes for result in results for span in result.redistribution) > 0
    unbroken = pac_plus_job(tmp_path / "unbroken", again)
    assert moved == pytest.approx(losses_of(engines.run(train_rank, [unbroken] * 4)), rel=1e-4)

    left = on_three(replace(job, folder=tmp_path / "copy"), THREE)
    results, at, losses = go_on(left, three)
    assert at == (1, 0)
    assert all("filling the cache again" in result.phases_s for result in results)
    assert losses == pytest.approx(pac_plus_whole[1], rel=1e-4)


def test_an_unchanged_plan_keeps_the_steps_of_a_cached_epoch(engines: EngineCluster, tmp_path: Path) -> None:
    """Other stages, the same shares of the samples: the third step follows."""
    job = pac_plus_job(tmp_path / "run")
    begin(job)
    engines.run(stop_in_the_second_epoch, [job] * 4)
    other = replace(FOUR, stages=PLANS["[3, 3] on [2-2]"])
    results, at, losses = go_on(replace(job, plan=other), engines)
    assert at == (1, 2)
    assert not any("sharing the activations" in result.phases_s for result in results)
    unbroken = pac_plus_job(tmp_path / "unbroken")
    assert losses == pytest.approx(losses_of(engines.run(train_rank, [unbroken] * 4)), rel=1e-4)


@pytest.mark.parametrize(("model", "technique"), [("tiny-bert", "lora"), ("tiny-t5", "full")])
def test_fine_tuning_goes_on(
    model: str, technique: str, engines: EngineCluster, three: EngineCluster, tmp_path: Path
) -> None:
    """After two of three steps of the second epoch, and again after one more, on four devices again: losses and
    weights."""
    reference = fine_tuning_job(model, technique, "[2, 2, 1, 1] on [1-1-1-1]", tmp_path / "whole")
    expected = losses_of(engines.run(train_rank, [reference] * 4))
    job = replace(reference, folder=tmp_path / "run")
    begin(job)
    engines.run(stop_in_the_first_epoch, [job] * 4)
    plan = replace(job.plan, stages=THREE.stages)
    former = take_up(on_three(job, plan))
    assert (former.epochs, former.step, former.is_same) == (0, 2, False)
    message = replace(on_three(job, plan), start_step=2, state=former.state)
    three.run(stop_in_the_second_epoch, [message] * 3)
    _, at, losses = go_on(job, engines)
    assert at == (1, 2)
    assert losses == pytest.approx(expected, rel=1e-4)
    same_weights(job.trained(1), reference.trained(1), 1e-3, 2e-4)
