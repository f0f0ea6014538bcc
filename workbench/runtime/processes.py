"""Handle processes and Linux namespaces without torch or threads: check for life, enter, and end all processes of a run folder."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

_POLL_S = 0.25
_PROCESSES = "processes"


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
    def frozen(self) -> bool:
        """Return whether a signal stopped the process and it waits to be continued."""
        try:
            return self.alive and psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        except psutil.Error:
            return False

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
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with _pidfd(self.pid) as descriptor:
            while self.alive:
                left_s = _POLL_S if deadline_s is None else deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                if descriptor is None:
                    time.sleep(min(left_s, _POLL_S))
                else:
                    # Check the identity again from time to time: the number may have been reused before the pidfd was opened.
                    select.select([descriptor], [], [], min(left_s, 5.0) if deadline_s is not None else 5.0)
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


def kill_processes_of(folder: Path, *, spare: tuple[int, ...] = (), timeout_s: float = 5.0) -> None:
    """Kill every process recorded in the folder, with its process group, and wait until all have ended."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = [process for process in processes_of(folder) if process.pid not in spare]
        if not found:
            return
        for process in found:
            process.kill()
        for process in found:
            process.wait(0.5)


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


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int | None]:
    descriptor = None
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000


def unshare(flags: int) -> None:
    """Move this thread into new namespaces.  Raises OSError if that is not allowed."""
    _call("unshare", ctypes.c_int(flags))


def enter(descriptor: int, flags: int) -> None:
    """Move this thread into the namespace behind an open /proc/PID/fd/N or /proc/PID/ns/... descriptor.  Raises OSError."""
    _call("setns", ctypes.c_int(descriptor), ctypes.c_int(flags))


def become_root_of_new_user_namespace() -> None:
    """Enter a new user namespace as its root.  The process must have one thread.  Raises OSError if that is not allowed."""
    user, group = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def new_network_namespace() -> int:
    """Return a descriptor that keeps a new, anonymous network namespace alive.  This thread stays in its namespace."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_NEWNET)
        made = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        enter(here, CLONE_NEWNET)
    finally:
        os.close(here)
    return made


def has_network_privilege() -> bool:
    """Return whether this process can create network namespaces (effective CAP_SYS_ADMIN and CAP_NET_ADMIN)."""
    if sys.platform != "linux":
        return False
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            capabilities = int(line.split()[1], 16)
            return bool(capabilities >> 21 & 1 and capabilities >> 12 & 1)
    return False


def _call(name: str, *arguments: ctypes.c_int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
