"""Limit a device's memory with RLIMIT_DATA: an allocation beyond the limit raises a clear error.

Run as a program (python -m workbench.runtime.memory MODULE FUNCTION JSON ...) it is the child of `measured_in_child`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import psutil

from workbench.core.errors import MemoryBudgetError, RuntimeSetupError
from workbench.core.run_folder import child_environment
from workbench.core.units import size_words

# The last line: no memory for a new thread's stack (in Python's and the C++ library's words), or for oneDNN's code.
_REFUSED = re.compile(
    r"can't allocate memory|cannot allocate memory|out of memory|^MemoryError|std::bad_alloc|alloc_cpu|errno 12"
    r"|can't start new thread|resource temporarily unavailable|could not create a (primitive|memory)",
    re.IGNORECASE,
)
_CHILD_WAIT_S = 900
_ASKED_BYTES = re.compile(r"tried to allocate (\d+) bytes", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """A process's memory.  rss_bytes: resident now; peak_rss_bytes: maximum so far (0: unknown); data_bytes: VmData (0:
    unknown).

    anonymous_bytes: resident memory without file pages, which the system can drop at any time (equals rss_bytes where
    unknown).
    """

    rss_bytes: int
    peak_rss_bytes: int
    data_bytes: int
    anonymous_bytes: int = 0


def read_memory(pid: int | None = None) -> MemoryReading:
    """Return the memory of a process (default: this one); all zeros if it has ended."""
    number = os.getpid() if pid is None else pid
    if sys.platform == "linux":
        fields: dict[str, int] = {}
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{number}/status").read_text().splitlines():
                key, _, rest = line.partition(":")
                if rest.endswith("kB"):
                    fields[key] = int(rest.split()[0]) * 1024
        rss = fields.get("VmRSS", 0)
        return MemoryReading(
            rss_bytes=rss,
            peak_rss_bytes=fields.get("VmHWM", 0),
            data_bytes=fields.get("VmData", 0),
            anonymous_bytes=fields.get("RssAnon", rss),
        )
    try:
        rss = psutil.Process(number).memory_info().rss
    except psutil.Error:
        return MemoryReading(rss_bytes=0, peak_rss_bytes=0, data_bytes=0)
    return MemoryReading(rss_bytes=rss, peak_rss_bytes=0, data_bytes=0, anonymous_bytes=rss)


def reset_peak(pid: int | None = None) -> bool:
    """Let the peak of a process (default: this one) begin at its present memory; return whether the system can
    (Linux).
    """
    try:
        Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def measured_in_child(measure: Callable[..., Any], *arguments: str | int) -> Any:
    """Return what a function of a module measures of its memory in a separate process, as JSON reads it.

    Raises RuntimeSetupError with the process's last line if it fails.
    """
    words = [msgspec.json.encode(argument).decode() for argument in arguments]
    command = [sys.executable, "-m", __name__, measure.__module__, measure.__name__, *words]
    # Freed memory is returned at once, so that the peak is the memory needed at one time; glibc otherwise keeps freed
    # memory for reuse.
    environment = child_environment() | {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_WAIT_S, env=environment, check=True)
    except subprocess.SubprocessError as error:
        last = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise RuntimeSetupError(
            f"The memory of {measure.__name__}({', '.join(words)}) was to be measured.",
            f"{error} {' '.join(last)}",
            "Try again.",
        ) from error
    return msgspec.json.decode(done.stdout.splitlines()[-1])


def release_free_memory() -> None:
    """Return unused memory of Python and the allocator to the system."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def as_memory_error(
    error: BaseException, device_name: str, budget_bytes: int | None, used_bytes: int = 0
) -> MemoryBudgetError | None:
    """Return the MemoryBudgetError for a failed allocation.  None if `error` has another cause.  budget_bytes: None
    without a budget.
    """
    if isinstance(error, RuntimeSetupError) and error.__cause__ is not None:
        error = error.__cause__  # a group that could not be opened for lack of memory
    text = str(error)
    refused = isinstance(error, MemoryError) or (isinstance(error, RuntimeError | OSError) and _REFUSED.search(text))
    if not refused or isinstance(error, MemoryBudgetError):
        return None
    allocation = _ASKED_BYTES.search(text)
    amount = f"{int(allocation.group(1)) / 1e6:,.3f} MB more" if allocation else "more memory"
    asking, less = (
        f"Device '{device_name}' asked for {amount}.",
        "Lower the micro-batch size or max_length, give the device fewer layers",
    )
    if budget_bytes is None:
        return MemoryBudgetError(
            asking, "Its system refused.", f"End other programs there. {less}, or take a smaller model."
        )
    process_limit = f"{size_words(limit_of(budget_bytes))} with what libraries and allocator take"
    usage = (
        f"Its budget is {size_words(budget_bytes)} above the runtime's own footprint, {process_limit}. In use are "
        f"{size_words(used_bytes)}."
    )
    return MemoryBudgetError(asking, usage, f"{less}, or raise its memory_bytes.")


