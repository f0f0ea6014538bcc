"""Measure this machine (GEMM rate, memory and storage), and links between ranks of a process group."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from workbench.core.cluster import Link
from workbench.core.errors import ConfigError
from workbench.profiler.cache import host_fingerprint
from workbench.profiler.processors import pinned, places
from workbench.profiler.timing import time_calls

SIZES = (1, 1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22)
SMALL_BYTES = 1 << 10
MOST_BYTES = 1 << 26
"""The largest message, over a link that is much faster than others: a small board has to hold two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One message size between two ranks.

    round_trip_s: seconds until its answer of one byte arrives, the median of the repeats.  answer_s: the part of them
    that the answer took.
    """

    source: int
    destination: int
    nbytes: int
    round_trip_s: float
    answer_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of the message one way."""
        return max(self.round_trip_s - self.answer_s, 1e-9)

    @property
    def bytes_per_s(self) -> float:
        """Return the payload rate of a message of this size, latency included."""
        return self.nbytes / self.seconds


def measure_link(
    group: Any,
    rank: int,
    source: int,
    destination: int,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[LinkSample, ...]:
    """Return one sample for each message size on rank `source`, () on every other.

    group: a torch.distributed process group; ranks are its ranks.  Source and destination must both call it; others
    may.
    Each message is answered by one byte; half the round trip of one byte is subtracted for the answer.
    """
    if source == destination:
        raise ConfigError(f"A link from rank {source} to itself was asked for.", "There is none.", "Name two ranks.")
    if repeats < 1 or not sizes or min(sizes) < 1:
        raise ConfigError(
            f"{repeats} messages of {list(sizes)} bytes were asked for.", "All must be at least 1.", "Raise them."
        )
    if rank not in (source, destination):
        return ()
    answer = torch.zeros(1, dtype=torch.uint8)
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (1, *sizes)]
    times: list[list[float]] = [[] for _ in messages]
    for repeat in range(repeats + 1):  # the first round opens connections and is not counted
        for index, message in enumerate(messages):
            if rank == source:
                began = clock()
                group.send([message], destination, 0).wait()
                group.recv([answer], destination, 0).wait()
                if repeat:
                    times[index].append(clock() - began)
            else:
                group.recv([message], source, 0).wait()
                group.send([answer], source, 0).wait()
    if rank != source:
        return ()
    answer_s = median(times[0]) / 2
    return tuple(
        LinkSample(source=source, destination=destination, nbytes=size, round_trip_s=median(values), answer_s=answer_s)
        for size, values in zip(sizes, times[1:], strict=True)
    )


def measure_links(
    group: Any, rank: int, *, sizes: Sequence[int] = SIZES, repeats: int = 5
) -> dict[tuple[int, int], tuple[LinkSample, ...]]:
    """Return the samples of every link from this rank, (source, destination) -> samples; every rank of the group must
    call it.

    Links are measured one after the other, so none disturbs another.
    """
    count = group.size()
    samples_of = {}
    for source in range(count):
        for destination in range(count):
            if source != destination:
                samples = measure_link(group, rank, source, destination, sizes=sizes, repeats=repeats)
                if rank == source:
                    samples_of[source, destination] = samples
                group.barrier().wait()
    return samples_of


def measure_at_once(group: Any, rank: int, sizes: Sequence[int], *, repeats: int = 5) -> LinkSample:
    """Return the time of the message to this rank while all ranks send to the next one; every rank must call it.

    sizes: bytes of each rank's message (see lasting_equally).  Over private wires it takes as long as alone; over a
    shared medium as many times as long as there are ranks.
    """
    size = group.size()
    source, destination = (rank - 1) % size, (rank + 1) % size
    outgoing, incoming = (torch.zeros(sizes[sender], dtype=torch.uint8) for sender in (rank, source))
    seconds = []
    for _ in range(repeats):
        coming = group.recv([incoming], source, 0)
        group.barrier().wait()
        began = time.perf_counter()
        leaving = group.send([outgoing], destination, 0)
        coming.wait()
        seconds.append(time.perf_counter() - began)
        leaving.wait()
    return LinkSample(source=source, destination=rank, nbytes=sizes[source], round_trip_s=median(seconds))


