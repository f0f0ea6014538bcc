from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import threading

import numpy as np
import pytest
import torch

from workbench.core.errors import MemoryBudgetError
from workbench.runtime.memory import STACK_BYTES, MemoryBudget, as_memory_error, read_memory

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA is enforced by Linux only")


def test_reading_of_this_process_and_of_none() -> None:
    before = read_memory()
    # An array might be given memory that is free already.  Meanwhile the system may take pages of libraries away.
    with mmap.mmap(-1, 100_000_000) as kept:
        kept.write(bytes([1]) * len(kept))
        after = read_memory()
    assert after.rss_bytes - before.rss_bytes > 50_000_000
    assert read_memory(2**22 + 1).rss_bytes == 0
    assert read_memory(os.getppid()).rss_bytes > 0


@linux_only
@pytest.mark.parametrize(
    "allocate",
    [
        pytest.param(lambda: torch.ones(300_000_000 // 4), id="torch"),
        pytest.param(lambda: np.ones(300_000_000 // 8), id="numpy"),
        pytest.param(lambda: bytearray(300_000_000), id="python"),
    ],
)
def test_allocation_beyond_the_budget_is_a_clear_error(allocate) -> None:
    with pytest.raises(MemoryBudgetError, match=r"'rpi-s'.*100 MB.*Lower"), MemoryBudget("rpi-s", 100_000_000):
        allocate()
    assert len(bytearray(300_000_000)) == 300_000_000  # the limit is lifted


@linux_only
def test_budget_counts_from_the_footprint() -> None:
    with MemoryBudget("rpi-s", 100_000_000) as budget:
        kept = torch.ones(60_000_000 // 4)
        assert 55_000_000 < budget.used_bytes < 90_000_000
        assert kept.numel() == 15_000_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have small stacks")
def test_the_stacks_of_new_threads_are_small() -> None:
    """Those of C++ libraries too: a budget counts what they may use."""
    libc, attributes, size = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_size_t()
    with MemoryBudget("rpi-s", 100_000_000):
        libc.pthread_getattr_default_np(attributes)
    libc.pthread_attr_getstacksize(attributes, ctypes.byref(size))
    assert size.value == threading.stack_size() == STACK_BYTES


def test_other_errors_pass_through() -> None:
    with pytest.raises(KeyError), MemoryBudget("rpi-s", 10**12):
        raise KeyError("x")
    assert as_memory_error(RuntimeError("shape mismatch"), "rpi-s", 1) is None
    assert as_memory_error(OSError(errno.ENOMEM, "Cannot allocate memory"), "rpi-s", 1) is not None
    assert as_memory_error(RuntimeError("std::bad_alloc"), "rpi-s", 1) is not None
