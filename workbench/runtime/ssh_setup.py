"""What a real device needs before it can work: this workbench's code, brought to it before each run, and once the
libraries.
"""

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
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workbench
from workbench.core.catalogue import data_folder
from workbench.core.errors import RuntimeSetupError
from workbench.core.methods import registered
from workbench.runtime.frames import Greeting
from workbench.runtime.ssh import Connection

PROJECT = "edge-llm-workbench"
_LEFT_OUT = ("nvidia", "cuda", "triton")
"""Libraries of torch's GPU builds."""
OTHER_VERSIONS = "Its libraries have other versions than the project's lock."
_PLATFORMS = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}
TRIAL = "import torch; torch.ones(9, 9) @ torch.ones(9, 9)"
"""What a device must be able to run before its libraries count as installed."""


def code_files() -> list[tuple[Path, Path]]:
    """Return the files that a device needs besides libraries, each with its name there: this workbench, and the
    installed methods.

    A method's entry point is part of its package's metadata, so that comes along; a package's other data do not.
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
    """Bring this workbench to a device that has another version of it; return its folder there.  Raises
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
    """Return the name of the environment of a device's kind with these libraries."""
    return f"env-{hashlib.sha256(' '.join((*_kind_of(greeting), *pins)).encode()).hexdigest()[:16]}"


def environment_python(connection: Connection) -> str:
    """Return the Python of the environment that `install` made on a device.  Raises RuntimeSetupError if there is none
    of our versions.
    """
    environment = connection.ask("facts").environment
    asked = f"Device '{connection.name}' was to run a job."
    if not environment:
        raise RuntimeSetupError(
            asked, "It has no libraries yet.", "Run `workbench kit setup` first, or name a Python of its own."
        )
    if environment != environment_name(connection.greeting, pinned((PROJECT,), connection.greeting)):
        raise RuntimeSetupError(asked, OTHER_VERSIONS, "Run `workbench kit setup`.")
    return f"{connection.greeting.kit}/{environment}/bin/python"


