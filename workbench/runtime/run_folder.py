"""The run folder of one set of engines.  It records its owner and is removed when the owner has died.

A janitor process (python -m workbench.runtime.run_folder FOLDER) waits for that.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workbench.core.errors import WorkbenchError
from workbench.core.serial import from_json, to_json, write_text
from workbench.runtime.network import child_environment
from workbench.runtime.processes import ProcessId, kill_processes_of, note_process

_PREFIX = "workbench-run-"
_OWNER = "owner.json"
_MAX_BASE_LENGTH = 60


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


def make_run_folder() -> Path:
    """Return a new private folder owned by this process, after removing the folders of dead owners.

    The path is short, because the path of a unix socket may have only 107 characters (103 on macOS).
    """
    sweep_stale_folders()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_base()))
    write_text(folder / _OWNER, to_json(Owner.current()))
    return folder


def start_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that waits until this one ends and then removes the folder and its processes."""
    janitor = subprocess.Popen(
        [sys.executable, "-m", "workbench.runtime.run_folder", str(folder)],
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
        janitor.kill()
        janitor.wait()
        remove_run_folder(folder)


def remove_run_folder(folder: Path, *, spare: tuple[int, ...] = ()) -> None:
    """End every process of the folder (except `spare`) and remove the folder."""
    kill_processes_of(folder, spare=spare)
    shutil.rmtree(folder, ignore_errors=True)


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


def main(folder: Path) -> None:
    """Wait until the owner removes the folder.  If the owner dies first, remove the folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = from_json((folder / _OWNER).read_text(), Owner, source=str(folder)).process
    while not owner.wait(1.0):
        if not folder.exists():
            return
    remove_run_folder(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
