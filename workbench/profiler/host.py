"""Measure this machine: one thread's GEMM rate, memory bandwidth, storage read rate, timer resolution."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workbench.core.errors import ConfigError
from workbench.profiler.cache import host_fingerprint
from workbench.profiler.timing import time_calls

GEMM_SIZE = 768
COPY_BYTES = 64 << 20
READ_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """One thread of this machine.  gemm_flops_per_s: fp32.  memory_bytes_per_s: of a large copy, reads and writes counted.

    storage_bytes_per_s: sequential read; storage_is_cold: False if the page cache could not be emptied first, so that
    the rate is memory's.  timer_resolution_s: the smallest step of the clock that was seen.
    """

    gemm_flops_per_s: float
    memory_bytes_per_s: float
    storage_bytes_per_s: float
    storage_is_cold: bool
    timer_resolution_s: float
    cores: int
    processor: str


def measure_host(*, seconds: float = 1.0, folder: Path | None = None, read_bytes: int = READ_BYTES) -> HostProfile:
    """Return this machine's profile: `seconds` for arithmetic, as long for memory, and a file of read_bytes in `folder` for a moment."""
    if not seconds > 0:
        raise ConfigError(f"A measurement of {seconds} s was asked for.", "It must take some time.", "Raise seconds.")
    storage, cold = storage_rate(folder, nbytes=read_bytes)
    fingerprint = host_fingerprint()
    return HostProfile(
        gemm_flops_per_s=gemm_rate(seconds=seconds),
        memory_bytes_per_s=memory_rate(seconds=seconds),
        storage_bytes_per_s=storage,
        storage_is_cold=cold,
        timer_resolution_s=timer_resolution(),
        cores=os.cpu_count() or 1,
        processor=fingerprint["processor"],
    )


def gemm_rate(*, size: int = GEMM_SIZE, seconds: float = 1.0, product: Callable[[Tensor, Tensor], object] | None = None) -> float:
    """Return FLOP/s of a square fp32 matrix product on one thread: of torch.mm, or of another way to multiply two matrices."""
    left, right, out = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    call = partial(torch.mm, left, right, out=out) if product is None else partial(product, left, right)
    timing = time_calls({"": call}, repeats=1000, budget_s=seconds)[""]
    return 2.0 * size**3 / timing.seconds


def memory_rate(*, nbytes: int = COPY_BYTES, seconds: float = 1.0) -> float:
    """Return bytes/s of a copy too large for the caches, on one thread, what is read and what is written counted."""
    source, target = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    timing = time_calls({"": lambda: target.copy_(source)}, repeats=1000, budget_s=seconds)[""]
    return 2.0 * nbytes / timing.seconds


def storage_rate(folder: Path | None = None, *, nbytes: int = READ_BYTES) -> tuple[float, bool]:
    """Return bytes/s of reading a fresh file sequentially, and whether the page cache was emptied of it first.

    Raises ConfigError if the folder cannot take the file.
    """
    where = folder or Path(tempfile.gettempdir())
    block = os.urandom(CHUNK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix="workbench-read-") as file:
            for _ in range(max(1, nbytes // CHUNK_BYTES)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            cold = hasattr(os, "posix_fadvise")
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with open(file.name, "rb", buffering=0) as again:
                began, total = time.perf_counter(), 0
                while chunk := again.read(CHUNK_BYTES):
                    total += len(chunk)
                elapsed = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(
            f"Measuring the read rate of '{where}' was asked for.", f"{error.strerror}.", f"Name a folder with {nbytes >> 20} MiB to spare."
        ) from error
    return total / max(elapsed, 1e-9), cold


def timer_resolution(*, samples: int = 1000) -> float:
    """Return the smallest difference between two readings of the clock, in seconds."""
    smallest = float("inf")
    for _ in range(samples):
        began = time.perf_counter()
        while (now := time.perf_counter()) == began:
            pass
        smallest = min(smallest, now - began)
    return smallest
