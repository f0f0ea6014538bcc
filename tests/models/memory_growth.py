"""Does a process keep something of every step it makes?"""

import ctypes
import gc
import sys
from collections.abc import Callable

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
SMALL_BYTES = 64  # of a small Python object


class _Allocated(ctypes.Structure):
    """glibc's struct mallinfo2.  uordblks: bytes in use; hblkhd: those in mappings of their own."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def held_bytes() -> int:
    """Return the bytes that are allocated and not freed; where the C library is not glibc, those of small objects."""
    gc.collect()
    small, library = SMALL_BYTES * sys.getallocatedblocks(), ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return small
    library.mallinfo2.restype = _Allocated
    result = library.mallinfo2()
    return small + int(result.uordblks) + int(result.hblkhd)


def least_growth(step: Callable[[], object], *, rounds: int = 3, steps: int = 25) -> float:
    """Return by how many bytes a step adds to what is held, in the round in which it adds least.

    What is kept of each step grows in every round; a buffer that is enlarged now and then does not.
    """
    results = []
    for _ in range(rounds):
        before = held_bytes()
        for _ in range(steps):
            step()
        results.append(held_bytes() - before)
    return min(results) / steps
