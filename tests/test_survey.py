from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import answer, call

from tests.clusters import cluster_of
from tests.methods.builders import write_sentences
from workbench.cli import measure as printed
from workbench.core.catalogue import load_cluster
from workbench.core.cluster import Cluster, Link
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.profile import Bytes, Grid, LayerProfile
from workbench.methods.base import Event, ignore
from workbench.methods.pac_plus import method
from workbench.profiler.host import HostProfile, LinkSample, fit_link
from workbench.runs import survey
from workbench.runs.survey import (
    DeviceRates,
    LayerRow,
    LayerSurvey,
    LinkRow,
    LinkSurvey,
    alike,
    survey_devices,
    survey_layers,
    survey_links,
)
from workbench.runtime.measuring import PacedGroup
from workbench.runtime.pacing import RankLinks

HOST = HostProfile(
    gemm_flops_per_s=100e9,
    memory_bytes_per_s=20e9,
    storage_bytes_per_s=600e6,
    storage_write_bytes_per_s=200e6,
    storage_is_cold=True,
    cores=2,
    processor="made up",
    memory_bytes=8 * 10**9,
    swap_bytes=10**8,
)


def two_devices(bytes_per_s: float = 12.5e6) -> Cluster:
    return cluster_of(("left", "right"), name="two", bytes_per_s=bytes_per_s, latency_s=0.002, host_share=0.5)


def test_emulated_devices_have_their_share_of_this_machine_and_others_the_catalogues(monkeypatch) -> None:
    monkeypatch.setattr(survey, "measure_host", lambda seconds: HOST)
    emulated, described = two_devices().devices
    cluster = Cluster(name="mixed", devices=(emulated, replace(described, host_share=None, storage_bytes_per_s=90e6)))
    host, (mine, other) = survey_devices(cluster)
    assert host is HOST
    assert (mine.emulated, mine.flops_per_s, mine.memory_bytes_per_s) == (True, 50e9, 10e9)
    assert (mine.storage_bytes_per_s, mine.storage_write_bytes_per_s) == (300e6, 100e6)
    assert other.storage_write_bytes_per_s is None
    assert (other.emulated, other.flops_per_s, other.memory_bytes_per_s, other.storage_bytes_per_s) == (
        False,
        1e9,
        None,
        90e6,
    )


def test_links_between_emulated_devices_are_measured() -> None:
    result = survey_links(two_devices(), repeats=2)
    used, rows = result.fidelity, result.rows
    assert used in ("kernel", "paced")
    assert [(row.source, row.destination) for row in rows] == [("left", "right"), ("right", "left")]
    for row in rows:
        assert row.described == Link(bytes_per_s=12.5e6, latency_s=0.004)
        for sample in (
            row.samples
        ):  # an emulated link is never too fast, but for the kernel's burst of 16 KB; a busy machine makes it slow
            assert sample.round_trip_s >= 2 * 0.004 + max(0, sample.nbytes - 2 * 16384) / 12.5e6
        assert row.measured == fit_link(row.samples)
        assert max(sample.nbytes for sample in row.samples) <= 0.3 * 12.5e6
    with pytest.raises(ConfigError, match="one device"):
        survey_links(two_devices().part([1]))


@pytest.mark.parametrize(("fidelity", "seconds"), [("paced", 0.014), ("kernel", 0.004), ("real", 0.0)])
def test_a_paced_group_waits_for_what_the_kernel_does_not_emulate(fidelity: Any, seconds: float) -> None:
    calls: list[tuple] = []

    class Group:
        def send(self, tensors, destination, tag):
            calls.append(("send", destination, tag))
            return "work"

    paced = PacedGroup(
        Group(),
        RankLinks(cluster=two_devices(), rank=0, fidelity=fidelity),
        sleep=lambda seconds: calls.append(("sleep", seconds)),
    )
    assert paced.send([torch.zeros(125_000, dtype=torch.uint8)], 1, 7) == "work"
    assert calls == [("sleep", pytest.approx(seconds)), ("send", 1, 7)]


