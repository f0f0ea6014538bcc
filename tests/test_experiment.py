"""experiment.run as a user meets it: what is refused before it starts, what ends in its middle, and how it goes on afterwards."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from tiny_job import EPOCHS, profile_briefly, tiny_job, two_devices, write_data

from workbench import experiment
from workbench.core import Cluster, Job, Plan, Report, Share, Stage
from workbench.core.errors import (
    CacheError,
    ConfigError,
    DeviceLostError,
    MemoryBudgetError,
    PlanError,
    RuntimeSetupError,
    WorkbenchError,
)
from workbench.core.serial import from_json, to_json
from workbench.methods.base import Event
from workbench.methods.pac_plus import method as pac_plus
from workbench.runtime.activation_cache import CacheManifest
from workbench.runtime.engines import default_pool
from workbench.runtime.kept_caches import KeptCaches
from workbench.runtime.run_folder import sweep_stale_folders
from workbench.runtime.work_folder import own_folder

KEPT_AFTER_A_RUN = {"adapter", "checkpoints", "steps", "initial.safetensors", "fingerprint.txt"}


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    sweep_stale_folders()
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        profile_briefly(patch)
        yield
        default_pool().stop()
        left = set(Path(tempfile.gettempdir()).glob("workbench-*")) - before
        assert not [path for path in left if _is_mine(path)]


def _is_mine(folder: Path) -> bool:
    try:
        return f'"pid": {os.getpid()},' in (folder / "owner.json").read_text()
    except OSError:
        return False


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return tiny_job(write_data(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """An uninterrupted run, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced"), folder


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if devices are started."""
    from workbench.runtime import engines

    def pool() -> None:
        raise AssertionError("devices were started")

    monkeypatch.setattr(engines, "default_pool", pool)


def run(job: Job, folder: Path, *, resume: bool = False, progress: Callable[[Event], None] | None = None) -> Report:
    return experiment.run(job, two_devices(), workdir=folder, fidelity="paced", resume=resume, progress=progress)


def losses(report: Report) -> list[tuple[int, int, float | None]]:
    return [(step.epoch, step.step, step.loss) for step in report.steps]


def at(epoch: int, act: Callable[[], None]) -> Callable[[Event], None]:
    """Return a progress function that acts once, at the second step of an epoch (counted from 0)."""
    done: list[Event] = []

    def progress(event: Event) -> None:
        if not done and event.kind == "step" and event.epoch == epoch and event.step == 1:
            done.append(event)
            act()

    return progress


def interrupt() -> None:
    raise KeyboardInterrupt


def stop_in(job: Job, folder: Path, epoch: int) -> bool:
    """Interrupt a run in an epoch; return whether it ended in the epoch's middle."""
    with pytest.raises(KeyboardInterrupt):
        run(job, folder, progress=at(epoch, interrupt))
    # So short an epoch may have ended before the devices heard of it.
    checkpoint = folder / "checkpoints" / f"epoch-{epoch}.safetensors"
    in_its_middle = not checkpoint.exists()
    checkpoint.unlink(missing_ok=True)
    return in_its_middle


# What a run leaves


def test_a_run_reports_every_step_and_leaves_what_the_readme_says(whole: tuple[Report, Path]) -> None:
    report, folder = whole
    assert [(epoch.epoch, epoch.cached) for epoch in report.epochs] == [(0, False), (1, True), (2, True)]
    assert all(step.loss is not None and step.predicted_s and step.measured_s for step in report.steps)
    assert {path.name for path in folder.iterdir()} == KEPT_AFTER_A_RUN
    assert report.artifacts["adapter"] == str(folder / "adapter")
    assert from_json(to_json(report), Report) == report


