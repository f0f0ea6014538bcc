"""What a real device needs before it can work: this workbench's code, brought to it before each run, and once the libraries."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workbench
from workbench.core.catalogue import data_folder
from workbench.core.errors import RuntimeSetupError
from workbench.runtime.ssh import Connection

PROJECT = "edge-llm-workbench"
_LEFT_OUT = ("nvidia", "cuda", "triton")
"""Libraries of torch's GPU builds."""
OTHER_VERSIONS = "Its libraries have other versions than this machine's."
_PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}


def bring_code(connection: Connection) -> str:
    """Bring this workbench to a device that has another version of it; return its folder there.  Raises RuntimeSetupError."""
    root = Path(workbench.__file__).parent
    files = [(path, Path("workbench") / path.relative_to(root)) for path in sorted(root.rglob("*.py"))]
    files += [(path, Path("workbench/_data") / path.name) for path in sorted(data_folder().glob("*.toml"))]
    digest = hashlib.sha256()
    for path, name in files:
        digest.update(f"{name}\0".encode() + path.read_bytes())
    folder = f"code-{digest.hexdigest()[:16]}"
    if not connection.ask("holds", folder=folder):
        _bring_archive(connection, folder, files, python=False)
    return f"{connection.greeting['kit']}/{folder}"


def _kind_of(greeting: Mapping[str, str]) -> tuple[str, str]:
    """Return a device's processor and Python, as '3.13'."""
    return greeting["machine"], ".".join(greeting["python"].split(".")[:2])


def environment_name(greeting: Mapping[str, str], pins: Sequence[str]) -> str:
    """Return the name of the environment of a device's kind with these libraries."""
    return f"env-{hashlib.sha256(' '.join((*_kind_of(greeting), *pins)).encode()).hexdigest()[:16]}"


def environment_python(connection: Connection) -> str:
    """Return the Python of the environment that `install` made on a device.  Raises RuntimeSetupError if there is none of our versions."""
    environment = connection.ask("facts")["environment"]
    asked = f"Device '{connection.name}' was to run a job."
    if not environment:
        raise RuntimeSetupError(asked, "It has no libraries yet.", "Run `workbench kit setup` first, or name a Python of its own.")
    if environment != environment_name(connection.greeting, pinned((PROJECT,))):
        raise RuntimeSetupError(asked, OTHER_VERSIONS, "Run `workbench kit setup`.")
    return f"{connection.greeting['kit']}/{environment}/bin/python"


