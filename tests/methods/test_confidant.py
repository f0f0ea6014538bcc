"""Confidant as a user meets it: what it refuses, simulates and executes; a device that is lost, and a run that goes
on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
from tiny_job import tiny_job, two_devices, write_data

from tests.caches import own_cache
from tests.clusters import cluster_of, with_devices
from workbench import experiment
from workbench.core import Cluster, Job, Link, Processor, Report
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError, PlanError
from workbench.core.job import ADAPTER_RATE, FULL_RATE
from workbench.core.methods import registered
from workbench.core.profile import Grid
from workbench.core.report import TRAINED_WEIGHTS, StepRecord
from workbench.methods.base import Event
from workbench.methods.common.rank_results import RankResult, StepTrace
from workbench.methods.common.records import measured_steps
from workbench.methods.confidant import method as confidant
from workbench.methods.fine_tuning.measure import measure_parts
from workbench.methods.training import worker
from workbench.runtime.snapshot import Snapshot


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Four mini-batches an epoch, in windows of two."""
    with own_cache(tmp_path_factory) as patch:
        patch.setattr(confidant, "measure_parts", parts_in_proportion)
        options = {"drain_every": 2}
        yield tiny_job(
            write_data(tmp_path_factory.mktemp("data")),
            method="confidant",
            epochs=2,
            learning_rate=1e-4,
            options=options,
        )


def parts_in_proportion(*model: Any, **settings: Any) -> dict[str, Grid]:
    """Measure, and say nothing of one group alone: which of them a tiny model's processors get does not go by
    chance then."""
    result = measure_parts(*model, **settings)
    assert set(result) == {f"{part}{way}{count}" for part in "HC" for way in "FB" for count in ("", "1")}
    return {kind: grid for kind, grid in result.items() if not kind.endswith("1")}


def run(job: Job, folder: Path, **settings: object) -> Report:
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced", **settings)  # type: ignore[arg-type]


def losses(report: Report) -> list[float]:
    return [step.loss for step in report.steps if step.loss is not None]


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(job, tmp_path_factory.mktemp("whole"))


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


def adding(fault: Fault) -> Callable[[Event], None]:
    """Return a progress function that adds a fault while the run goes on."""

    def progress(event: Event) -> None:
        if event.faults is not None:
            event.faults.add(fault)

    return progress


def test_a_device_is_killed_and_the_other_does_the_window_again(job: Job, whole: Report, tmp_path: Path) -> None:
    """The window before the one in which beta dies may not be finished on alpha: it is done again then, by one device,
    without delays.

    The fault is added while the run goes on, as a notebook's button does it; the devices are slow, so that steps are
    left by then.
    """
    kill = adding(Fault(kind="kill", rank=1, start=2, unit="step"))
    report = experiment.run(job, two_devices(share=0.05), workdir=tmp_path, fidelity="paced", progress=kill)
    assert "beta is lost" in " ".join(report.notes)
    assert losses(report)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    assert losses(report) == pytest.approx(losses(whole), rel=1e-2) and len(losses(report)) == 4


def devices(count: int, **settings: Any) -> Cluster:
    names = ("alpha", "beta", "gamma", "delta")[:count]
    return cluster_of(names, **{"flops_per_s": 3e10, "memory_bytes": 600_000_000, "host_share": 1.0} | settings)


def test_an_idle_device_takes_the_place_of_one_that_leaves_on_notice(job: Job, whole: Report, tmp_path: Path) -> None:
    """It computes the same stage with the same state: nothing is done again, and the losses are those of an unbroken
    run.

    The devices are slow, so that steps are left when it has made ready; a host on which they are not finds the same
    losses.
    They pause in the middle of the first of two epochs, which the idle device must learn.
    """
    leave = adding(Fault(kind="leave", rank=1, start=0.0))
    job = replace(job, options=job.options | {"devices": 2}, snapshot_every=3, snapshot_to="neighbour")
    report = experiment.run(job, devices(3, host_share=0.05), workdir=tmp_path, fidelity="paced", progress=leave)
    assert "gamma takes the place of beta (predicted: it loads" in " ".join(report.notes)
    assert [recovery.repeated for recovery in report.recoveries if recovery.what == "leave beta"] in ([0], [])
    assert losses(report) == pytest.approx(losses(whole), rel=1e-6)