def install(connection: Connection, say: Callable[[str], None], packages: Sequence[str] = (PROJECT,)) -> bool:
    """Put the libraries on a device, at the lock's versions, unless they are there; return whether anything was done.

    packages: which, with all that they need; by default what the workbench itself needs.
    They are installed into a folder here, for the device's Python and processor, with the digests of the project's
    lock, and sent as one
    archive; it needs no network.  At the end the device imports torch and multiplies once.
    Raises RuntimeSetupError, which names the step that failed.
    """
    machine, version = _kind_of(connection.greeting)
    asked = f"The libraries for device '{connection.name}' (Python {version} on {machine}) were asked for."
    if machine not in _PLATFORMS:
        raise RuntimeSetupError(
            asked, f"There are none for {machine}; known: {', '.join(_PLATFORMS)}.", "Install a 64-bit system there."
        )
    pins = pinned(packages, connection.greeting)
    environment = environment_name(connection.greeting, pins)
    if connection.ask("holds", folder=environment):
        return False
    uv = shutil.which("uv", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", ""))))
    if uv is None:
        raise RuntimeSetupError(asked, "uv is not on this machine.", "Install it: pip install uv.")
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

    def run(*words: str, said: str = "") -> str:
        done = subprocess.run([uv, "pip", *words, "--no-deps", *target], input=said, capture_output=True, text=True)
        if done.returncode:
            last = " ".join(done.stderr.split())[:400]
            raise RuntimeSetupError(
                asked, f"uv could not: {last}", "Check the network, and that the index has wheels for it."
            )
        return done.stdout

    lines = locked(
        pins,
        lambda pin: run("compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate", "-", said=pin),
        say,
    )
    with tempfile.TemporaryDirectory(prefix="workbench-kit-") as scratch:
        say(f"{connection.name}: collecting {len(pins)} libraries for Python {version} on {machine}")
        run(
            "install",
            "--quiet",
            "--require-hashes",
            "--python",
            sys.executable,
            "--target",
            scratch,
            "-r",
            "-",
            said="\n".join(lines),
        )
        if list(Path(scratch).glob("torch/lib/libtorch_cuda.*")):
            found = (
                "The index serves torch for GPUs: 430 MB or more, and several GB of libraries with it, which a "
                "device cannot use."
            )
            raise RuntimeSetupError(
                asked, found, "Name the index of its CPU build: pip config set global.extra-index-url ADDRESS."
            )
        root = Path(scratch)
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
        say(f"{connection.name}: sending {sum(path.stat().st_size for path in files) / 1e6:.0f} MB, compressed")
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
    """Return where pip's settings on this machine say that packages come from, as uv's options: uv does not read pip's
    settings.
    """
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    found = {}
    for section in ("global.", "install.", ":env:."):
        for line in said.splitlines():
            name, _, value = line.removeprefix(section).partition("=")
            if line.startswith(section) and name in _INDEX_OPTIONS:
                found[name] = ast.literal_eval(value).split()
    options = [word for name, values in found.items() for value in values for word in (_INDEX_OPTIONS[name], value)]
    return [*options, "--index-strategy", "unsafe-best-match"] if "extra-index-url" in found else options


def pinned(packages: Sequence[str], greeting: Greeting) -> tuple[str, ...]:
    """Return packages and all that they need on a device, at the lock's versions for it, without what only GPUs use.

    Raises RuntimeSetupError if this machine has a version that is not the lock's: a job would not do the same here and
    there.
    """
    version = greeting.python
    there = {
        "python_full_version": version,
        "python_version": ".".join(version.split(".")[:2]),
        "implementation_version": version,
    }
    there |= {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "platform_machine": greeting.machine,
    }
    lock = [
        Requirement(text)
        for text in re.findall(r"^([^#\s][^\\\n]*)", (data_folder() / "hashes.txt").read_text(), re.MULTILINE)
    ]

    def versions(**environment: str) -> dict[str, str]:
        applying = [pin for pin in lock if pin.marker is None or pin.marker.evaluate(environment)]
        return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in applying}

    locked_here, locked_there = versions(), versions(**there)
    found: dict[str, str] = {}
    unknown: list[str] = []
    left = [canonicalize_name(name) for name in packages]
    while left:
        name = left.pop()
        if name in found or name.startswith(_LEFT_OUT):
            continue
        found[name] = locked_there.get(name, "")
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # of the device's platform alone
            continue
        own = installed.version.partition("+")[0]  # the build for a processor is the index's to choose
        if name != PROJECT and own != locked_here.get(name):
            unknown.append(f"{name}=={own}")
        for text in installed.requires or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(there | {"extra": ""}):
                left.append(canonicalize_name(requirement.name))
    if unknown:
        asked = "The libraries for a device were asked for."
        found_here = f"The project's lock does not know {', '.join(sorted(unknown))}."
        raise RuntimeSetupError(asked, found_here, "Install this machine by `make setup`.")
    found.pop(PROJECT, None)  # its code is brought before each run
    return tuple(f"{name}=={version}" for name, version in sorted(found.items()) if version)


def locked(pins: Sequence[str], found_of: Callable[[str], str], say: Callable[[str], None]) -> list[str]:
    """Return pins with the digests of the project's lock, as requirements.

    found_of: returns an index's torch with its digests.  A build that the lock does not know is taken by the index's
    word, which is said.
    """
    lock = dict(
        re.findall(r"^(\S+)[^\\\n]*((?: \\\n +--hash=\S+)+)", (data_folder() / "hashes.txt").read_text(), re.MULTILINE)
    )
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


def _bring_archive(
    connection: Connection, folder: str, files: Iterable[tuple[Path, Path]], *, python: bool, trial: str = ""
) -> None:
    """Send files as one archive and have it unpacked, and tried."""
    with tempfile.NamedTemporaryFile(prefix="workbench-kit-", suffix=".tar.gz") as archive:
        with tarfile.open(archive.name, "w:gz", compresslevel=1) as tar:
            for path, name in files:
                tar.add(path, str(name), recursive=False)
        connection.send_file(Path(archive.name), f"kit/{folder}.tar.gz").result()
        connection.ask(
            "unpack", timeout_s=600.0, archive=f"kit/{folder}.tar.gz", folder=folder, python=python, trial=trial
        )
