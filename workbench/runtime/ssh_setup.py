"""Set up a real device: send it this workbench's code before each run, and once the libraries."""

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
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workbench
from workbench.core.catalogue import data_folder
from workbench.core.errors import RuntimeSetupError
from workbench.core.methods import registered
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import text_digest
from workbench.core.units import size_words
from workbench.runtime.frames import Greeting
from workbench.runtime.ssh import Connection

PROJECT = "edge-llm-workbench"
_LEFT_OUT = ("nvidia", "cuda", "triton")
"""Libraries of torch's GPU builds."""
_PARSING = threading.Lock()
"""Boards are set up side by side, but Python 3.11 fails if two threads parse Python at the same time
(python/cpython#106905); requirements have strings of Python."""
OTHER_VERSIONS = "Its libraries have other versions than the project's lock."
_PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
TRIAL = "import torch; torch.ones(9, 9) @ torch.ones(9, 9)"
"""A device must be able to run this before its libraries count as installed."""


def code_files() -> list[tuple[Path, Path]]:
    """Return the files that a device needs besides libraries, each with its name there: this workbench, and the
    installed methods.

    They include the metadata of a method's package, which has its entry point, but no other data of the package.
    """
    root = Path(workbench.__file__).parent
    files = [(path, Path("workbench") / path.relative_to(root)) for path in sorted(root.rglob("*.py"))]
    files += [(path, Path("workbench/_data") / path.name) for path in sorted(data_folder().glob("*.toml"))]
    for point in registered().values():
        about = (
            []
            if point.dist is None
            else [file for file in point.dist.files or () if file.name in ("METADATA", "entry_points.txt")]
        )
        files += [(Path(str(file.locate())), Path(file)) for file in about]
        package = point.module.partition(".")[0]
        spec = None if package == "workbench" else find_spec(package)
        if spec is not None and spec.origin is not None:
            place = Path(spec.origin)
            sources = sorted(place.parent.rglob("*.py")) if place.name == "__init__.py" else [place]
            folder = place.parent.parent if place.name == "__init__.py" else place.parent
            files += [(path, path.relative_to(folder)) for path in sources]
    return sorted(set(files), key=lambda file: file[1])


def bring_code(connection: Connection) -> str:
    """Send this workbench to a device that has another version of it, and return its folder there.  Raises
    RuntimeSetupError.
    """
    files, digest = code_files(), hashlib.sha256()
    for path, name in files:
        digest.update(f"{name}\0".encode() + path.read_bytes())
    folder = f"code-{digest.hexdigest()[:16]}"
    if not connection.ask("holds", folder=folder):
        _bring_archive(connection, folder, files, python=False)
    return f"{connection.greeting.kit}/{folder}"


def _kind_of(greeting: Greeting) -> tuple[str, str]:
    """Return a device's processor and Python, as '3.13'."""
    return greeting.machine, ".".join(greeting.python.split(".")[:2])


def environment_name(greeting: Greeting, pins: Sequence[str]) -> str:
    """Return the name of the environment with these libraries for a device's processor and Python."""
    return f"env-{text_digest(' '.join((*_kind_of(greeting), *pins)))}"


def environment_python(connection: Connection) -> str:
    """Return the Python of the environment that `install` made on a device.  Raises RuntimeSetupError if there is none
    with our versions.
    """
    environment = connection.ask("facts").environment
    request = f"Device '{connection.name}' was to run a job."
    if not environment:
        raise RuntimeSetupError(
            request, "It has no libraries yet.", "Run `workbench kit setup` first, or name the device's own Python."
        )
    if environment != environment_name(connection.greeting, pinned((PROJECT,), connection.greeting)):
        raise RuntimeSetupError(request, OTHER_VERSIONS, "Run `workbench kit setup`.")
    return f"{connection.greeting.kit}/{environment}/bin/python"


