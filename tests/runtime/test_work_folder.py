from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from safetensors import SafetensorError

from workbench.core.errors import CacheError, ConfigError, PlanError, WriteError
from workbench.runtime.work_folder import own_folder, reporting_full_disk, require_disk


def test_one_run_at_a_time_and_no_trace_of_the_lock(tmp_path: Path) -> None:
    with (
        own_folder(tmp_path / "a" / "run"),
        pytest.raises(ConfigError, match="Another run is using it"),
        own_folder(tmp_path / "a" / "run"),
    ):
        pass
    with own_folder(tmp_path / "a" / "run"):
        assert list((tmp_path / "a" / "run").iterdir()) == []


def test_runs_that_begin_or_end_at_the_same_time_keep_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is refused does not remove the other's empty folder, and one that another removes is made again."""
    folder = tmp_path / "runs" / "run"
    with own_folder(folder):
        with monkeypatch.context() as patch:
            patch.setattr(os.path, "lexists", lambda path: False)  # it began before the other had made its folder
            with pytest.raises(ConfigError, match="Another run is using it"), own_folder(folder):
                pass
        assert folder.is_dir()
    flock, removed = fcntl.flock, []

    def late(descriptor: int, operation: int) -> None:
        if not removed:
            removed.append(folder.rmdir())
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with own_folder(folder):
        assert removed and folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_disk_is_looked_at_beforehand_without_making_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 10**8))
    require_disk(tmp_path / "not" / "there", 9 * 10**7)
    with pytest.raises(CacheError, match=r"needs 95\.0 MB more.*100 MB are free"):
        require_disk(tmp_path / "not" / "there", 95 * 10**6)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        WriteError("Writing 'manifest.json' was asked for.", "No space left on device."),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(CacheError, match=r"disk is full \([\d.]+ [kMG]B are free\).*--resume"),
        reporting_full_disk(tmp_path),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "Permission denied"), PlanError("No space left on device"), KeyboardInterrupt()]
)
def test_other_errors_pass(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, reporting_full_disk(tmp_path):
        raise error
    assert caught.value is error
