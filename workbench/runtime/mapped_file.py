"""Files whose space is taken at once, seen as shared memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np


def allocate(file: BinaryIO, nbytes: int) -> None:
    """Take a file's space on the disk.  Raises OSError if there is none."""
    # A memory map of a sparse file ends in SIGBUS when the disk is full; taking the space now gives ENOSPC instead.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    block = bytes(1 << 20)
    for _ in range(nbytes // len(block)):
        file.write(block)
    file.write(block[: nbytes % len(block)])


def map_file(path: Path, nbytes: int) -> mmap.mmap | None:
    """Return a file as shared, writable memory; an empty file cannot be mapped."""
    if nbytes == 0:
        return None
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), nbytes)


def as_array(memory: mmap.mmap | None, dtype: type[np.generic], shape: tuple[int, ...]) -> np.ndarray:
    """Return mapped memory, or for None nothing, as an array that may be written."""
    return np.empty(shape, dtype=dtype) if memory is None else np.frombuffer(memory, dtype=dtype).reshape(shape)
