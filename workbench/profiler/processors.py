"""A machine's processors: groups of alike cores, to which threads are pinned, and the accelerators that torch sees."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from workbench.core.errors import ConfigError
from workbench.profiler.cache import THREADS_VARIABLE

CORES = Path("/sys/devices/system/cpu")
_TASKS = Path("/proc/self/task")


class Place(NamedTuple):
    """The place where operations run: torch's device, and the host's cores whose threads compute there or wait for an
    accelerator.
    """

    device: torch.device
    cores: tuple[int, ...]

    def pin(self) -> None:
        """Pin the calling thread to the cores.  Threads that torch starts for it inherit that, as many as there are
        cores.
        """
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(len(self.cores))


def core_groups(folder: Path = CORES) -> list[list[int]]:
    """Return the cores that this process may use, grouped by capacity or highest frequency as the kernel states it, the
    fastest first.
    """
    groups: dict[int, list[int]] = {}
    for core in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1):
        files = [folder / f"cpu{core}" / name for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq")]
        speed = next((int(file.read_text()) for file in files if file.is_file()), 0)
        groups.setdefault(speed, []).append(core)
    return [groups[speed] for speed in sorted(groups, reverse=True)]


def named(cores: Sequence[int]) -> str:
    """Return a group's name: 'cores 0-3,6'."""
    runs = [[core for _, core in run] for _, run in groupby(enumerate(cores), lambda pair: pair[1] - pair[0])]
    return "cores " + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def places() -> dict[str, Place]:
    """Return this machine's processors by name: groups of cores, the fastest first, then accelerators, which the first
    group serves.
    """
    groups, host = core_groups(), torch.device("cpu")
    kinds = [f"cuda:{number}" for number in range(torch.cuda.device_count())] + [
        "mps"
    ] * torch.backends.mps.is_available()
    core_places = {named(cores): Place(host, tuple(cores)) for cores in groups}
    return core_places | {kind: Place(torch.device(kind), tuple(groups[0])) for kind in kinds}


def place_of(name: str, owner: str) -> Place:
    """Return the place of a processor that a cluster's file describes for the device `owner`, this machine: one of
    `places`, or some cores.

    Raises ConfigError if the machine has no such processor.
    """
    known_places, usable = places(), {core for group in core_groups() for core in group}
    with suppress(ValueError):
        kind, _, listed = name.partition(" ")
        ends = [[int(end) for end in run.split("-")] for run in listed.split(",")]
        cores = tuple(core for run in ends for core in range(run[0], run[-1] + 1))
        if kind == "cores" and cores and usable.issuperset(cores):
            return Place(torch.device("cpu"), cores)
    if name not in known_places:
        raise ConfigError(
            f"Processor '{name}' of device '{owner}' was asked for.",
            f"That machine has {', '.join(known_places)}.",
            "Name those, let `workbench devices --measure` write them, or leave [[device.processor]] out.",
        )
    return known_places[name]


@contextmanager
def pinned(place: Place) -> Iterator[None]:
    """Pin all threads of this process to a place's cores, measure with as many threads, and restore both afterwards."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    threads, variable = torch.get_num_threads(), os.environ.get(THREADS_VARIABLE, "")
    _pin_all(place.cores)
    torch.set_num_threads(len(place.cores))
    os.environ[THREADS_VARIABLE] = str(len(place.cores))
    try:
        yield
    finally:
        _pin_all(cores)
        torch.set_num_threads(threads)
        os.environ[THREADS_VARIABLE] = variable


def _pin_all(cores: Collection[int]) -> None:
    for task in _TASKS.iterdir() if _TASKS.is_dir() else ():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
