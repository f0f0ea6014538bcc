"""What the trained state costs when devices change, by hand: three devices in a row, of which two train."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_job import tiny_job, write_data

from tests.clusters import cluster_of
from workbench import experiment
from workbench.core import Cluster, Job
from workbench.core.job import SnapshotPlace
from workbench.core.plan import Plan, one_device_stages
from workbench.core.profile import LayerProfile, Profile
from workbench.methods.training.state_costs import (
    IN_MEMORY,
    keeping_s,
    repartition_s,
    restoring_s,
    substitution,
    trained_homes,
)
from workbench.runtime.snapshot import Snapshot

RATE, DISK = 1e6, 4e6
TRAINABLE = (1_000_000, 3_000_000)
ON_DISK = Snapshot(every=0, to="disk", is_small=False)
CLUSTER = cluster_of(("alpha", "beta", "gamma"), bytes_per_s=RATE, storage_bytes_per_s=DISK)


def profile() -> Profile:
    """Two layers, of which all is trained."""
    layers = tuple(
        LayerProfile(name=f"layer {number}", times={}, frozen_bytes=0, trainable_bytes=nbytes)
        for number, nbytes in enumerate(TRAINABLE)
    )
    return Profile(model="two", method="confidant", source="analytic", layers=(layers,) * 3)


def plan(*ranks: int) -> Plan:
    stages = one_device_stages(ranks, (0, 1, 2), 1)
    return Plan(method="confidant", stages=stages, micro_batch_size=1, num_micro_batches=1)


def test_a_snapshot_in_memory_is_sent_to_the_next_device() -> None:
    """Alpha sends its state to beta while beta sends its own, of 9 MB, to alpha."""
    homes = trained_homes(plan(0, 1))
    assert keeping_s(CLUSTER, profile(), homes, IN_MEMORY) == pytest.approx(3 * TRAINABLE[1] / RATE)
    assert keeping_s(CLUSTER, profile(), homes, ON_DISK) == pytest.approx(3 * TRAINABLE[1] / DISK)
    assert keeping_s(CLUSTER, profile(), homes, replace(ON_DISK, is_small=True)) == 0


def test_a_device_in_anothers_place_gets_its_state_from_the_one_that_keeps_it() -> None:
    """Gamma takes beta's place: it loads the layer, and alpha sends it 9 MB; a state on the disk is read there."""
    loads_s, state_s = TRAINABLE[1] / DISK, 3 * TRAINABLE[1] / RATE
    costs = substitution(CLUSTER, profile(), plan(0, 1), plan(0, 2))
    assert costs == pytest.approx((loads_s, state_s, state_s)) and costs.still_s == pytest.approx(2 * state_s)
    state_s = 3 * TRAINABLE[1] / DISK
    assert substitution(CLUSTER, profile(), plan(0, 1), plan(0, 2), ON_DISK) == pytest.approx(
        (loads_s, state_s, state_s)
    )


def test_nothing_moves_to_a_device_that_keeps_the_state() -> None:
    """After the loss of beta, alpha has both layers' state; if nobody has a layer's, all is read from the disk."""
    homes = {"layer 0": (0,), "layer 1": (0,)}
    assert restoring_s(CLUSTER, profile(), homes, homes, IN_MEMORY) == 0
    assert restoring_s(CLUSTER, profile(), homes, {}, IN_MEMORY) == pytest.approx(3 * sum(TRAINABLE) / DISK)


def test_a_changed_plan_moves_no_state_that_the_next_device_keeps() -> None:
    """Alpha and beta exchange their layers: each loads the other's, and has its state since the snapshot."""
    price_s = repartition_s(CLUSTER, profile(), plan(0, 1), plan(1, 0), IN_MEMORY)
    assert price_s == pytest.approx(TRAINABLE[1] / DISK + 3 * TRAINABLE[1] / RATE)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Full fine-tuning on two of three devices, in windows of two mini-batches, with four windows an epoch."""
    return tiny_job(
        write_data(tmp_path_factory.mktemp("data")),
        method="confidant",
        epochs=2,
        batch_size=8,
        options={"technique": "full", "window": 2, "devices": 2},
        snapshot_every=2,
        snapshot_to="neighbour",
    )


def links_of(bytes_per_s: float) -> Cluster:
    return cluster_of(("alpha", "beta", "gamma"), model="some", flops_per_s=3e7, bytes_per_s=bytes_per_s)


@pytest.mark.parametrize(
    ("faults", "is_kept"),
    [("leave:beta@step1", True), ("kill:beta@step3", True), ("leave:beta@step2", False)],
    ids=["after a snapshot", "a loss", "between two snapshots"],
)
def test_a_simulated_recovery_moves_the_trained_state(faults: str, is_kept: bool, job: Job) -> None:
    """Alpha sends gamma beta's state; between two snapshots alpha and beta have first exchanged theirs, at once.

    What is on a disk crosses no link.
    """
    costs, rates = experiment.profile(job, links_of(1e9)), (1e9, 1e5)
    chosen = experiment.plan(job, links_of(1e9))

    def still_s(rate: float, to: SnapshotPlace) -> float:
        changed = replace(job, faults=faults, snapshot_to=to)
        report = experiment.run(changed, links_of(rate), "simulate", chosen_plan=chosen, costs=costs)
        return report.recoveries[0].stood_still_s

    alphas, betas = (
        3 * sum(layer.trainable_bytes for layer in costs.layers[0][stage.start : stage.stop]) for stage in chosen.stages
    )
    nbytes = betas + (0 if is_kept else max(alphas, betas))
    slower_s = [still_s(rates[1], to) - still_s(rates[0], to) for to in ("neighbour", "disk")]
    assert slower_s[0] - slower_s[1] == pytest.approx(nbytes / rates[1], rel=0.01)