def install(connection: Connection, say: Callable[[str], None]) -> bool:
    """Install the libraries on a device, at the lock's versions.  Returns False if they were already there.

    They are installed into a folder here, for the device's Python and processor, with the digests of the project's
    lock, and sent as one archive.  The device needs no network.  At the end the device imports torch and multiplies
    once.
    Raises RuntimeSetupError, which names the step that failed.
    """
    machine, version = _kind_of(connection.greeting)
    request = f"The libraries for device '{connection.name}' (Python {version} on {machine}) were asked for."
    if machine not in _PLATFORMS:
        raise RuntimeSetupError(
            request, f"There are none for {machine}; known: {', '.join(_PLATFORMS)}.", "Install a 64-bit system there."
        )
    pins = pinned((PROJECT,), connection.greeting)
    environment = environment_name(connection.greeting, pins)
    if connection.ask("holds", folder=environment):
        return False
    uv = shutil.which("uv", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", ""))))
    if uv is None:
        raise RuntimeSetupError(request, "uv is not on this machine.", "Install it: pip install uv.")
    target = [
        "--only-binary",
        ":all:",
        "--no-config",
        "--python-platform",
        _PLATFORMS[machine],
        "--python-version",
        version,
    ]
    target += index_options()
    has_own_index = "UV_INDEX" in os.environ or "UV_DEFAULT_INDEX" in os.environ or index_options()
    if machine == "x86_64" and not has_own_index:  # aarch64 gets a version of which the default index has a CPU build
        target += ["--torch-backend", "cpu"]

    def run(*words: str, stdin: str = "") -> str:
        done = subprocess.run([uv, "pip", *words, "--no-deps", *target], input=stdin, capture_output=True, text=True)
        if done.returncode:
            last = " ".join(done.stderr.split())[:400]
            raise RuntimeSetupError(
                request, f"uv could not: {last}", "Check the network, and that the index has wheels for it."
            )
        return done.stdout

    lines = locked(
        pins,
        lambda pin: run("compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "-", stdin=pin),
        say,
    )
    with scratch_folder() as scratch:
        root = scratch / "libraries"
        say(f"{connection.name}: collecting {len(pins)} libraries for Python {version} on {machine}")
        run(
            "install",
            "--quiet",
            "--require-hashes",
            "--python",
            sys.executable,
            "--target",
            str(root),
            "-r",
            "-",
            stdin="\n".join(lines),
        )
        if list(root.glob("torch/lib/libtorch_cuda.*")):
            problem = (
                "The index serves torch for GPUs: 430 MB or more, and several GB of libraries with it, which a "
                "device cannot use."
            )
            raise RuntimeSetupError(
                request, problem, "Name the index of its CPU build: pip config set global.extra-index-url ADDRESS."
            )
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
        say(f"{connection.name}: sending {size_words(sum(path.stat().st_size for path in files))}, compressed")
        trial = TRIAL if any(pin.startswith("torch==") for pin in pins) else ""
        _bring_archive(
            connection, environment, ((path, path.relative_to(root)) for path in files), python=True, trial=trial
        )
    return True


_INDEX_OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def index_options() -> list[str]:
    """Return the package indices of pip's settings on this machine as options of uv, which does not read pip's
    settings.
    """
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for section in ("global.", "install.", ":env:."):
        for line in listing.splitlines():
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and name in _INDEX_OPTIONS:
                with _PARSING:
                    settings[name] = ast.literal_eval(value).split()
    options = [word for name, values in settings.items() for value in values for word in (_INDEX_OPTIONS[name], value)]
    return [*options, "--index-strategy", "unsafe-best-match"] if "extra-index-url" in settings else options


def pinned(packages: Sequence[str], greeting: Greeting) -> tuple[str, ...]:
    """Return packages and their dependencies on a device, at the lock's versions for it, without those that only GPUs
    use.

    Raises RuntimeSetupError if this machine has another version than the lock, because a job would then differ between
    the two machines.
    """
    version = greeting.python
    markers = {
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
        "implementation_version": version,
    }
    markers |= {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": greeting.machine,
    }
    lock = [
        _requirement(text)
        for text in re.findall(r"^([^#\s][^\\\n]*)", (data_folder() / "hashes.txt").read_text(), re.MULTILINE)
    ]

    def versions(**environment: str) -> dict[str, str]:
        applying = [pin for pin in lock if pin.marker is None or pin.marker.evaluate(environment)]
        return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in applying}

    locked_here, locked_there = versions(), versions(**markers)
    pins: dict[str, str] = {}
    unknown: list[str] = []
    queue = [canonicalize_name(name) for name in packages]
    while queue:
        name = queue.pop()
        if name in pins or name.startswith(_LEFT_OUT):
            continue
        pins[name] = locked_there.get(name, "")
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # of the device's platform alone
            continue
        release = installed.version.partition("+")[0]  # the index chooses the build for a processor
        if name != PROJECT and release != locked_here.get(name):
            unknown.append(f"{name}=={release}")
        for text in installed.requires or ():
            requirement = _requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(markers | {"extra": ""}):
                queue.append(canonicalize_name(requirement.name))
    if unknown:
        request = "The libraries for a device were asked for."
        found_here = f"The project's lock does not know {', '.join(sorted(unknown))}."
        raise RuntimeSetupError(request, found_here, "Install this machine by `make setup`.")
    pins.pop(PROJECT, None)  # its code is sent before each run
    return tuple(f"{name}=={version}" for name, version in sorted(pins.items()) if version)


@cache
def _requirement(text: str) -> Requirement:
    with _PARSING:
        return Requirement(text)


def locked(pins: Sequence[str], found_of: Callable[[str], str], say: Callable[[str], None]) -> list[str]:
    """Return pins with the digests of the project's lock, as requirements.

    found_of: returns an index's torch with its digests.  A build that the lock does not know is accepted with the
    index's digest, and `say` reports that.
    """
    lock = dict(
        re.findall(r"^(\S+)[^\\\n]*((?: \\\n +--hash=\S+)+)", (data_folder() / "hashes.txt").read_text(), re.MULTILINE)
    )
    lines = []
    for pin in pins:
        digests = set(lock[pin].split()) - {"\\"}
        if pin.startswith("torch=="):
            pin, *hashes = found_of(pin).replace("\\", " ").split()
            if not digests.issuperset(hashes):
                say(f"{pin}: the lock knows no digest of this build; the index's is taken.")
            digests.update(hashes)
        lines.append(" ".join((pin, *sorted(digests))))
    return lines


def _bring_archive(
    connection: Connection, folder: str, files: Iterable[tuple[Path, Path]], *, python: bool, trial: str = ""
) -> None:
    """Send files as one archive, and let the agent unpack and test it."""
    with tempfile.NamedTemporaryFile(prefix="workbench-kit-", suffix=".tar.gz") as archive:
        with tarfile.open(archive.name, "w:gz", compresslevel=1) as tar:
            for path, name in files:
                tar.add(path, str(name), recursive=False)
        connection.send_file(Path(archive.name), f"kit/{folder}.tar.gz").result()
        connection.ask(
            "unpack", timeout_s=600.0, archive=f"kit/{folder}.tar.gz", folder=folder, python=python, trial=trial
        )