@pytest.fixture
def measured(monkeypatch, tmp_path: Path) -> list[int]:
    """Stand in for the measurement, in a cache of its own; returns a list that grows with each measurement."""
    calls: list[int] = []

    def measure_layers(stack, config, *, dtype, max_length):
        calls.append(1)
        grid = Grid(batch_sizes=(1, 16), sequence_lengths=(8, 64), seconds=((1e-3, 2e-3), (4e-3, 8e-3)))
        times = {"F": grid, "SF": grid, "SB": grid, "LOAD": grid, "TAPE": grid.scaled(0), "STEP": grid}
        sizes = {
            "frozen_bytes": 1000,
            "trainable_bytes": 100,
            "output_bytes": Bytes(10),
            "context_bytes": Bytes(20),
        }
        return tuple(LayerProfile(name=f"layer {index}", times=times, **sizes) for index in range(config.num_layers))

    monkeypatch.setattr(method, "measure_layers", measure_layers)
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return calls


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    data = write_sentences(tmp_path_factory.mktemp("data") / "ratings")
    return Job(model="tiny-bert", data=str(data), train_samples=32, validation_samples=8, test_samples=8)


def test_layers_beside_their_analytic_figures(measured: list[int], job: Job) -> None:
    result = survey_layers(job, two_devices(), batch_sizes=(1, 16), sequence_length=64, device="right")
    assert (result.model, result.device, result.source, len(result.rows)) == ("tiny-bert", "right", "scaled", 12)
    row = result.rows[6]
    assert (row.layer, row.batch) == (0, 16)
    assert row.measured["forward_s"] == pytest.approx(2 * 2 * 8e-3)  # F and SF, on half a core
    assert row.measured["backward_s"] == pytest.approx(2 * 8e-3)
    assert row.measured["activation_bytes"] == 16 * 64 * 10
    hidden, feed_forward = 32, 64
    products = 2 * 16 * 64 * (4 * hidden * hidden + 2 * hidden * feed_forward)
    attention = 4 * 16 * 64 * 64 * hidden
    assert row.analytic["forward_flops"] > products + attention  # the side network comes on top
    assert row.flops_per_s == pytest.approx(
        (row.analytic["forward_flops"] + row.analytic["backward_flops"]) / (6 * 8e-3)
    )
    assert row.analytic["tap_bytes"] == 16 * 64 * hidden * 2 * 2  # b_0 and b_1, in bfloat16
    assert [(first, last) for first, last, _ in alike(result)] == [(0, 0), (1, 4), (5, 5)]


def test_a_kept_profile_is_used_and_its_age_shown(measured: list[int], job: Job) -> None:
    first = survey_layers(job, two_devices())
    again = survey_layers(job, two_devices())
    assert len(measured) == 1
    assert "measured now" in first.notes[0] and "ago on this machine" in again.notes[0]
    assert again.rows == first.rows
    survey_layers(job, two_devices(), refresh=True)
    assert len(measured) == 2


