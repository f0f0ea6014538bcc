"""Confidant as a user meets it: what it plans, simulates and executes, and what it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from tiny_job import two_devices

from tests.clusters import with_devices
from workbench import experiment
from workbench.core import Cluster, Job, Processor, Report
from workbench.core.errors import ConfigError, PlanError
from workbench.core.job import ADAPTER_RATE, FULL_RATE
from workbench.core.methods import registered
from workbench.core.report import TRAINED_WEIGHTS, StepRecord
from workbench.methods.common.rank_results import RankResult, StepTrace
from workbench.methods.common.records import measured_steps
from workbench.methods.training import worker
from workbench.runtime.snapshot import Snapshot

from .tiny_runs import devices, losses


def test_executed_in_windows_and_simulated_alike(job: Job, whole: Report) -> None:
    simulated = experiment.run(job, two_devices(), "simulate")
    assert len(losses(whole)) == len(simulated.steps) == 4
    assert simulated.bytes[TRAINED_WEIGHTS] == whole.bytes[TRAINED_WEIGHTS]
    assert whole.plan is not None and len(whole.plan.stages) == 2 and whole.plan.num_micro_batches == 1
    assert (
        "(stashed versions of its weights: 1)" in whole.plan.notes[0]
        and "Eq. 1 and 2 as printed" in whole.plan.notes[0]
    )
    assert whole.artifacts["adapter"]


def test_windows_that_do_not_drain_take_as_long_as_one(job: Job) -> None:
    """Simulated: an epoch in chained windows takes the time of an epoch in one window, and less than in windows that
    drain."""
    every = [{"window": 2}, {"window": 0}, {"drain_every": 2}]
    described = two_devices()  # their costs come from their FLOP/s: measured ones differ by more than a drain takes
    cluster = with_devices(described, model="some")
    reports = [experiment.run(replace(job, epochs=1, options=options), cluster, "simulate") for options in every]
    chained, reference, drained = [[step.predicted_s or 0.0 for step in report.steps] for report in reports]
    assert [len(steps) for steps in (chained, reference, drained)] == [2, 1, 2]
    assert sum(chained) == pytest.approx(sum(reference), rel=0.02) and sum(drained) > 1.02 * sum(chained)


def test_windows_may_be_shorter_than_the_pipeline(job: Job) -> None:
    """Simulated: a window of one mini-batch ends each epoch and does not drain; an epoch of one mini-batch does."""
    jobs = [replace(job, options={"window": size}) for size in (3, 4)] + [
        replace(job, batch_size=4 * job.batch_size, options={"window": 3})
    ]
    short, reference, drained = [
        [step.predicted_s or 0.0 for step in experiment.run(one, two_devices(), "simulate").steps] for one in jobs
    ]
    assert [len(steps) for steps in (short, reference, drained)] == [4, 2, 2]
    assert sum(short) == pytest.approx(sum(reference), rel=0.02) and drained[0] == pytest.approx(drained[1])


def with_processors(cluster: Cluster, *gflops: float) -> Cluster:
    """Return the cluster whose first device has such processors."""
    processors = tuple(Processor(name=f"p{number}", flops_per_s=1e9 * gflop) for number, gflop in enumerate(gflops))
    return replace(cluster, devices=(replace(cluster.devices[0], processors=processors), *cluster.devices[1:]))


def test_two_processors_of_a_device_share_each_layer(job: Job, whole: Report, tmp_path: Path) -> None:
    """Executed on two streams, operation by operation the program that was simulated, with the losses of an undivided
    run."""
    two = with_processors(two_devices(), 30.0, 20.0)
    job = replace(job, options=job.options | {"split": "heads_and_columns", "heads": "optimal"})
    report = experiment.run(job, two, workdir=tmp_path, fidelity="paced", chosen_plan=whole.plan)
    assert losses(report) == pytest.approx(losses(whole), rel=1e-5)
    predicted, measured = (
        {(span.rank, span.op.label, span.op.stream) for span in timeline.spans if not span.op.is_communication}
        for timeline in (report.timelines["first epoch, predicted"], report.timelines["first epoch, measured"])
    )
    assert predicted == measured
    on_second = {label for rank, label, stream in measured if stream == "compute1"}
    assert {label[1:-3] for label in on_second} == {"ATTN", "ATTNB", "COLS", "COLSB"}
    assert {rank for rank, _, stream in measured if stream == "compute1"} == {0}


@pytest.mark.parametrize("heads", ["algorithm1", "optimal"])
@pytest.mark.parametrize("split", ["heads", "heads_and_columns"])
def test_a_device_of_two_processors_takes_more_layers(heads: str, split: str, job: Job) -> None:
    """By the catalogue's figures, as of a cluster that does not run here: two equal processors divide in halves
    (simulated)."""
    plain = devices(2, host_share=None, model="some")
    two = with_processors(plain, 30.0, 30.0)
    job = replace(job, options=job.options | {"split": split, "heads": heads})
    alone, shared = (
        experiment.run(replace(job, options=own), cluster, "simulate")
        for own, cluster in (({}, plain), (job.options, two))
    )
    assert "processors share each layer: heads 2 on p0, 2 on p1" in " ".join(shared.plan.notes)
    assert ("columns 16 on p0, 16 on p1" in " ".join(shared.plan.notes)) == (split == "heads_and_columns")
    pace = [report.plan.predicted_s["mini-batch in the long run"] for report in (alone, shared)]
    assert pace[1] < pace[0]


def test_processors_that_cannot_share_are_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="needs a device with two processors"):
        experiment.run(replace(job, options={"split": "heads"}), two_devices(), "simulate")
    with pytest.raises(ConfigError, match=r"over the 5 processors of 'alpha' .* has 4 heads"):
        experiment.run(job, with_processors(two_devices(), *range(1, 6)), "simulate")
    with pytest.raises(ConfigError, match="int8"):
        options = {"technique": "lora", "backbone_dtype": "int8"}
        experiment.run(replace(job, options=options), with_processors(two_devices(), 1, 2), "simulate")


@pytest.mark.parametrize(("options", "rate"), [({}, FULL_RATE), ({"technique": "lora"}, ADAPTER_RATE)])
def test_the_learning_rate_follows_the_technique(options: dict[str, str], rate: float, job: Job) -> None:
    chosen = experiment.run(replace(job, learning_rate=None, options=options), two_devices(), "simulate")
    assert chosen.job.learning_rate == rate
    same = replace(job, learning_rate=rate, options=options)
    assert chosen.job == same and replace(same, learning_rate=None).identity == same.identity


def test_methods_with_full_fine_tuning_by_default_have_its_learning_rate() -> None:
    assert [name for name in registered() if Job(method=name).peak_learning_rate == FULL_RATE] == ["confidant"]
    assert (Job(method="fine_tuning", options={"technique": "full"}).peak_learning_rate, Job().peak_learning_rate) == (
        5e-5,
        2e-3,
    )


@pytest.mark.parametrize(
    ("versions", "stashed"), [("stashing", (2, 1, 0)), ("vertical_sync", (2, 2, 2)), ("two", (1, 1, 1))]
)
def test_each_scheme_stashes_its_own_versions(versions: str, stashed: tuple[int, ...], job: Job) -> None:
    """Of three stages, besides the newest version (simulated)."""
    three = devices(3, host_share=None, model="some")
    report = experiment.run(replace(job, options={"versions": versions}), three, "simulate")
    notes = [note for note in report.plan.notes if note.startswith("Memory of")]
    assert len(notes) == 3
    for note, number in zip(notes, stashed, strict=True):
        assert f"(stashed versions of its weights: {number})" in note


@pytest.mark.parametrize(
    ("partition", "order", "layers"),
    [
        ("memory_aware", (0, 1, 2), "[1, 3, 2]"),
        ("any_order", (1, 0, 2), "[3, 1, 2]"),
        ("even", (0, 1, 2), "[2, 2, 2]"),
        ("capacity", (0, 1, 2), "[1, 3, 2]"),
    ],
)
def test_every_partition_divides_in_its_own_way(partition: str, order: tuple[int, ...], layers: str, job: Job) -> None:
    """By the catalogue's figures, for devices of 10, 30 and 20 GFLOP/s (simulated)."""
    unequal = devices(3, host_share=None, model="some", flops_per_s=[1e10, 3e10, 2e10])
    plan = experiment.run(replace(job, options={"partition": partition}), unequal, "simulate").plan
    assert (tuple(stage.ranks[0] for stage in plan.stages), plan.partition()) == (order, layers)


