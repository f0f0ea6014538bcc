"""Memory cgroups for emulated devices: a real out-of-memory kill, where the system lets us make cgroups."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from workbench.core.errors import RuntimeSetupError

_ROOT = Path("/sys/fs/cgroup")


class MemoryCgroup:
    """One device's memory cgroup (v2, or v1's memory controller); `remove` it when its processes have gone."""

    def __init__(self, path: Path, *, unified: bool) -> None:
        self.path = path
        self.unified = unified

    @classmethod
    def create(cls, name: str) -> MemoryCgroup:
        """Make a cgroup below this process's own.  Raises RuntimeSetupError where the system does not allow it."""
        reasons = []
        for base, unified in _candidates():
            path = base / name
            try:
                path.mkdir()
            except OSError as error:
                reasons.append(f"{path}: {error.strerror}")
                continue
            if (path / ("memory.max" if unified else "memory.limit_in_bytes")).exists():
                return cls(path, unified=unified)
            path.rmdir()
            reasons.append(f"{base}: no memory controller")
        raise RuntimeSetupError(
            "A memory cgroup per device was asked for (hard_memory).",
            f"None can be made here: {'; '.join(reasons) or 'there is no cgroup that this user may write to'}.",
            "Run as root on Linux, or leave hard_memory off: budgets are then enforced by RLIMIT_DATA.",
        )

    @property
    def processes_file(self) -> Path:
        """Return the file to which a process writes its number to join."""
        return self.path / "cgroup.procs"

    @property
    def used_bytes(self) -> int:
        """Return the memory charged to the cgroup now."""
        return int((self.path / ("memory.current" if self.unified else "memory.usage_in_bytes")).read_text())

    def limit(self, nbytes: int) -> None:
        """Let the kernel end the cgroup's process when it needs more than `nbytes`; no swap is used."""
        (self.path / ("memory.max" if self.unified else "memory.limit_in_bytes")).write_text(str(nbytes))
        with contextlib.suppress(OSError):  # not there when the kernel does not account for swap
            if self.unified:
                (self.path / "memory.swap.max").write_text("0")
            else:
                (self.path / "memory.memsw.limit_in_bytes").write_text(str(nbytes))

    @property
    def oom_kills(self) -> int:
        """Return how many processes the kernel killed in it for lack of memory."""
        counters = self.path / ("memory.events" if self.unified else "memory.oom_control")
        with contextlib.suppress(OSError):
            for line in counters.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0

    def remove(self) -> None:
        """Remove the cgroup; its processes must have ended."""
        remove_cgroup(self.path)


def remove_cgroup(path: Path, *, timeout_s: float = 2.0) -> None:
    """Remove a cgroup folder, waiting a moment for its last process to be gone."""
    deadline_s = time.monotonic() + timeout_s
    while path.exists():
        try:
            path.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.05)


def _candidates() -> list[tuple[Path, bool]]:
    """Return (folder, is v2) in which a cgroup may be made: our own cgroup's, then the controller's root."""
    found: list[tuple[Path, bool]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        number, controllers, own = line.split(":", 2)
        if number == "0":
            bases, unified = [_ROOT, _ROOT / "unified"], True
        elif "memory" in controllers.split(","):
            bases, unified = [_ROOT / "memory"], False
        else:
            continue
        for base in bases:
            for folder in (base / own.lstrip("/"), base):
                if folder.is_dir() and os.access(folder, os.W_OK) and (folder, unified) not in found:
                    found.append((folder, unified))
    return found
