"""A run whose devices are lost, leave, or come back ends with the losses of an unbroken run that made the same
plans."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ssh_hosts import bring_profiles, home, reachable, real_cluster
from tiny_job import two_devices

from tests.clusters import with_devices
from tests.experiment.running import SLOW, at, losses, run
from tests.plans import staged_plan
from tests.waiting import wait_for
from workbench import experiment
from workbench.core import Job, Plan, Report
from workbench.core.errors import ConfigError, DeviceLostError
from workbench.core.profile import Grid
from workbench.methods.fine_tuning.method import FineTuning
from workbench.methods.fine_tuning.phases import FineTuningRankJob
from workbench.methods.training.faults import CHANGES
from workbench.runtime.engines import default_pool
from workbench.runtime.virtual_work import PREPARE_S, VirtualWorld


@pytest.fixture(scope="module")
def job(job: Job) -> Job:
    """The job as a pipeline, whose stages compute as one device does.

    Where devices divide a batch, gradients are summed in another order, and Adam's first steps make .1 % of the loss of
    that.
    """
    return replace(job, options={"paradigm": "pipeline_parallel"})


@pytest.fixture(scope="module")
def alone(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A run on the first device alone; bfloat16 would make much of the last digits of activations that another batch
    computes."""
    job = replace(job, options=job.options | {"cache_dtype": "float32"})
    return experiment.run(job, two_devices().part([0]), workdir=tmp_path_factory.mktemp("alone"), fidelity="paced")


def told(report: Report) -> str:
    return " ".join(report.notes)


def same_losses(report: Report, expected: Report) -> None:
    actual, wanted = losses(report), losses(expected)
    assert [one[:2] for one in actual] == [one[:2] for one in wanted]
    assert [loss for *_, loss in actual] == pytest.approx([loss for *_, loss in wanted], rel=1e-4)


@pytest.mark.parametrize("epoch", [0, 1])
def test_the_other_goes_on_from_the_last_step(epoch: int, alone: Report, tmp_path: Path) -> None:
    """A first epoch does not depend on the devices; a cached one begins again, for its mini-batches follow their
    shares."""
    killed: list[int] = []

    def kill() -> None:
        killed.append(default_pool().acquire(two_devices(share=SLOW), "paced").engine_pids[1])
        os.kill(killed[0], signal.SIGKILL)

    report = run(alone.job, tmp_path, progress=at(epoch, kill), share=SLOW)
    assert "beta is lost, in step" in told(report)
    same_losses(report, alone)
    assert report.metrics == alone.metrics
    assert not Path(f"/proc/{killed[0]}").exists()


HALVES = staged_plan((3, {0: 8}), (3, {1: 8}), method="fine_tuning", micro_batches=2)
"""No measured profile leaves a device out."""
TOGETHER = staged_plan((6, {0: 4, 1: 4}), method="fine_tuning", micro_batches=2)
"""All layers on both devices."""


def fine_tuning(job: Job, technique: str = "lora", **changes: Any) -> Job:
    return replace(
        job, method="fine_tuning", learning_rate=5e-4, options=job.options | {"technique": technique}, **changes
    )