def test_only_partitions_that_look_at_memory_leave_a_small_device_out(job: Job) -> None:
    """The second device has memory for no stage (simulated)."""
    memory_bytes = [600_000_000, 1_500_000, 600_000_000]
    small = devices(3, host_share=None, model="some", memory_bytes=memory_bytes)
    for partition in ("memory_aware", "any_order"):
        plan = experiment.run(replace(job, options={"partition": partition}), small, "simulate").plan
        assert plan.busy_ranks == {0, 2}
    for partition in ("even", "capacity"):
        with pytest.raises(PlanError, match=r"'beta' has 1.5 MB; stage 1 .* needs"):
            experiment.run(replace(job, options={"partition": partition}), small, "simulate")


def test_what_cannot_be_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="one device, and a pipeline needs two"):
        experiment.run(job, two_devices().part([0]), "simulate")
    with pytest.raises(ConfigError, match="Confidant is an asynchronous pipeline"):
        experiment.run(replace(job, options={"schedule": "1f1b"}), two_devices(), "simulate")
    with pytest.raises(PlanError, match=r"By the model's sizes it needs 1.7 MB .*; 2 devices have 600 kB"):
        experiment.run(job, two_devices(memory_bytes=300_000), "simulate")
    with pytest.raises(PlanError, match=r"'\w+' has .*; layers? .* are missing"):
        experiment.run(job, two_devices(memory_bytes=900_000), "simulate")
    with pytest.raises(ConfigError, match="copies of one parameter"):
        experiment.run(replace(job, model="tiny-t5"), two_devices(), "simulate")
    with pytest.raises(ConfigError, match=r"step 4 was asked for. The run has 4 steps"):
        experiment.run(replace(job, faults="kill:beta@step4"), two_devices(), "simulate")


