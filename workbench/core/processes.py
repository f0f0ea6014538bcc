"""Processes identified by number and start time, those of a run folder, and its janitor.

Run as a program (processes.py FOLDER PID STARTED), this is the janitor: it waits until the owner of the folder ends and
then removes the folder and its processes.  Every run starts one, so it imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

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
        import psutil  # here, because the janitor needs none

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
    import psutil  # here, because the janitor needs none

    try:
        process = psutil.Process(pid)
        return -1.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return -1.0


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


def wait_and_clean(folder: Path, owner: ProcessId) -> None:
    """Wait until the owner removes the folder.  If the owner dies first, remove the folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while not owner.wait(1.0):
        if not folder.exists():
            return
    remove_run_folder(folder)


if __name__ == "__main__":
    wait_and_clean(Path(sys.argv[1]), ProcessId(int(sys.argv[2]), float(sys.argv[3])))
