"""The run folder of one set of engines: it records its owner and processes, and is removed when the owner has died.

A janitor process (see processes) waits for that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.core import processes
from workbench.core.errors import WorkbenchError, WriteError
from workbench.core.processes import ProcessId, note_process, remove_run_folder
from workbench.core.serial import from_json, write_json
from workbench.core.units import size_words

_PREFIX = "workbench-run-"
_OWNER = "owner.json"
_MAX_BASE_LENGTH = 60
_LEAST_FREE_BYTES = 1_000_000  # a run folder of four devices has a tenth of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that owns a run folder, with the host, boot and process namespace in which its number is valid."""

    pid: int
    started: float
    boot: str
    pid_namespace: str
    host: str = ""

    @classmethod
    def current(cls) -> Owner:
        """Return this process as an owner."""
        identity = ProcessId.of(os.getpid())
        boot, namespace = "", ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = os.readlink("/proc/self/ns/pid")
        return cls(pid=identity.pid, started=identity.started, boot=boot, pid_namespace=namespace, host=_host())

    @property
    def process(self) -> ProcessId:
        """Return the identity of the owner's process."""
        return ProcessId(self.pid, self.started)


def child_environment() -> dict[str, str]:
    """Return the environment for child processes: they import the same modules as this process, but nothing from the
    current folder.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        path for path in dict.fromkeys(sys.path) if path and os.path.isdir(path)
    )
    return environment


def make_run_folder() -> Path:
    """Return a new private folder owned by this process, after removing the folders of dead owners.

    The path is short, because the path of a unix socket may have only 107 characters (103 on macOS).
    Raises WriteError if the disk of temporary files is full.
    """
    sweep_stale_folders()
    require_temporary_space()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
    write_json(folder / _OWNER, Owner.current())
    return folder


def require_temporary_space() -> None:
    """Raise WriteError if the disk of temporary files is full."""
    free = shutil.disk_usage(_base()).free
    if free < _LEAST_FREE_BYTES:
        raise WriteError(
            f"A folder in '{_base()}' was to be made for the files of a run.",
            f"The disk is full: {size_words(free)} are free, {size_words(_LEAST_FREE_BYTES)} are needed.",
            "Free some space, or set TMPDIR to a folder on another disk.",
        )


def start_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that waits until this one ends and then removes the folder and its processes."""
    owner = ProcessId.of(os.getpid())
    janitor = subprocess.Popen(
        # A file, not a module: importing the package that it is in takes ten times as long.
        [sys.executable, processes.__file__, str(folder), str(owner.pid), str(owner.started)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=child_environment(),
    )
    note_process(folder, ProcessId.of(janitor.pid))
    return janitor


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide a temporary folder that is removed afterwards, even if this process dies."""
    folder = make_run_folder()
    janitor = start_janitor(folder)
    try:
        yield folder
    finally:
        remove_run_folder(folder, spare=(janitor.pid,))
        janitor.kill()  # last: if this is interrupted, the janitor goes on
        janitor.wait()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone Ctrl-C and SIGTERM until the block has ended.  Does nothing in other threads than the main one, which
    get no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    former = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def sweep_stale_folders() -> None:
    """Clean up after dead owners whose janitor has died too."""
    current = Owner.current()
    for folder in _base().glob(_PREFIX + "*"):
        with contextlib.suppress(OSError, WorkbenchError):
            if folder.stat().st_uid != os.geteuid():
                continue
            owner = from_json((folder / _OWNER).read_text(), Owner, source=str(folder))
            if owner.host != current.host:
                continue  # the folder of another machine on a shared disk
            if owner.boot != current.boot:
                shutil.rmtree(folder, ignore_errors=True)  # its processes ended with that boot
            elif owner.pid_namespace == current.pid_namespace and not owner.process.alive:
                remove_run_folder(folder)


def _host() -> str:
    """Return an identifier that distinguishes this machine from others that use the same disk."""
    machine = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()
    return f"{platform.node()} {machine}".strip()


def _base() -> Path:
    """Return the parent of run folders: the temporary folder, or /tmp if its path is too long for sockets."""
    usual = Path(tempfile.gettempdir())
    return usual if len(str(usual)) <= _MAX_BASE_LENGTH else Path("/tmp")