STACK_BYTES = 2 << 20


def take_small_stacks() -> None:
    """Give new threads stacks of 2 MB, also those of C++ libraries.

    A budget counts the stacks that may be used.  Ten of the usual 8 MB would be a sixth of a small device's memory.
    """
    threading.stack_size(STACK_BYTES)
    set_default = (
        getattr(ctypes.CDLL(None), "pthread_setattr_default_np", None) if sys.platform == "linux" else None
    )  # glibc has it
    if set_default is not None:
        attributes = ctypes.create_string_buffer(256)  # a pthread_attr_t takes 56 or 64 bytes
        libc = ctypes.CDLL(None)
        libc.pthread_attr_init(attributes)
        libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(STACK_BYTES))
        set_default(attributes)


LIBRARIES_BYTES, KEPT_SHARE = 64_000_000, 0.5
"""Room above a budget: what libraries take once they compute, and what the allocator keeps of freed tensors, as a share
of the budget.

Plans count tensors alone.  By RLIMIT_DATA's count 58 MB and 1.3 to 1.45 times as much were measured
(docs/evidence/confidant.md).
"""


def limit_of(budget_bytes: int) -> int:
    """Return the bytes that a process may take above its footprint."""
    return budget_bytes + min(LIBRARIES_BYTES, budget_bytes) + int(KEPT_SHARE * budget_bytes)


class MemoryBudget:
    """A budget for a plan's tensors, which the process allocates from now on, above its footprint at entry.

    Inside the context the kernel refuses an allocation beyond budget and room (RLIMIT_DATA: private writable memory, so
    not files mapped read-only).  This raises MemoryBudgetError and the process continues.  The previous limit is
    restored at exit.
    Enter the context after torch, gloo and the libraries are imported.  Only Linux enforces the budget; elsewhere
    nothing happens.
    """

    def __init__(
        self, device_name: str, budget_bytes: int, *, reading: Callable[[], MemoryReading] = read_memory
    ) -> None:
        self.device_name = device_name
        self.budget_bytes = budget_bytes
        self.footprint_bytes = 0
        self._reading = reading
        self._former: tuple[int, int] | None = None

    @property
    def used_bytes(self) -> int:
        """Return the bytes used above the footprint."""
        return max(0, self._reading().data_bytes - self.footprint_bytes)

    def __enter__(self) -> MemoryBudget:
        take_small_stacks()
        release_free_memory()
        self.footprint_bytes = self._reading().data_bytes
        if sys.platform == "linux":
            self._former = resource.getrlimit(resource.RLIMIT_DATA)
            limit = self.footprint_bytes + limit_of(self.budget_bytes)
            hard = self._former[1]
            resource.setrlimit(
                resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
            )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        used_bytes = self.used_bytes if error is not None else 0
        if self._former is not None:
            resource.setrlimit(resource.RLIMIT_DATA, self._former)
        if error is not None:
            refused = as_memory_error(error, self.device_name, self.budget_bytes, used_bytes)
            if refused is not None:
                raise refused from error


def lift_all_budgets() -> None:
    """Raise this process's soft RLIMIT_DATA to its hard limit, in case a job left a lower limit."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    module, function, *values = sys.argv[1:]
    measured = getattr(import_module(module), function)(*map(msgspec.json.decode, values))
    sys.stdout.write(msgspec.json.encode(measured).decode() + "\n")
