"""Devices that are lost, leave, return or become slow while Confidant trains: who takes over,
and what the run repeats."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_job import two_devices

from workbench import experiment
from workbench.core import Job, Link, Report
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError
from workbench.methods.base import Event
from workbench.methods.confidant import method as confidant

from .tiny_runs import devices, losses, run


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


@pytest.mark.parametrize("technique", ["serial", "parallel"])
def test_other_methods_adapters_survive_a_loss(technique: str, job: Job, tmp_path: Path) -> None:
    """Executed: of three equal devices two train, one of them is killed, and the losses are those of an undisturbed
    run."""
    options = job.options | {"technique": technique, "devices": 2}
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
