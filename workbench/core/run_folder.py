"""The run folder of one set of engines: it records its owner and processes, and is removed when the owner has died.

A janitor process (python -m workbench.core.run_folder FOLDER) waits for that.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from workbench.core.errors import WorkbenchError, WriteError
from workbench.core.serial import from_json, to_json, write_text

_POLL_S = 0.25
_PROCESSES = "processes"
_END_S = 5.0


class ProcessId(NamedTuple):
    """Identifies a process by number and start time, so that a reused number is not mistaken for it."""

    pid: int
    started: float

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Return the identity of a running process.  `started` is -1 if no such process runs."""
        return cls(pid, _started(pid))

    @property
    def alive(self) -> bool:
        """Return whether the process runs.  A zombie does not count."""
        return self.started >= 0 and _started(self.pid) == self.started

    @property
    def cpu_s(self) -> float:
        """Return the processor seconds that the process has used.  0 if it does not run."""
        try:
            times = psutil.Process(self.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return times.user + times.system if self.alive else 0.0

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process has ended.  Returns False at the time-out."""
        end_s, pause_s = time.monotonic() + (math.inf if timeout_s is None else timeout_s), 1e-3
        while self.alive:
            if (left_s := end_s - time.monotonic()) <= 0:
                return False
            time.sleep(min(left_s, pause_s))
            pause_s = min(_POLL_S, 1.5 * pause_s)
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL, and its whole group if it leads one."""
        if not self.alive or self.pid in (os.getpid(), 1):
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if os.getpgid(self.pid) == self.pid else os.kill)(self.pid, signal.SIGKILL)


def note_process(folder: Path, process: ProcessId) -> None:
    """Record that a process belongs to a folder, for later cleanup."""
    with open(folder / _PROCESSES, "a", encoding="ascii") as file:
        file.write(f"{process.pid} {process.started}\n")


def processes_of(folder: Path) -> list[ProcessId]:
    """Return the running processes recorded in the folder, except this one."""
    noted = []
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / _PROCESSES).read_text(encoding="ascii").splitlines():
            pid, started = line.split()
            noted.append(ProcessId(int(pid), float(started)))
    return [process for process in noted if process.pid != os.getpid() and process.alive]


def _started(pid: int) -> float:
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            return -1.0
        return -1.0 if fields[0] in "ZX" else float(fields[19])
    try:
        process = psutil.Process(pid)
        return -1.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return -1.0


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
    write_text(folder / _OWNER, to_json(Owner.current()))
    return folder


def require_temporary_space() -> None:
    """Raise WriteError if the disk of temporary files is full."""
    free = shutil.disk_usage(_base()).free
    if free < _LEAST_FREE_BYTES:
        raise WriteError(
            f"A folder in '{_base()}' was to be made for the files of a run.",
            f"The disk is full: {free / 1e3:.0f} kB are free, {_LEAST_FREE_BYTES / 1e3:.0f} kB are needed.",
            "Free some space, or set TMPDIR to a folder on another disk.",
        )


def start_janitor(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that waits until this one ends and then removes the folder and its processes."""
    janitor = subprocess.Popen(
        [sys.executable, "-m", "workbench.core.run_folder", str(folder)],
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


def remove_run_folder(folder: Path, *, spare: tuple[int, ...] = ()) -> None:
    """End every process of the folder (except `spare`), with its process group, and remove the folder."""
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s and (
        running := [process for process in processes_of(folder) if process.pid not in spare]
    ):
        for process in running:
            process.kill()
        for process in running:
            process.wait(0.5)
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
