"""Limits of memory and disk."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_job import two_devices

from tests.experiment.running import losses, run
from workbench import experiment
from workbench.core import Job, Report
from workbench.core.errors import (
    CacheError,
    MemoryBudgetError,
)
from workbench.methods.base import Event
from workbench.methods.pac_plus import method as pac_plus
from workbench.runtime.engines import default_pool


def test_a_plan_that_promised_too_much_memory(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner is silenced; the device's own budget refuses, and the engines live on."""
    monkeypatch.setattr(pac_plus, "check_memory", lambda *_, **__: None)
    devices = two_devices(1_000_000)
    with pytest.raises(MemoryBudgetError, match=r"Device '\w+' .*budget is 1\.0 MB.*raise its memory_bytes"):
        experiment.run(
            job, devices, workdir=tmp_path, fidelity="paced", chosen_plan=experiment.plan(job, two_devices(), "execute")
        )
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
    with pytest.raises(CacheError, match=r"cache needs [\d.]+ [kM]B more in .* [kM]B are free.*Free some space"):
        run(job, small_disk / "run")


@pytest.mark.parametrize("leave_bytes", [0, 400_000])
def test_a_disk_that_fills_up_in_the_middle(
    leave_bytes: int, job: Job, whole: tuple[Report, Path], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the cache is made, or once it is there and snapshots are written; with room again the run goes on."""
    with monkeypatch.context() as patch:
        patch.setattr(pac_plus, "require_disk", lambda *_: None)
        with pytest.raises(
            CacheError, match=r"(disk is full|No space left).*(B|bytes) are free.*Free some space"
        ) as caught:
            run(job, small_disk / "run", progress=_fill_at_start(small_disk, leave_bytes))
        assert "\n" not in str(caught.value)
    (small_disk / "ballast").unlink()
    assert losses(run(job, small_disk / "run", resume=True)) == losses(whole[0])


def _fill_at_start(disk: Path, leave_bytes: int) -> Callable[[Event], None]:
    def progress(event: Event) -> None:
        if event.kind == "phase" and event.message.startswith("Training"):
            fill_up(disk, leave_bytes)

    return progress