def test_the_key_knows_the_models_shape_the_adapter_and_the_cache(measured: list[int], job: Job, monkeypatch) -> None:
    """Another model under the same name, another adapter, cache type, length or library version is measured again;
    another seed is not."""
    pac_plus = method.PacPlus()
    prepared = pac_plus.prepare(job, ignore)
    notes: list[str] = []

    def layers(changed) -> int:
        pac_plus.host_layers(changed, lambda event: notes.append(event.message) if event.kind == "note" else None)
        return len(measured)

    assert layers(prepared) == 1
    assert layers(replace(prepared, facts=replace(prepared.facts, feed_forward_size=65))) == 2
    assert layers(replace(prepared, adapter=replace(prepared.adapter, reduction=4))) == 3
    assert layers(replace(prepared, options=replace(prepared.options, cache_dtype="float32"))) == 4
    assert layers(replace(prepared, train=replace(prepared.train, ids=((5,) * 65, *prepared.train.ids[1:])))) == 5
    assert layers(replace(prepared, adapter=replace(prepared.adapter, seed=7))) == 5
    fingerprint = {"torch": "0.0"}
    monkeypatch.setattr("workbench.profiler.cache.host_fingerprint", lambda: fingerprint)
    assert layers(prepared) == 6
    assert ["measured now" in note for note in notes] == [True] * 5 + [False, True]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"device": "middle"}, "left, right"),
        ({"batch_sizes": (0,)}, "at least 1"),
        ({"sequence_length": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(job: Job, asked, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        survey_layers(job, two_devices(), **asked)


def test_devices_measured_on_the_command_line(monkeypatch) -> None:
    rates = DeviceRates(
        name="alpha",
        emulated=True,
        flops_per_s=5e10,
        memory_bytes_per_s=1e10,
        storage_bytes_per_s=3e8,
        storage_write_bytes_per_s=2e8,
        memory_bytes=600_000_000,
    )
    monkeypatch.setattr(printed, "survey_devices", lambda cluster: (HOST, (rates,)))
    shown = call("devices", "--measure", columns=160).stdout
    assert "made up" in shown
    assert next(line for line in shown.splitlines() if "alpha" in line and "emulated" in line).split()[1:6] == [
        "50.0",
        "10.0",
        "300",
        "200",
        "600",
    ]
    kept = answer("devices", "--measure")
    assert kept["host"]["gemm_flops_per_s"] == 1e11 and kept["devices"][0]["flops_per_s"] == 5e10


def test_links_on_the_command_line(monkeypatch) -> None:
    sample = LinkSample(source=0, destination=1, nbytes=1000, round_trip_s=0.001)
    row = LinkRow(
        source="alpha",
        destination="beta",
        described=Link(bytes_per_s=125e6, latency_s=4e-4),
        measured=Link(bytes_per_s=118e6, latency_s=4.5e-4),
        samples=(sample,),
    )
    requests: list[str] = []

    def links(cluster, *, fidelity):
        requests.append(fidelity)
        return LinkSurvey(fidelity="kernel", rows=(row, replace(row, source="beta")), at_once=1.9)

    monkeypatch.setattr(printed, "survey_links", links)
    shown = call("devices", "--links", "--fidelity", "kernel", columns=160).stdout
    assert requests == ["kernel"]
    assert next(line for line in shown.splitlines() if "alpha > beta" in line).split()[3:] == [
        "1000",
        "944",
        "0.40",
        "0.45",
    ]
    assert "takes 1.90 times as long as alone: they share a medium" in " ".join(shown.split())
    kept = answer("devices", "--links")
    assert (kept["at_once"], kept["medium"]) == (1.9, "wifi")
    assert kept["label"] == "emulated, kernel links"
    assert kept["links"][0]["samples"][0]["bytes_per_s"] == pytest.approx(1e6)


def test_layers_on_the_command_line(monkeypatch) -> None:
    names = ("frozen_bytes", "trainable_bytes", "activation_bytes", "tap_bytes", "context_bytes")
    requests = []

    def layers(job, cluster, **settings):
        requests.append((job, settings))
        settings["progress"](Event("phase", message="Profiling this machine (once)"))
        rows = tuple(
            LayerRow(
                layer=layer,
                batch=batch,
                measured={"forward_s": 0.001 * batch, "backward_s": 0.002 * batch, **dict.fromkeys(names, 2000)},
                analytic={"forward_flops": 3e6, "backward_flops": 6e6, **dict.fromkeys(names, 3000)},
            )
            for batch in (1, 2)
            for layer in range(3)
        )
        return LayerSurvey(
            model=job.model,
            method="pac_plus",
            device="alpha",
            source="scaled",
            sequence_length=8,
            rows=rows,
            notes=("Measured 3 days ago.",),
        )

    monkeypatch.setattr(printed, "survey_layers", layers)
    result = call(
        "devices",
        "--layers",
        "--model",
        "tiny-bert",
        "--batch",
        "1",
        "--batch",
        "2",
        "--length",
        "8",
        "--option",
        "reduction=4",
    )
    assert requests[0][0].model == "tiny-bert" and requests[0][0].options == {"reduction": 4}
    assert requests[0][1]["batch_sizes"] == (1, 2) and requests[0][1]["sequence_length"] == 8
    lines = [line for line in result.stdout.splitlines() if line.strip().startswith("0-2")]
    assert lines[0].split() == ["0-2", "1.00", "2.00", "2.00", "4.00", "0.009", "1.5"]
    assert lines[1].split() == ["0-2", *("2 | 3 " * 5).split()]
    assert "Measured 3 days ago." in result.stdout
    assert answer("devices", "--layers")["rows"][0]["layer"] == 0


def test_one_measurement_at_a_time() -> None:
    assert call("devices", "--measure", "--links").exit_code == 2
    assert load_cluster("laptop").world_size == 4  # the default that the command would have measured
