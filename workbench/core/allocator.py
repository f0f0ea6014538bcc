"""Configure how the C library's allocator treats freed memory."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KEPT_BYTES = 256 << 20
"""Upper limit of kept memory: one layer frees this much at 8,192 tokens of width 576."""
_KEPT_SHARE = 16
"""... and at most this part of the machine's memory."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep the memory freed by one layer and reuse it for the next; return whether it does.

    By default glibc returns this memory to the system after every layer and requests it again page by page, which takes a fifth of a
    forward pass of 512 tokens.  Nothing changes if the user has set the allocator in the environment, or with another C library.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)  # musl does not have it
    if change is None:
        return False
    kept = min(KEPT_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _KEPT_SHARE)
    return bool(change(_MMAP_THRESHOLD, kept) and change(_TRIM_THRESHOLD, kept))