def test_parallel_adapters_survive_a_loss(job: Job, tmp_path: Path) -> None:
    """Executed: of three equal devices two train, one of them is killed, and the losses are those of an undisturbed
    run."""
    options = job.options | {"technique": "parallel", "devices": 2}
    job = replace(job, options=options, snapshot_every=1, snapshot_to="neighbour")
    reference = run(replace(job, snapshot_every=0, snapshot_to="disk"), tmp_path / "whole")
    kill = adding(Fault(kind="kill", rank=1, start=2, unit="step"))
    report = experiment.run(
        job, devices(3, host_share=0.05), workdir=tmp_path / "lost", fidelity="paced", progress=kill
    )
    assert "beta is lost" in " ".join(report.notes)
    assert losses(report) == pytest.approx(losses(reference), rel=1e-5)


@pytest.mark.parametrize(
    ("idle", "chosen"),
    [
        ({"battery": 0.5}, "delta"),
        # Full at the beginning, and empty by the time of the notice.
        ({"battery_wh": 1e-6, "watts_busy": 5.0, "watts_idle": 5.0}, "delta"),
        ({"host_share": 0.2}, "delta"),
        ({}, "gamma"),
        ({"memory_bytes": 300_000}, "delta"),
    ],
)
def test_the_most_compatible_idle_device_is_taken(idle: dict[str, float], chosen: str, job: Job) -> None:
    """Of equal ones the first; one with less charge, one that is slower and one whose memory does not suffice are not
    (simulated)."""
    four = devices(4)
    four = replace(four, devices=(*four.devices[:2], replace(four.devices[2], **idle), four.devices[3]))  # type: ignore[arg-type]
    job = replace(job, options=job.options | {"devices": 2}, faults="leave:beta@step1")
    assert f"{chosen} takes the place of beta" in " ".join(experiment.run(job, four, "simulate").notes)


