"""What the C library's allocator does with memory that tensors leave."""

from __future__ import annotations

import ctypes
import functools
import os
import sys

KEPT_BYTES = 256 << 20
"""Kept at most: what one layer leaves at 8,192 tokens of width 576."""
_KEPT_SHARE = 16
"""... and at most this part of the machine's memory."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep what the tensors of one layer leave for those of the next; return whether it does.

    glibc gives all of it back to the system behind every layer and takes it again, page by page: a fifth of a forward pass of 512
    tokens.  Nothing is changed where the user has chosen himself, by the environment, and with other libraries.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN):
        return False
    change = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if change is None:
        return False
    kept = min(KEPT_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _KEPT_SHARE)
    return bool(change(_MMAP_THRESHOLD, kept) and change(_TRIM_THRESHOLD, kept))