@pytest.fixture(scope="module")
def unbroken(request: pytest.FixtureRequest, job: Job, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return run(fine_tuning(job, request.param), tmp_path_factory.mktemp("unbroken"))


@pytest.mark.parametrize(
    ("unbroken", "fault", "plan"),
    [("lora", "freeze:alpha@step4", TOGETHER), ("full", "kill:beta@step2-4", HALVES)],
    indirect=["unbroken"],
)
def test_fine_tuning_goes_on(fault: str, plan: Plan, unbroken: Report, tmp_path: Path) -> None:
    """Its mini-batches are the same on any devices; how a device is lost does not depend on what is trained.  With
    TOGETHER the other goes on with the layers that it has.
    """
    report = run(replace(unbroken.job, faults=fault), tmp_path, chosen_plan=plan)
    kind, device = fault.split("@")[0].split(":")
    assert f"Fault: {kind} {device}" in told(report)
    assert f"{device} is lost, in step" in told(report)
    same_losses(report, unbroken)
    foreseen = [
        recovery for recovery in report.recoveries if not recovery.what.startswith("return")
    ]  # in the simulation it may be back after the last step
    assert foreseen and all(recovery.predicted_s is not None for recovery in foreseen)
    assert all(step.predicted_s and step.measured_s for step in report.steps)  # also those before the loss
    measured, predicted = (report.timelines[f"first epoch, {kind}"] for kind in ("measured", "predicted"))
    assert measured.spans and measured.title == predicted.title  # of a step that the last devices did
    assert measured.device_names == predicted.device_names


@pytest.mark.parametrize("unbroken", ["full"], indirect=True)
def test_real_devices_over_ssh_go_on_likewise(unbroken: Report, tmp_path: Path) -> None:
    """Over OpenSSH and a network of its own where they are to be had, else over pipes; losses are the emulated run's,
    though one dies."""
    names = tuple(device.name for device in unbroken.cluster.devices)
    job = replace(unbroken.job, faults="kill:beta@step3", snapshot_every=2, snapshot_to="neighbour")
    with reachable(tmp_path, names) as (homes, _):
        bring_profiles(homes, names)
        report = experiment.run(job, real_cluster(names), workdir=tmp_path / "run", chosen_plan=HALVES)
        assert report.source == "real" and report.cluster.devices[0].address
        assert "beta is lost, in step" in told(report)
        assert "clocks are aligned with this machine's" in told(report)
        assert [loss for *_, loss in losses(report)] == pytest.approx([loss for *_, loss in losses(unbroken)], rel=1e-5)
        runs = [home(homes, name) / ".workbench-kit/runs" for name in names]
        wait_for(lambda: not any(list(folder.iterdir()) for folder in runs), "the end of the runs' folders")


def steady(kind_s: float) -> Grid:
    """The same seconds for every size."""
    return Grid(batch_sizes=(1, 64), sequence_lengths=(1, 128), seconds=((kind_s,) * 2,) * 2)


def test_a_slow_device_gets_less_to_do(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within some steps; and its share back when it is fast again.  All layers cost the same, however busy the host was
    when measuring."""
    measured, times = FineTuning.host_layers, {"F": steady(1e-3), "B": steady(2e-3), "STEP": steady(5e-4)}
    layers_of = lambda *args, **options: tuple(replace(layer, times=times) for layer in measured(*args, **options))  # noqa: E731
    monkeypatch.setattr(FineTuning, "host_layers", layers_of)
    job = fine_tuning(job, epochs=8)
    report = run(replace(job, faults="slow:beta:6@step3-9"), tmp_path / "faulty", chosen_plan=HALVES)
    slow, restored = report.recoveries
    assert (slow.what, restored.what) == ("slow beta", "restore beta")
    assert slow.noticed_steps <= 6 and slow.repeated <= 1
    assert "Pace changed, over the profile's seconds: beta" in told(report)
    same_losses(report, run(job, tmp_path / "unbroken"))


def test_one_that_leaves_is_let_go_between_two_steps(job: Job, tmp_path: Path) -> None:
    job = fine_tuning(job, epochs=4)
    report = run(replace(job, faults="leave:beta@step3"), tmp_path / "faulty", chosen_plan=HALVES)
    [left] = report.recoveries
    assert left.what == "leave beta" and left.repeated <= 1
    assert "beta leaves, in step" in told(report) and "is lost" not in told(report)
    same_losses(report, run(job, tmp_path / "unbroken"))


def test_the_last_device_is_missed(job: Job, tmp_path: Path) -> None:
    with pytest.raises(
        DeviceLostError,
        match=r"Step \d+ was to be done\. No device is left: alpha \(its process ended\), beta \(its process ended\)\.",
    ):
        run(replace(job, faults="kill:alpha@step3; kill:beta@step3"), tmp_path)
    resumed = run(job, tmp_path, resume=True)
    assert "Resumed after" in told(resumed)
    assert len(resumed.steps) == 12


@pytest.mark.usefixtures("nothing_starts")
def test_faults_that_cannot_be(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fault 'kill' of 'beta' at step 99 .* The run has 12 steps"):
        run(replace(job, faults="kill:beta@step99"), tmp_path)
    with pytest.raises(ConfigError, match="workbench serve --fault"):
        experiment.run(
            Job(method="galaxy_plus", model="tiny-bert", faults="kill:beta@step9"), two_devices(), "simulate"
        )


LORA = {"technique": "lora"}


@pytest.fixture(scope="module")
def undisturbed(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict], Report]:
    """Return what gives the run of two epochs of a method, done once."""
    reports = dict[str, Report]()

    def of(method: str, options: dict) -> Report:
        if method not in reports:
            reference = replace(job, method=method, epochs=2, options=job.options | options)
            reports[method] = run(reference, tmp_path_factory.mktemp("undisturbed"))
        return reports[method]

    return of


@pytest.mark.parametrize(
    ("method", "options", "step"), [("fine_tuning", LORA, 3), ("fine_tuning", LORA, 4), ("pac_plus", {}, 3)]
)
def test_devices_keep_each_others_state(
    method: str, options: dict, step: int, undisturbed: Callable[[str, dict], Report], tmp_path: Path
) -> None:
    """Nothing within an epoch is in the folder; the steps since the last snapshot are done again, and the report says
    what they cost.

    After step 4 an epoch ends: until all of it is on the disk, the snapshot after step 2 counts.
    """
    expected = undisturbed(method, options)
    job = replace(expected.job, faults=f"kill:beta@step{step}", snapshot_every=2, snapshot_to="neighbour")
    within: list[Path] = []
    folder, plan = tmp_path / "faulty", HALVES if method == "fine_tuning" else None
    report = run(
        job,
        folder,
        progress=lambda event: within.extend((folder / "snapshots").glob("*-step-[1-9]*")),
        chosen_plan=plan,
    )
    assert not within
    assert "beta is lost, in step" in told(report)
    [recovery] = report.recoveries
    assert recovery.repeated <= 2 and report.phases_s["snapshots"] > 0 and report.phases_s["snapshots, predicted"] > 0
    first = [
        (step.loss, other.loss) for step, other in zip(report.steps, expected.steps, strict=False) if not step.cached
    ]
    assert len(first) == (8 if method == "fine_tuning" else 4)
    assert [loss for loss, _ in first] == pytest.approx([loss for _, loss in first], rel=1e-4)


def test_a_loss_before_the_first_snapshot_begins_the_epoch_again(alone: Report, tmp_path: Path) -> None:
    report = run(replace(alone.job, faults="kill:beta@step2", snapshot_every=100, snapshot_to="neighbour"), tmp_path)
    [recovery] = report.recoveries
    assert recovery.repeated >= 2
    same_losses(report, alone)


@pytest.mark.usefixtures("nothing_starts")
def test_a_state_that_is_too_large_for_every_step_is_simulated(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is saved at a pause: a device that leaves costs no step, and one that dies costs those of its epoch."""
    monkeypatch.setattr(FineTuningRankJob, "small_bytes", 0)
    reports = [
        experiment.run(
            replace(fine_tuning(job, "full"), faults=f"{kind}:beta@step3"), two_devices(share=None), "simulate"
        )
        for kind in ("kill", "leave")
    ]
    assert [recovery.repeated for report in reports for recovery in report.recoveries] == [3, 0]


@pytest.mark.usefixtures("nothing_starts")
def test_snapshots_on_slow_disks_hold_the_devices_up(job: Job) -> None:
    """At the end of an epoch until they are written; within it only where the disk still writes the one before."""

    def simulated(every: int, bytes_per_s: float) -> Report:
        described = with_devices(two_devices(share=None), storage_write_bytes_per_s=bytes_per_s)
        snapshots = replace(fine_tuning(job, "full"), snapshot_every=every)
        return experiment.run(snapshots, described, "simulate")

    rate = 1e12
    at_ends = simulated(10**6, rate)
    each_s = at_ends.phases_s["snapshots"] / len(at_ends.epochs)
    assert each_s > 0 and simulated(10**6, rate / 2).phases_s["snapshots"] == pytest.approx(
        2 * len(at_ends.epochs) * each_s
    )
    assert simulated(1, rate).phases_s["snapshots"] == at_ends.phases_s["snapshots"]  # while the devices compute

    steps_s = [step.predicted_s or 0.0 for step in at_ends.steps]
    slower = 100 * max(steps_s) / each_s
    first_s = sum(seconds for step, seconds in zip(at_ends.steps, steps_s, strict=True) if step.step == 0)
    written_s = len(steps_s) * slower * each_s  # one after the other, from the first step of each epoch on
    assert simulated(1, rate / slower).phases_s["snapshots"] == pytest.approx(first_s + written_s - sum(steps_s))


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(("method", "options"), [("fine_tuning", {"technique": "lora"}), ("pac_plus", {})])
def test_faults_are_simulated(method: str, options: dict, job: Job) -> None:
    """By the coordinator itself, in virtual time: steps take what they take on the devices that are there then."""
    job, described = (
        replace(job, method=method, options=job.options | options),
        two_devices(share=None),
    )  # no profile is measured
    reference = experiment.run(job, described, "simulate")
    killed = experiment.run(replace(job, faults="kill:beta@step3"), described, "simulate")
    [recovery] = killed.recoveries
    assert recovery.what == "kill beta" and 0 < recovery.seconds < 2 and recovery.step == 3
    assert "beta is lost, in step 4" in told(killed) and recovery.described in killed.notes
    seconds, before = ([step.predicted_s or 0.0 for step in report.steps] for report in (killed, reference))
    assert seconds[:3] == before[:3]
    assert sum(seconds) > sum(before)  # one device does what two did
    frozen = experiment.run(replace(job, faults="freeze:beta@step3"), described, "simulate")
    assert 2 < frozen.recoveries[0].seconds < 3.5
    slow = experiment.run(replace(job, faults="slow:beta:4@step2"), described, "simulate")
    assert slow.recoveries[0].what == "slow beta" and "beta 4.0 times" in told(slow)
    assert sum(step.predicted_s or 0.0 for step in slow.steps) >= sum(before)
    for fault in ("kill", "leave"):
        both = f"{fault}:alpha@step3; {fault}:beta@step3"
        nobody = experiment.run(replace(job, faults=both), described, "simulate")
        assert "No device is left" in told(nobody)
        assert 3 <= len(nobody.steps) < len(reference.steps) and nobody.steps[:3] == reference.steps[:3]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fine_tuning", {"technique": "lora", "paradigm": "data_parallel"}),
        ("ringada", {}),
        ("p_rge", {"queries": 4, "steps": 12}),
        ("p_rge", {"queries": 4, "steps": 12, "after_loss": "repeat"}),
    ],
)
def test_a_run_with_a_loss_takes_the_steps_of_both_plans_and_what_the_loss_wastes(
    method: str, options: dict, job: Job
) -> None:
    """The closed form: whole steps on two devices, a part of one that is lost or finished, the rest on one device."""
    fast, world = two_devices(share=None), VirtualWorld()
    # Steps of seconds, next to which a message is short.
    described = with_devices(fast, flops_per_s=fast.devices[0].flops_per_s / 1000)
    job = replace(job, method=method, model="tiny-llama" if method == "p_rge" else job.model, options=options)
    both = experiment.run(job, described, "simulate")
    whole_s = both.steps[1].predicted_s or 0.0
    begin_s = world.join_s + (both.steps[0].predicted_s or 0.0)
    lost_s, never_s = begin_s + whole_s / 3, 1000 * begin_s
    report = experiment.run(replace(job, faults=f"kill:beta@{lost_s}s; freeze:beta@{never_s}s"), described, "simulate")
    finishes = method == "p_rge" and "after_loss" not in options
    [lost] = report.recoveries
    ending_s = lost.parts_s["stopping"]  # the operation that the other device is doing
    spans = next(iter(both.timelines.values())).spans
    assert 0 <= ending_s <= 1.5 * max(span.end_s - span.start_s for span in spans)
    wasted_s = 2 * world.join_s + (whole_s if finishes else whole_s / 3 + world.notice_s + ending_s)
    wasted_s += PREPARE_S * (method == "ringada")  # it reads the other half of the layers
    messages_s = 20 * world.message_s
    assert report.steps[0] == both.steps[0]
    assert wasted_s - messages_s <= report.phases_s[CHANGES] <= wasted_s + messages_s
    assert f"'freeze' of beta at {never_s:g} s never began" in told(report)
    samples = [step.samples for step in both.steps[2:]]
    assert [step.samples for step in report.steps[2:]] == [
        number // 2 if method == "ringada" else number
        for number in samples  # each brings its own data
    ]
    if method != "ringada":
        alone = experiment.run(job, described.part([0]), "simulate")
        assert report.steps[2:] == alone.steps[2:]