def lasting_equally(links: Sequence[Link], nbytes: int) -> tuple[int, ...]:
    """Return the bytes that take each link as long as `nbytes` take the slowest one, at most MOST_BYTES.

    Stations that share a medium then send until the same time.  With equal bytes a slow one would be alone at the end.
    """
    longest_s = max(link.transfer_s(nbytes) for link in links)
    sizes = (round((longest_s - link.latency_s) * link.bytes_per_s) for link in links)
    return tuple(min(max(1, size), MOST_BYTES) for size in sizes)


def fit_link(samples: Sequence[LinkSample]) -> Link:
    """Fit a link to the samples: latency from the small messages, rate from the additional time of the large ones.

    Raises ConfigError without two message sizes.
    """
    by_size = sorted(samples, key=lambda sample: sample.nbytes)
    if len({sample.nbytes for sample in by_size}) < 2:
        raise ConfigError(
            f"A link was to be fitted to {len(by_size)} samples.", "It needs two message sizes.", "Measure more sizes."
        )
    small = [sample.seconds for sample in by_size if sample.nbytes <= SMALL_BYTES] or [by_size[0].seconds]
    latency = min(small)
    largest = by_size[-1]
    # The largest message sets the rate, because activations are large; small messages measure only latency.
    rate = largest.nbytes / max(largest.seconds - latency, 1e-9)
    return Link(bytes_per_s=rate, latency_s=max(0.0, latency - by_size[0].nbytes / rate))


GEMM_SIZE = 768
GEMM_FLOPS = 2.0 * GEMM_SIZE**3
HEAT_SAMPLES = 120
COPY_BYTES = 64 << 20
READ_BYTES = 64 << 20
CHUNK_BYTES = 1 << 20


class ProcessorRate(NamedTuple):
    """A processor's rate of fp32 matrix products with one compute library: P_j of Confidant's section 3.3."""

    processor: str
    library: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProfile:
    """A machine's rates, with cache.measuring_threads().

    gemm_flops_per_s: rate in fp32.  memory_bytes_per_s: rate of a large copy, reads and writes counted.

    storage_bytes_per_s, storage_write_bytes_per_s: rates of a sequential read, and of a sequential write until it is on
    the disk.  storage_is_cold: False if the page cache could not be emptied before the read, so that its rate is the
    memory's.
    memory_bytes: installed memory.  swap_bytes: what may be swapped to the disk.
    """

    gemm_flops_per_s: float
    memory_bytes_per_s: float
    storage_bytes_per_s: float
    storage_write_bytes_per_s: float
    storage_is_cold: bool
    cores: int
    processor: str
    memory_bytes: int
    swap_bytes: int
    processors: tuple[ProcessorRate, ...] = ()


def measure_host(*, seconds: float = 1.0, folder: Path | None = None, read_bytes: int = READ_BYTES) -> HostProfile:
    """Measure this machine for `seconds` of arithmetic and `seconds` of copying, with a temporary file of read_bytes in
    `folder`.
    """
    if not seconds > 0:
        raise ConfigError(f"A measurement of {seconds} s was asked for.", "It must take some time.", "Raise seconds.")
    storage = storage_rates(folder, nbytes=read_bytes)
    fingerprint = host_fingerprint()
    return HostProfile(
        gemm_flops_per_s=gemm_rate(seconds=seconds),
        memory_bytes_per_s=memory_rate(seconds=seconds),
        storage_bytes_per_s=storage.read_bytes_per_s,
        storage_write_bytes_per_s=storage.write_bytes_per_s,
        storage_is_cold=storage.is_cold,
        cores=os.cpu_count() or 1,
        processor=fingerprint["processor"],
        memory_bytes=psutil.virtual_memory().total,
        swap_bytes=psutil.swap_memory().total,
        processors=measure_processors(seconds=seconds / 4),
    )