def test_capacities_are_at_the_measured_pace(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: alpha is found slow, and then beta leaves; the search for a stand-in counts alpha as slow as found."""
    requests, stand_in = [], confidant.Confidant.stand_in

    def seen(prepared: Any, profile: Any, *rest: Any) -> int | None:
        requests.append([layers[0].forward_s(4, 16) for layers in profile.layers])
        return stand_in(prepared, profile, *rest)

    monkeypatch.setattr(confidant.Confidant, "stand_in", staticmethod(seen))
    job = replace(
        job, options=job.options | {"devices": 2}, epochs=40, faults="slow:alpha:4@step1-79; leave:beta@step60"
    )
    experiment.run(job, devices(4), "simulate")
    alpha_s, _, gamma_s, delta_s = requests[-1]
    assert alpha_s == pytest.approx(4 * gamma_s, rel=0.2) and gamma_s == delta_s


def test_slow_leaves_dies_and_comes_back_in_one_run(job: Job) -> None:
    """Passive and proactive fault tolerance: one device is slow, one leaves on notice, one dies and returns.

    With a backbone quantized as in PAC+.
    """
    faults = "slow:alpha:2@step2-40; leave:beta@step10; kill:gamma@step20; return:gamma@step25"
    options = {"drain_every": 1, "devices": 3, "technique": "lora", "backbone_dtype": "int8"}
    job = replace(job, options=options, epochs=20, faults=faults, snapshot_every=1, snapshot_to="neighbour")
    report = experiment.run(
        job, devices(4, host_share=0.01), "simulate"
    )  # steps take so long that gamma is back before the end
    text = " ".join(report.notes)
    assert "delta takes the place of beta" in text and "gamma is lost" in text and "gamma has come back" in text
    results = {recovery.what: recovery for recovery in report.recoveries}
    assert results["leave beta"].repeated == 0 and results["kill gamma"].repeated <= 1 and len(report.steps) == 80
    assert all(step.predicted_s for step in report.steps)
    paces = re.findall("Pace changed[^.]*: ([a-z]+ [0-9.]+) times", text)
    assert paces == ["alpha 2.0", "alpha 1.0"]  # once when it becomes slow, once when it is itself again


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


def test_a_notice_of_a_device_that_is_not_in_the_run_is_refused(job: Job) -> None:
    with pytest.raises(ConfigError, match="The devices of 'two' are alpha, beta"):
        experiment.run(replace(job, faults="leave:gamma@step1"), two_devices(), "simulate")


def test_another_partition_is_taken_if_it_pays(job: Job) -> None:
    """One device turns out to be four times slower: layers are moved if that saves more than loading them costs
    (simulated)."""
    job = replace(job, options={"drain_every": 1}, epochs=10, faults="slow:beta:4@step1")
    two = devices(2, host_share=None, model="some")
    plain, taken, dear = (
        experiment.run(replace(job, faults=faults), cluster, "simulate")
        for faults, cluster in (
            ("", two),
            (job.faults, two),
            (job.faults, devices(2, host_share=None, model="some", storage_bytes_per_s=1e3)),
        )
    )
    assert "Another partition is taken: it saves" in " ".join(taken.notes)
    assert "Another partition is not taken: it saves" in " ".join(dear.notes) and not dear.recoveries
    seconds = [sum(step.predicted_s or 0.0 for step in report.steps) for report in (plain, taken, dear)]
    assert seconds[0] < seconds[1] < seconds[2] <= 4 * seconds[0]  # it stays slow if no layer is moved


def test_a_plan_that_no_longer_fits_is_changed_at_any_price(job: Job) -> None:
    """Another program takes memory of a device, which has fewer layers then; later the layers stay, as moving is
    expensive (simulated)."""
    three = devices(3, host_share=None, model="some", storage_bytes_per_s=1e3, memory_bytes=9_000_000)
    job = replace(job, options={"drain_every": 1, "activations": "memory"}, epochs=10)
    taken, too_much = (
        experiment.run(replace(job, faults=f"memory:beta:{one}"), three, "simulate")
        for one in ("1.5@step1-20", "9@step1")
    )
    text = " ".join(taken.notes)
    assert taken.plan.partition() == "[1, 2, 3]"
    assert re.search(
        "taken at any price, because .* Device 'beta' has 6.0 MB; .* layer 0 on alpha .* layers 2-5 on gamma", text
    )
    assert re.search("beta has 100% of its memory.* Another partition is not taken", text)
    assert [recovery.what for recovery in taken.recoveries] == ["memory beta"] and taken.recoveries[0].repeated == 0
    text = " ".join(too_much.notes)
    assert re.search(r"The devices continue as they are\. .*'beta'.* are missing", text), text[-900:]
    assert not too_much.recoveries


def test_a_link_that_becomes_slow_is_left_out(job: Job) -> None:
    """Of three equal devices in a row, the first link becomes slow: another order has no use for it (simulated)."""
    three = devices(3, link=Link(bytes_per_s=3e5), host_share=None, flops_per_s=2e7, model="some")
    job = replace(job, options={"drain_every": 1, "partition": "any_order"}, epochs=10)
    plain = experiment.run(job, three, "simulate")
    first, second, third = (three.devices[stage.ranks[0]].name for stage in plain.plan.stages)
    broken = experiment.run(replace(job, faults=f"slow:{first}>{second}:40@step2"), three, "simulate")
    text = " ".join(broken.notes)
    assert f"Pace changed, over the profile's seconds: {first}>{second} 40.0 times" in text
    assert "Another partition is taken: it saves" in text
    assert re.search(
        f"on {first} .*on {third} .*on {second} ", next(note for note in broken.notes if note.startswith("From step"))
    )


@pytest.mark.parametrize(("killed", "repeated"), [("beta gamma", 3), ("beta delta", 1)])
def test_two_neighbours_that_are_lost_cost_the_epoch(killed: str, repeated: int, job: Job) -> None:
    """A device's state is kept by the next one of the ring; if both are gone, the epoch begins again (simulated)."""
    faults = "; ".join(f"kill:{name}@step3" for name in killed.split())
    report = experiment.run(
        replace(job, options={"drain_every": 1}, faults=faults, snapshot_every=2, snapshot_to="neighbour"),
        devices(4),
        "simulate",
    )
    assert {recovery.repeated for recovery in report.recoveries} == {repeated}


@pytest.mark.parametrize("versions", ["vertical_sync", "two"])
def test_other_versions_are_planned_and_simulated(versions: str, job: Job) -> None:
    """Of two stages both keep a version besides the newest."""
    report = experiment.run(replace(job, options={"versions": versions}), two_devices(), "simulate")
    assert report.plan is not None
    assert all(
        "(stashed versions of its weights: 1)" in note for note in report.plan.notes if note.startswith("Memory of")
    )


def test_every_partition_is_planned(job: Job) -> None:
    for partition in ("any_order", "even", "capacity"):
        report = experiment.run(replace(job, options={"partition": partition}), two_devices(), "simulate")
        assert report.plan is not None and report.plan.method == "confidant"


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
