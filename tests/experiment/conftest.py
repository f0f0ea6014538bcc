"""What the tests of experiment.run share: a cache of their own, the job, a whole run of it, and one that was
stopped."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_job import tiny_job, write_data

from tests.caches import own_cache
from tests.experiment.running import run, stop_in
from workbench.core import Job, Report
from workbench.core.run_folder import sweep_stale_folders


@pytest.fixture(scope="package", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    sweep_stale_folders()
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    with own_cache(tmp_path_factory):
        yield
    left = set(Path(tempfile.gettempdir()).glob("workbench-*")) - before
    assert not [path for path in left if _is_mine(path)]


def _is_mine(folder: Path) -> bool:
    try:
        return f'"pid": {os.getpid()},' in (folder / "owner.json").read_text()
    except OSError:
        return False


@pytest.fixture(scope="package")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return tiny_job(write_data(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="package")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Path]:
    """An uninterrupted run, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run(job, folder), folder


@pytest.fixture(scope="package")
def stopped(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """The folder of a run that was interrupted in its last epoch, and whether that was in the epoch's middle; to be
    copied."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, stop_in(job, folder, 2)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if devices are started."""
    from workbench.runtime import engines

    def pool() -> None:
        raise AssertionError("devices were started")

    monkeypatch.setattr(engines, "default_pool", pool)