def measure_processors(*, seconds: float = 0.25) -> tuple[ProcessorRate, ...]:
    """Return this machine's processors with each library that they can use (see profiler.processors).

    JAX does not let us pin its threads, so it is measured only if all cores are alike.
    """
    rates, everywhere = list[ProcessorRate](), places()
    are_alike = sum(place.device.type == "cpu" for place in everywhere.values()) == 1
    for name, place in everywhere.items():
        libraries: dict[str, Callable[[Tensor, Tensor], object]] = {"torch": torch.mm}
        if place.device.type != "cpu":
            square = torch.ones(GEMM_SIZE, GEMM_SIZE, device=place.device)
            libraries["torch"] = partial(lambda matrix, *_: (matrix @ matrix)[0, 0].item(), square)
        elif hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            libraries["torch, oneDNN"] = lambda left, right: torch.ops.mkldnn._linear_pointwise(
                left, right, None, "none", [], ""
            )
        if place.device.type == "cpu" and are_alike and find_spec("jax") is not None:
            jax = import_module("jax")
            matrix, dot = jax.numpy.ones((GEMM_SIZE, GEMM_SIZE)), jax.jit(jax.numpy.dot)
            libraries["JAX"] = partial(lambda dot, matrix, *_: dot(matrix, matrix).block_until_ready(), dot, matrix)
        for library, product in libraries.items():
            with pinned(place):
                rates.append(ProcessorRate(name, library, gemm_rate(seconds=seconds, product=product)))
    return tuple(rates)


def _gemm() -> partial[Tensor]:
    """Return a square fp32 matrix product, of GEMM_FLOPS."""
    left, right, out = (torch.randn(GEMM_SIZE, GEMM_SIZE) for _ in range(3))
    return partial(torch.mm, left, right, out=out)


def gemm_rate(*, seconds: float = 1.0, product: Callable[[Tensor, Tensor], object] | None = None) -> float:
    """Return FLOP/s of a square fp32 matrix product, by torch.mm or another matmul function."""
    gemm = _gemm()
    call = gemm if product is None else partial(product, *gemm.args)
    return GEMM_FLOPS / time_calls({"": call}, repeats=1000, budget_s=seconds)[""]


def sustained_rates(seconds: float) -> Iterator[tuple[float, float]]:
    """Compute square fp32 matrix products without a pause, and yield for each of HEAT_SAMPLES equal periods the seconds
    of computing before it and its FLOP/s.
    """
    gemm = _gemm()
    gemm()  # the first one also loads the library
    began_s = ended_s = time.perf_counter()
    for number in range(HEAT_SAMPLES):
        period_s, count = ended_s, 0
        while count == 0 or ended_s < began_s + (number + 1) * seconds / HEAT_SAMPLES:
            gemm()
            count, ended_s = count + 1, time.perf_counter()
        yield period_s - began_s, GEMM_FLOPS * count / (ended_s - period_s)


def memory_rate(*, seconds: float = 1.0) -> float:
    """Return bytes/s of a copy too large for the caches; reads and writes both count."""
    source, target = (torch.ones(COPY_BYTES // 4) for _ in range(2))
    return 2.0 * COPY_BYTES / time_calls({"": lambda: target.copy_(source)}, repeats=1000, budget_s=seconds)[""]


class StorageRates(NamedTuple):
    """A disk's sequential rates.  is_cold: whether the page cache was emptied of the file before it was read."""

    read_bytes_per_s: float
    write_bytes_per_s: float
    is_cold: bool


def storage_rates(folder: Path | None = None, *, nbytes: int = READ_BYTES) -> StorageRates:
    """Return the rates of writing a new file until it is on the disk, and of reading it.

    Raises ConfigError if the file cannot be written to the folder.
    """
    where = folder or Path(tempfile.gettempdir())
    block = os.urandom(CHUNK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix="workbench-read-") as file:
            began = time.perf_counter()
            for _ in range(max(1, nbytes // CHUNK_BYTES)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            write_s = time.perf_counter() - began
            cold = hasattr(os, "posix_fadvise")
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with open(file.name, "rb", buffering=0) as again:
                began, total = time.perf_counter(), 0
                while chunk := again.read(CHUNK_BYTES):
                    total += len(chunk)
                read_s = time.perf_counter() - began
    except OSError as error:
        raise ConfigError(
            f"Measuring the disk of '{where}' was asked for.",
            f"{error.strerror}.",
            f"Name a folder with {nbytes >> 20} MiB to spare.",
        ) from error
    return StorageRates(total / max(read_s, 1e-9), total / max(write_s, 1e-9), cold)