def test_the_saved_adapter_predicts_the_same_in_a_fresh_process(whole: tuple[Report, Path], job: Job) -> None:
    report, folder = whole
    script = f"""
from workbench.models.evaluation import predict
from workbench.models.loading import load_stack, load_tokenizer
from workbench.models.saving import load_adapter
from workbench.tasks import load_task
from workbench.tasks.metrics import compute
from workbench.tasks.tokenize import evaluation_batches, tokenize

adapter, about = load_adapter({str(folder / "adapter")!r})
task = load_task(about.task, data={job.data!r})
samples = tokenize(task.test, load_tokenizer(about.model), max_length=about.max_length)
[predicted] = predict(load_stack(about.model), [adapter], evaluation_batches(samples))
print(compute(task.metrics, predicted.answers(task.kind), predicted.references()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    expected = {name: value for name, value in report.metrics.items() if name != "chosen epoch"}
    assert done.stdout.strip() == str(expected)


# Ended in its middle


@pytest.mark.parametrize(
    ("epoch", "said"), [(0, r"Resumed after step \d+ of epoch 1 of 3"), (1, r"Resumed after step \d+ of epoch 2 of 3")]
)
def test_a_killed_device_is_named_and_the_run_goes_on_afterwards(
    epoch: int, said: str, job: Job, whole: tuple[Report, Path], tmp_path: Path
) -> None:
    pids = default_pool().acquire(two_devices(), "paced").engine_pids
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(DeviceLostError, match=rf"'beta' \(rank 1\).*epoch {epoch + 1}, step \d") as caught:
        run(job, tmp_path, progress=at(epoch, kill))
    assert time.monotonic() - killed_at[0] < 10
    assert "\n" not in str(caught.value)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    resumed = run(job, tmp_path, resume=True)
    assert losses(resumed) == losses(whole[0])
    assert resumed.metrics == whole[0].metrics
    assert re.match(said, resumed.notes[0])


@pytest.mark.parametrize("epoch", [0, 2])
def test_an_interrupted_run_goes_on_from_its_last_completed_step(epoch: int, job: Job, whole: tuple[Report, Path], tmp_path: Path) -> None:
    in_its_middle = stop_in(job, tmp_path, epoch)
    again: list[Event] = []
    resumed = run(job, tmp_path, resume=True, progress=lambda event: again.append(event) if event.kind == "step" else None)
    assert losses(resumed) == losses(whole[0])
    assert again[0].epoch == epoch
    assert (again[0].step > 0) == in_its_middle
    assert len(again) == sum((event_epoch, step) >= (again[0].epoch, again[0].step) for event_epoch, step, _ in losses(whole[0]))
    assert resumed.metrics == whole[0].metrics
    assert {path.name for path in tmp_path.iterdir()} == KEPT_AFTER_A_RUN


def test_a_finished_run_is_resumed_without_training(whole: tuple[Report, Path], job: Job) -> None:
    report, folder = whole
    steps: list[Event] = []
    again = run(job, folder, resume=True, progress=lambda event: steps.append(event) if event.kind == "step" else None)
    assert not steps
    assert losses(again) == losses(report)
    assert again.metrics == report.metrics
    assert "all 3 epochs were finished" in again.notes[0]


def test_kept_activations_serve_a_later_run_until_they_are_damaged(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    job = replace(job, epochs=2, options={"keep_cache": True, "cache_dtype": "int8"})
    first = run(job, tmp_path / "first")
    assert "kept for later runs" in first.notes[0]
    second = run(replace(job, seed=1, options=job.options | {"reduction": 4}), tmp_path / "second")
    assert [epoch.cached for epoch in second.epochs] == [True, True]
    assert "the backbone is not run" in second.notes[0]
    [kept] = KeptCaches().list()
    data = KeptCaches().folder(kept.key) / "shard-0" / "taps.bin"
    data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
    third = run(job, tmp_path / "third")
    assert [epoch.cached for epoch in third.epochs] == [False, True]
    assert "checksum" in third.notes[0]
    assert losses(third) == losses(first)


@pytest.mark.usefixtures("nothing_starts")
def test_a_disk_budget_is_kept_before_anything_starts(job: Job, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"needs \d\.\d MB .* The disk budget is 0\.0 MB\."):
        run(replace(job, options={"disk_budget_bytes": 1000}), tmp_path)


def _flip(cache: Path) -> None:
    data = bytearray((cache / "taps.bin").read_bytes())
    data[len(data) // 2] ^= 255
    (cache / "taps.bin").write_bytes(data)


def _cut(cache: Path) -> None:
    os.truncate(cache / "taps.bin", 1000)


def _age(cache: Path) -> None:
    manifest = from_json((cache / "manifest.json").read_bytes(), CacheManifest)
    (cache / "manifest.json").write_text(to_json(replace(manifest, fingerprint="of another model")))


def _garble(cache: Path) -> None:
    (cache / "manifest.json").write_text("{]")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_flip, "checksum"),
        (_cut, "1000 bytes instead of"),
        (_age, "another backbone"),
        (_garble, "does not read"),
        (shutil.rmtree, "missing"),
    ],
)
def test_a_cache_that_cannot_be_used_is_told_and_filled_again(
    damage: Callable[[Path], None], said: str, job: Job, whole: tuple[Report, Path], tmp_path: Path
) -> None:
    stop_in(job, tmp_path, 2)
    damage(next(path for path in sorted(tmp_path.glob("rank-*/cache")) if (path / "taps.bin").stat().st_size))
    resumed = run(job, tmp_path, resume=True)
    assert any(said in note for note in resumed.notes)
    assert "filling the cache again" in resumed.phases_s
    assert [loss for _, _, loss in losses(resumed)] == pytest.approx([loss for _, _, loss in losses(whole[0])], rel=1e-6)


@pytest.mark.parametrize("left", [200])
def test_a_damaged_checkpoint_costs_its_epoch_only(left: int, job: Job, whole: tuple[Report, Path], tmp_path: Path) -> None:
    stop_in(job, tmp_path, 2)
    os.truncate(tmp_path / "checkpoints" / "epoch-1.safetensors", left)
    resumed = run(job, tmp_path, resume=True)
    assert resumed.notes[0].startswith("Resumed after epoch 1 of 3")
    assert losses(resumed) == losses(whole[0])


def test_another_job_is_not_resumed(job: Job, whole: tuple[Report, Path]) -> None:
    with pytest.raises(CacheError, match="made by another job"):
        run(replace(job, learning_rate=1e-3), whole[1], resume=True)
    with safe_open(whole[1] / "checkpoints" / "epoch-2.safetensors", framework="pt") as kept:
        assert kept.keys()


def test_diverged_training_is_told(job: Job, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learning_rate = 1e\+06.*loss is (nan|inf) in step \d of epoch 1"):
        run(replace(job, learning_rate=1e6), tmp_path)


# Refused before anything starts


@pytest.mark.usefixtures("nothing_starts")
def test_a_device_without_the_memory_is_refused_with_the_numbers(job: Job, tmp_path: Path) -> None:
    small = replace(two_devices(), devices=tuple(replace(device, memory_bytes=200_000) for device in two_devices().devices))
    with pytest.raises(PlanError, match=r"Device '\w+' has 200 kB; stage \d \(layers? .*needs .*weights .*activations.*Add a device"):
        experiment.run(job, small, workdir=tmp_path)


@pytest.mark.usefixtures("nothing_starts")
def test_a_chosen_plan_that_does_not_fit_the_memory(job: Job, tmp_path: Path) -> None:
    chosen = experiment.plan(job, two_devices(), "execute")
    small = replace(two_devices(), devices=(two_devices().devices[0], replace(two_devices().devices[1], memory_bytes=1000)))
    with pytest.raises(PlanError, match=r"Device .beta. has 1\.0 kB"):
        experiment.run(job, small, workdir=tmp_path, chosen_plan=chosen)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stages": (Stage(start=0, stop=4, shares=(Share(rank=0, samples=8),)),)}, "4 layers; 'tiny-bert' has 6"),
        ({"stages": (Stage(start=0, stop=6, shares=(Share(rank=2, samples=8),)),)}, "the cluster has 2 devices"),
        ({"micro_batch_size": 4}, "mini-batches are 8 in 2, the job.s 16 in 2"),
        ({"cached": None}, "no shares for those that run from the cache"),
    ],
)
@pytest.mark.parametrize("mode", ["simulate", "execute"])
def test_a_chosen_plan_of_another_shape(mode: experiment.Mode, changes: dict, said: str, job: Job, tmp_path: Path) -> None:
    stage = Stage(start=0, stop=6, shares=(Share(rank=0, samples=8),))
    chosen = replace(Plan(method="pac_plus", stages=(stage,), micro_batch_size=8, num_micro_batches=2, cached=stage), **changes)
    with pytest.raises(ConfigError, match=said):
        experiment.run(job, two_devices(), mode, workdir=tmp_path, chosen_plan=chosen)


@pytest.mark.usefixtures("nothing_starts")
def test_clusters_that_cannot_be_emulated(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pac_plus.PacPlus, "prepare", lambda *_: pytest.fail("something was loaded"))
    with pytest.raises(ConfigError, match=r"alpha, beta have no host_share.*--mode simulate"):
        experiment.run(job, two_devices(share=None), workdir=tmp_path)
    alpha, beta = two_devices().devices
    with pytest.raises(RuntimeSetupError, match=r"beta has an address.*torchrun"):
        experiment.run(job, Cluster(name="real", devices=(alpha, replace(beta, address="pi.local"))), workdir=tmp_path)
    with pytest.raises(ConfigError, match="mode 'emulate'"):
        experiment.run(job, two_devices(), "emulate")  # type: ignore[arg-type]


@pytest.mark.usefixtures("nothing_starts")
def test_a_folder_that_another_run_uses(job: Job, tmp_path: Path) -> None:
    with own_folder(tmp_path), pytest.raises(ConfigError, match="Another run is using it"):
        run(job, tmp_path)


@pytest.mark.usefixtures("nothing_starts")
def test_a_folder_that_cannot_be_made(job: Job, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WorkbenchError, match=r"cannot be made: (Not a directory|File exists)"):
        run(job, tmp_path / "file" / "folder")


def test_files_of_other_people_stay(job: Job, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "precious").write_text("mine")
    with pytest.raises(ConfigError, match="holds checkpoints, which no run of the workbench wrote"):
        run(job, tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "thesis")
    run(replace(job, epochs=1), tmp_path)
    run(replace(job, epochs=1), tmp_path)
    assert (tmp_path / "thesis" / "precious").read_text() == "mine"


# Limits that strike in the middle


def test_a_plan_that_promised_too_much_memory(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is silenced; the device's own budget refuses, and the engines live on."""
    for check in ("check_memory", "check_cached"):
        monkeypatch.setattr(pac_plus, check, lambda *_, **__: None)
    devices = two_devices(1_000_000)
    with pytest.raises(MemoryBudgetError, match=r"Device '\w+' .*budget is 1 MB.*raise its memory_bytes"):
        experiment.run(job, devices, workdir=tmp_path, fidelity="paced", chosen_plan=experiment.plan(job, two_devices(), "execute"))
    default_pool().acquire(devices, "paced").stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB; fill_up leaves some of it."""
    place = tmp_path / "disk"
    place.mkdir()
    if not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill_up(disk: Path, leave_bytes: int) -> None:
    free = shutil.disk_usage(disk).free
    (disk / "ballast").write_bytes(random.Random(0).randbytes(max(0, free - leave_bytes)))


@pytest.mark.usefixtures("nothing_starts")
def test_a_disk_too_small_for_the_cache_is_refused(job: Job, small_disk: Path) -> None:
    fill_up(small_disk, 50_000)
    with pytest.raises(CacheError, match=r"cache needs \d+\.\d MB more in .* MB are free.*Free some space"):
        run(job, small_disk / "run")


@pytest.mark.parametrize("leave_bytes", [0, 400_000])
def test_a_disk_that_fills_up_in_the_middle(
    leave_bytes: int, job: Job, whole: tuple[Report, Path], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the cache is made, or once it is there and checkpoints are written; with room again the run goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(pac_plus, "require_fits", lambda *_: None)
        with pytest.raises(CacheError, match=r"(disk is full|No space left).*MB are free.*Free some space") as caught:
            run(job, small_disk / "run", progress=_fill_at_start(small_disk, leave_bytes))
        assert "\n" not in str(caught.value)
    (small_disk / "ballast").unlink()
    assert losses(run(job, small_disk / "run", resume=True)) == losses(whole[0])


def _fill_at_start(disk: Path, leave_bytes: int) -> Callable[[Event], None]:
    def progress(event: Event) -> None:
        if event.kind == "phase" and event.message.startswith("Training"):
            fill_up(disk, leave_bytes)

    return progress


# Edges


@pytest.mark.parametrize("changes", [{"epochs": 1}, {"train_samples": 3}, {"batch_size": 1, "micro_batches": 1, "train_samples": 4}])
def test_small_jobs(changes: dict, job: Job, tmp_path: Path) -> None:
    report = run(replace(job, **changes), tmp_path)
    assert len(report.epochs) == changes.get("epochs", EPOCHS)
    assert all(step.loss for step in report.steps)