def install(connection: Connection, say: Callable[[str], None], packages: Sequence[str] = (PROJECT,)) -> bool:
    """Put the libraries on a device, at this machine's versions, unless they are there; return whether anything was done.

    packages: which, with all that they need; by default what the workbench itself needs.
    They are installed into a folder here, for the device's Python and processor, with the digests of the project's lock, and sent as one
    archive; it needs no network.
    Raises RuntimeSetupError, which names the step that failed.
    """
    machine, version = _kind_of(connection.greeting)
    asked = f"The libraries for device '{connection.name}' (Python {version} on {machine}) were asked for."
    if machine not in _PLATFORMS:
        raise RuntimeSetupError(asked, f"There are none for {machine}; known: {', '.join(_PLATFORMS)}.", "Install a 64-bit system there.")
    pins = pinned(packages)
    environment = environment_name(connection.greeting, pins)
    if connection.ask("holds", folder=environment):
        return False
    uv = shutil.which("uv", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", ""))))
    if uv is None:
        raise RuntimeSetupError(asked, "uv is not on this machine.", "Install it: pip install uv.")
    target = ("--only-binary", ":all:", "--no-config", "--python-platform", _PLATFORMS[machine], "--python-version", version)

    def run(*words: str, said: str = "") -> str:
        done = subprocess.run([uv, "pip", *words, "--no-deps", *target, *index_options()], input=said, capture_output=True, text=True)
        if done.returncode:
            last = " ".join(done.stderr.split())[:400]
            raise RuntimeSetupError(asked, f"uv could not: {last}", "Check the network, and that the index has wheels for it.")
        return done.stdout

    lines = locked(pins, lambda pin: run("compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "-", said=pin), say)
    with tempfile.TemporaryDirectory(prefix="workbench-kit-") as scratch:
        say(f"{connection.name}: collecting {len(pins)} libraries for Python {version} on {machine}")
        run("install", "--quiet", "--require-hashes", "--python", sys.executable, "--target", scratch, "-r", "-", said="\n".join(lines))
        if list(Path(scratch).glob("torch/lib/libtorch_cuda.*")):
            found = "The index serves torch for GPUs: 430 MB or more, and several GB of libraries with it, which a device cannot use."
            raise RuntimeSetupError(asked, found, "Name the index of its CPU build: pip config set global.extra-index-url ADDRESS.")
        root = Path(scratch)
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
        say(f"{connection.name}: sending {sum(path.stat().st_size for path in files) / 1e6:.0f} MB, compressed")
        _bring_archive(connection, environment, ((path, path.relative_to(root)) for path in files), python=True)
    return True


_INDEX_OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def index_options() -> list[str]:
    """Return where pip's settings on this machine say that packages come from, as uv's options: uv does not read pip's settings."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = {}
    for section in ("global.", "install.", ":env:."):
        for line in said.splitlines():
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and name in _INDEX_OPTIONS:
                found[name] = ast.literal_eval(value).split()
    options = [word for name, values in found.items() for value in values for word in (_INDEX_OPTIONS[name], value)]
    return [*options, "--index-strategy", "unsafe-best-match"] if "extra-index-url" in found else options


def pinned(packages: Sequence[str]) -> tuple[str, ...]:
    """Return packages and all that they need at the versions of this machine, without what only GPUs use."""
    found: dict[str, str] = {}
    left = [canonicalize_name(name) for name in packages]
    while left:
        name = left.pop()
        if name in found or name.startswith(_LEFT_OUT):
            continue
        try:
            here = distribution(name)
        except PackageNotFoundError:
            continue  # of another platform
        if name != PROJECT:  # its code is brought before each run
            found[name] = here.version.partition("+")[0]  # the build for a processor is the index's to choose
        for text in here.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                left.append(canonicalize_name(requirement.name))
    return tuple(f"{name}=={version}" for name, version in sorted(found.items()))


def locked(pins: Sequence[str], found_of: Callable[[str], str], say: Callable[[str], None]) -> list[str]:
    """Return pins with the digests of the project's lock, as requirements.  Raises RuntimeSetupError for a pin that is not in it.

    found_of: returns an index's torch with its digests.  A build that the lock does not know is taken by the index's word, which is said.
    """
    lock = dict(re.findall(r"^(\S+)[^\\\n]*((?: \\\n +--hash=\S+)+)", (data_folder() / "hashes.txt").read_text(), re.MULTILINE))
    unknown = [pin for pin in pins if pin not in lock]
    if unknown:
        asked = "The libraries for a device were asked for."
        raise RuntimeSetupError(asked, f"The project's lock does not know {', '.join(unknown)}.", "Install this machine by `make setup`.")
    lines = []
    for pin in pins:
        digests = set(lock[pin].split()) - {"\\"}
        if pin.startswith("torch=="):
            pin, *own = found_of(pin).replace("\\", " ").split()
            if not digests.issuperset(own):
                say(f"{pin}: the lock knows no digest of this build; the index's is taken.")
            digests.update(own)
        lines.append(" ".join((pin, *sorted(digests))))
    return lines


def _bring_archive(connection: Connection, folder: str, files: Iterable[tuple[Path, Path]], *, python: bool) -> None:
    """Send files as one archive and have it unpacked."""
    with tempfile.NamedTemporaryFile(prefix="workbench-kit-", suffix=".tar.gz") as archive:
        with tarfile.open(archive.name, "w:gz", compresslevel=1) as tar:
            for path, name in files:
                tar.add(path, str(name), recursive=False)
        connection.send_file(Path(archive.name), f"kit/{folder}.tar.gz").result()
        connection.ask("unpack", timeout_s=600.0, archive=f"kit/{folder}.tar.gz", folder=folder, python=python)
