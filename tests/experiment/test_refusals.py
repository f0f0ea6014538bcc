"""What is refused before anything starts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_up_report
import pytest
from tiny_job import two_devices

from tests.clusters import with_devices
from tests.experiment.running import run
from tests.plans import stage, staged_plan, stages
from workbench import experiment
from workbench.core import Cluster, Job
from workbench.core.errors import (
    ConfigError,
    PlanError,
    RuntimeSetupError,
    WorkbenchError,
)
from workbench.core.step_parts import StepParts
from workbench.methods.base import Outcome, Prediction
from workbench.methods.pac_plus import method as pac_plus
from workbench.runtime.work_folder import own_folder


@pytest.mark.usefixtures("nothing_starts")
def test_a_device_without_the_memory_is_refused_with_the_numbers(job: Job, tmp_path: Path) -> None:
    small = with_devices(two_devices(), memory_bytes=250_000)
    with pytest.raises(
        PlanError, match=r"Device '\w+' has 250 kB; stage \d \(layers? .*needs .*weights .*activations.*Add a device"
    ):
        experiment.run(job, small, workdir=tmp_path)


@pytest.mark.usefixtures("nothing_starts")
def test_a_chosen_plan_that_does_not_fit_the_memory(job: Job, tmp_path: Path) -> None:
    chosen = experiment.plan(job, two_devices(), "execute")
    small = replace(
        two_devices(), devices=(two_devices().devices[0], replace(two_devices().devices[1], memory_bytes=1000))
    )
    with pytest.raises(PlanError, match=r"Device .beta. has 1\.0 kB"):
        experiment.run(job, small, workdir=tmp_path, chosen_plan=chosen)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": stages((4, {0: 8}))}, "4 layers; 'tiny-bert' has 6"),
        ({"stages": stages((6, {2: 8}))}, "the cluster has 2 devices"),
        ({"micro_batch_size": 4}, "mini-batches are 8 in 2, the job.s 16 in 2"),
        ({"cached": None}, "no shares for those that run from the cache"),
    ],
)
@pytest.mark.parametrize("mode", ["simulate", "execute"])
def test_a_chosen_plan_of_another_shape(
    mode: experiment.Mode, changes: dict, said: str, job: Job, tmp_path: Path
) -> None:
    plan = staged_plan((6, {0: 8}), method="pac_plus", micro_batches=2, cached=stage(0, 6, {0: 8}))
    with pytest.raises(ConfigError, match=said):
        experiment.run(job, two_devices(), mode, workdir=tmp_path, chosen_plan=replace(plan, **changes))


@pytest.mark.usefixtures("nothing_starts")
def test_clusters_that_cannot_be_emulated(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pac_plus.PacPlus, "prepare", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(ConfigError, match=r"alpha, beta have no host_share.*--mode simulate"):
        experiment.run(job, two_devices(share=None), workdir=tmp_path)
    alpha, beta = two_devices().devices
    with pytest.raises(ConfigError, match=r"alpha has no address, the others have"):
        experiment.run(job, Cluster(name="real", devices=(alpha, replace(beta, address="pi.local"))), workdir=tmp_path)
    with pytest.raises(ConfigError, match="into emulated devices, and real ones over SSH"):
        engines: Any = SimpleNamespace(fidelity="real", loses_devices=False)
        experiment.run(replace(job, faults="slow:beta:2@step1"), two_devices(), workdir=tmp_path, engines=engines)
    with pytest.raises(RuntimeSetupError, match="share the air, which only the kernel emulates"):
        experiment.run(job, replace(two_devices(), medium="wifi"), workdir=tmp_path, fidelity="paced")
    with pytest.raises(ConfigError, match="auto, kernel, paced"):
        experiment.run(job, two_devices(), workdir=tmp_path, fidelity="exact")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mode 'emulate'"):
        experiment.run(job, two_devices(), "emulate")  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_starts")
def test_a_folder_that_another_run_uses(job: Job, tmp_path: Path) -> None:
    with own_folder(tmp_path), pytest.raises(ConfigError, match="Another run is using it"):
        run(job, tmp_path)


@pytest.mark.usefixtures("nothing_starts")
def test_a_folder_that_cannot_be_made(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkbenchError, match=r"cannot be written to: (Not a directory|File exists)"):
        run(job, tmp_path / "file" / "folder")


def test_a_metric_that_is_no_number_is_left_out_and_said() -> None:
    simulated = made_up_report.report()
    outcome = Outcome(fidelity="paced", metrics={"accuracy": 0.5, "pearson": math.nan, "requests per s": math.inf})
    result = experiment._report(
        simulated.job,
        simulated.cluster,
        simulated.plan,
        Prediction(steps=(), epochs=(), timelines={}),
        outcome,
        {},
        StepParts(step_s=1.0, shares={}, busiest="a"),
    )
    assert result.metrics == {"accuracy": 0.5}
    assert result.notes[:2] == tuple(
        f"The metric '{name}' is no number and left out." for name in ("pearson", "requests per s")
    )


FORWARD_ONLY = {"method": "p_rge", "model": "tiny-gpt2", "micro_batches": 1}


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("mode", ["simulate", "execute"])
@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        (
            {"model": "tiny-llama", "options": {"initialization": "torch_pruned"}},
            "does not take 'llama' apart",
            "trained",
        ),
        ({"method": "confidant", "options": {"devices": 3}}, r"devices = 3 .* has 2 devices\. Lower it", "stage"),
        (FORWARD_ONLY | {"options": {"queries": 5000}}, "at most 4,096", "65,536"),
        (FORWARD_ONLY | {"options": {"queries": 70_000}}, "at most 4,096", "65,536"),
        (FORWARD_ONLY | {"model": "tiny-vit"}, "reads pictures.*a model of text", "digits"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    mode: experiment.Mode, changes: dict, said: str, unsaid: str, job: Job, tmp_path: Path
) -> None:
    """Whatever the mode, and with the same limit wherever it is met."""
    with pytest.raises(ConfigError, match=said) as refused:
        experiment.run(replace(job, **changes), two_devices(), mode, workdir=tmp_path)
    assert unsaid not in str(refused.value)


def test_memory_that_no_setting_meets_is_refused_and_one_that_leaves_samples_out_is_noted(job: Job) -> None:
    """On devices of the catalogue, so that nothing is measured."""
    cluster = two_devices(share=None)
    job = replace(job, **FORWARD_ONLY, options={}, epochs=1)
    plain = experiment.run(job, cluster, "simulate")
    assert not any("From step" in note for note in plain.notes)
    small = [with_devices(cluster, memory_bytes=size) for size in (1_000, 600_000)]
    for tight, options in ((small[0], {"adapt": True}), (small[1], {})):
        with pytest.raises(PlanError, match=r"samples in layers .* are missing\. Add a device"):
            experiment.plan(replace(job, options=options), tight)
    report = experiment.run(replace(job, options={"adapt": True}), small[1], "simulate")
    trained = len(report.steps) * report.plan.micro_batch_size
    num_samples = len(plain.steps) * job.batch_size
    assert trained < num_samples
    assert (
        "From step 1 on" in report.notes[0]
        and f"train on {trained} samples, where {num_samples} were asked for" in report.notes[1]
    )
