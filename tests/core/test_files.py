"""Files that users name: whole or not at all, never in the place of something that is no file."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

import workbench
from workbench.core.errors import WriteError
from workbench.core.files import make_folder, require_writable, whole_file
from workbench.core.serial import write_text


def test_a_file_is_replaced_whole_and_is_on_the_disk_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "report.json"
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths))[1])
    write_text(path, "first ä")
    assert (path.read_text(encoding="utf-8"), stat.S_IMODE(path.stat().st_mode)) == ("first ä", 0o644)
    assert done == ["fsync", "replace", "fsync"]
    path.chmod(0o600)
    write_text(path, "second")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("second", 0o600)
    with pytest.raises(KeyboardInterrupt), whole_file(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    require_writable(path)
    require_writable(tmp_path / "none.json")
    assert path.read_text() == "second"
    assert [file.name for file in tmp_path.rglob("*")] == ["new", "report.json"]


def test_only_whole_file_puts_a_file_in_the_place_of_another() -> None:
    """So that nothing takes a place before it is on the disk.

    An activation cache is a folder that is checked when used; a device's agent is a program without other modules.
    """
    package = Path(workbench.__file__).parent
    moves = re.compile(r"\bos\.(replace|rename)\(|\bshutil\.move\(|\.rename\(")
    results = {str(path.relative_to(package)) for path in package.rglob("*.py") if moves.search(path.read_text())}
    assert results == {"core/files.py", "runtime/activation_cache.py", "runtime/ssh_agent.py"}


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/report.json")
    for text in ("made", "replaced"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "report.json").read_text() == text


def test_devices_and_open_outputs_are_written_through(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    read, written = os.pipe()
    for path in ("/dev/null", tmp_path / "null", "/dev/stdout", f"/dev/fd/{written}"):
        require_writable(path)
        write_text(Path(path), "through")
    assert Path("/dev/null").is_char_device()
    assert capfd.readouterr().out == "through"
    assert os.read(read, 100) == b"through"
    os.close(read), os.close(written)


def _refused_places(folder: Path) -> dict[str, str]:
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    return {
        str(folder): "It is a folder",
        str(folder / "pipe"): "It is a pipe",
        str(folder / "loop"): "symbolic links",
        str(folder / "file" / "below"): "Not a directory|File exists",
        str(folder / ("n" * 300)): "File name too long",
        "/proc/report.json": "No such file",
        "/proc/version": "No such file|Permission denied",
        "/proc/self/fd/987": "Bad file descriptor",
    }


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    for name, found in _refused_places(tmp_path).items():
        with pytest.raises(
            WriteError, match=f"Writing '{name}' was asked for.*({found}).*(Choose another|Name a file)"
        ):
            require_writable(name)
    for name in (str(tmp_path / "file"), "/proc/figures"):
        with pytest.raises(WriteError, match=f"Writing '{name}' was asked for.*(File exists|No such file)"):
            make_folder(name)


def test_a_full_disk_leaves_the_old_file_and_the_device(tmp_path: Path) -> None:
    require_writable("/dev/full")
    with pytest.raises(WriteError, match=r"No space left on device\. Free some space"):
        write_text(Path("/dev/full"), "report")
    assert Path("/dev/full").is_char_device()
    (tmp_path / "report").write_text("old")
    with pytest.raises(WriteError, match="No space left"), whole_file(tmp_path / "report"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report", "old")]