@pytest.mark.parametrize(
    ("continues", "pause", "meetings"), [(None, False, 3), ("the window before", False, 1), (None, True, 1)]
)
def test_devices_wait_for_each_other_only_between_epochs_that_drain(
    continues: str | None, pause: bool, meetings: int
) -> None:
    """One without a share pauses there if the others do: in the next epoch nobody would come."""
    phase = MagicMock(optimizer=None, takes_part=False)
    step = MagicMock()
    step.shape.continues = continues
    phase.phase.epochs, phase.phase.steps.return_value = range(3), (step,)
    phase.rank_job = MagicMock(start_epoch=0, start_step=0, homes={}, state=None)
    phase.rank_job.snapshot = Snapshot(every=0)
    phase.session.any_rank.return_value = pause
    with pytest.raises(worker.Paused) if pause else nullcontext():
        worker.TrainingWorker._train(MagicMock(_loaded=[]), phase, 0, MagicMock())
    assert phase.session.any_rank.mock_calls == [call(False)] * meetings


def test_an_epoch_that_overlaps_the_one_before_counts_from_its_end() -> None:
    """The last stage begins the second window at 7 s, while the first stage still computes the first one."""
    times = {0: [(0.0, 9.0), (1.0, 6.5)], 1: [(9.5, 17.0), (7.0, 15.0)], 2: [(20.0, 30.0), (21.0, 28.0)]}
    ranks = [
        RankResult(rank=rank, steps=[StepTrace(epoch, 0, 1, *of_ranks[rank], 0.5) for epoch, of_ranks in times.items()])
        for rank in (0, 1)
    ]
    predicted = [StepRecord(epoch=epoch, step=0, samples=1, cached=False) for epoch in times]
    assert [step.measured_s for step in measured_steps(ranks, predicted)] == [9.0, 8.0, 10.0]
