"""A timeline records the execution of a schedule: spans per rank, bytes moved, memory over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from workbench.core.errors import ConfigError
from workbench.core.schedule import COLLECTIVES, SEND, Op
from workbench.core.serial import write_json

Source = Literal["simulated", "emulated", "real"]
Fidelity = Literal["", "kernel", "paced"]
"""How links were emulated."""

BUSY_OVERRUN_SHARE = 0.05
"""Above this share of late time, emulated times are not meaningful: the host was too busy for the devices.  A valid
emulation is to be within 5 % of its simulation, and the host alone may then have added more."""
INVALID_MARK = "(!)"
"""The mark on every measured number of a run during which the host was too busy."""


def late_share_of(devices: Iterable[tuple[float, float]]) -> float:
    """Return the late time of all devices as a share of their time: by so much, at most, it made a run longer.

    devices: the late and the paced seconds of each (see Pacer).  Where devices wait for each other, what each was late
    adds up.  They run at the same time, so the longest paced time counts.
    """
    late_s, paced_s = (list(seconds) for seconds in zip((0.0, 0.0), *devices, strict=True))
    longest_s = max(paced_s)
    return sum(late_s) / longest_s if longest_s else 0.0


def label_of(source: Source, fidelity: str, *, valid: bool = True) -> str:
    """Return the origin of numbers: 'simulated', 'emulated, kernel links', 'emulated, paced links' or 'real', marked if
    not valid.
    """
    return ", ".join([source, *([f"{fidelity} links"] if fidelity else []), *([] if valid else ["host too busy"])])


def _require_origin(source: Source, fidelity: Fidelity) -> None:
    """Raise ConfigError for a fidelity of links that were not emulated."""
    if fidelity and source != "emulated":
        request = f"Numbers from links emulated by '{fidelity}' were asked for."
        raise ConfigError(request, f"They are {source}.", "Leave the fidelity empty.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedReport:
    """Base class of reports: states the origin of the numbers, and writes JSON.

    overrun_share: the late share of its time (see late_share_of).
    dilation: the factor by which the devices were emulated slower than real speed; all times of the devices are in
    device time.
    valid: False if the host was too busy for the emulated times to be meaningful; notes give the reason.
    """

    source: Source
    fidelity: Fidelity = ""
    overrun_share: Annotated[float, Meta(ge=0)] = 0.0
    dilation: Annotated[float, Meta(gt=0)] = 1.0
    valid: bool = True
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    schema_version: Literal[1] = 1

    def __post_init__(self) -> None:
        _require_origin(self.source, self.fidelity)

    @property
    def label(self) -> str:
        """Return the origin of the numbers (see label_of)."""
        return label_of(self.source, self.fidelity, valid=self.valid)

    @property
    def mark(self) -> str:
        """Return the mark after each measured number: empty if the run is valid."""
        return "" if self.valid else f" {INVALID_MARK}"

    def write(self, path: Path | str) -> Path:
        """Write the report as JSON, completely or not at all, and return its path."""
        path = Path(path)
        write_json(path, self)
        return path


class Span(NamedTuple):
    """One operation on one rank.  nbytes: bytes moved, 0 for compute.  late_s: overrun of a paced deadline."""

    rank: int
    op: Op
    start_s: float
    end_s: float
    nbytes: int = 0
    late_s: float = 0.0


class MemorySample(NamedTuple):
    """The bytes in use on a rank from time_s on."""

    time_s: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans and memory use of every rank.  Times in seconds from the first operation.

    source: simulated in virtual time; emulated on this machine (fidelity 'kernel' or 'paced' links); or real.
    memory[rank]: bytes in use over time, as a step function.  budget_bytes[rank]: the device's memory limit.
    in_use_bytes[rank]: what counted against the limit at the end of the epoch: the values, the libraries' buffers, and
    freed memory that the process keeps for later; 0 if it is not known.
    clock_bound_s: how much the times of one device may be shifted against another's.
    """

    source: Source
    device_names: tuple[str, ...]
    spans: tuple[Span, ...]
    fidelity: Fidelity = ""
    memory: tuple[tuple[MemorySample, ...], ...] = ()
    budget_bytes: tuple[int, ...] = ()
    in_use_bytes: tuple[int, ...] = ()
    title: str = ""
    clock_bound_s: float = 0.0

    def __post_init__(self) -> None:
        _require_origin(self.source, self.fidelity)

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.device_names)

    @property
    def label(self) -> str:
        """Return the origin of the numbers: 'simulated', 'emulated, kernel links', 'emulated, paced links'
        or 'real'.
        """
        return label_of(self.source, self.fidelity)

    @property
    def makespan_s(self) -> float:
        """Return the end of the last span."""
        return max((span.end_s for span in self.spans), default=0.0)

    def faults(self) -> Iterator[str]:
        """Yield contradictions: ranks without a device, times and sizes that are negative or infinite, lists of the
        wrong length.
        """
        for span in self.spans:
            if not 0 <= span.rank < self.world_size:
                yield f"Operation {span.op.label} is of device {span.rank} of {self.world_size}"
            if not 0 <= span.start_s <= span.end_s < math.inf or span.nbytes < 0 or not 0 <= span.late_s < math.inf:
                yield f"Operation {span.op.label} of device {span.rank} lasts from {span.start_s:g} to {span.end_s:g} s"
        for name, values in (
            ("memory", self.memory),
            ("budget_bytes", self.budget_bytes),
            ("in_use_bytes", self.in_use_bytes),
        ):
            if values and len(values) != self.world_size:
                yield f"'{name}' has {len(values)} entries for {self.world_size} devices"
        for rank, samples in enumerate(self.memory):
            if any(not 0 <= sample.time_s < math.inf or sample.nbytes < 0 for sample in samples):
                yield f"The memory of device {rank} has a time or size below 0"

    def by_rank(self) -> list[list[Span]]:
        """Return the spans of each rank."""
        spans: list[list[Span]] = [[] for _ in self.device_names]
        for span in self.spans:
            spans[span.rank].append(span)
        return spans

    def busy_s(self, rank: int) -> float:
        """Return the seconds in which at least one compute stream of the rank was busy."""
        return busy_of(span for span in self.spans if span.rank == rank)

    @property
    def bubble_fraction(self) -> float:
        """Return the share of all ranks' time in which they did not compute (0: never idle)."""
        total_s = self.makespan_s * self.world_size
        if total_s == 0:
            return 0.0
        return 1.0 - sum(map(busy_of, self.by_rank())) / total_s

    def peak_bytes(self, rank: int) -> int:
        """Return the peak memory of the rank in bytes."""
        return max((sample.nbytes for sample in self.memory[rank]), default=0) if self.memory else 0

    def bytes_sent(self, rank: int) -> int:
        """Return the bytes that the rank sent in transfers and collectives."""
        return sum(s.nbytes for s in self.spans if s.rank == rank and (s.op.kind == SEND or s.op.kind in COLLECTIVES))

    @property
    def all_sent_bytes(self) -> int:
        """Return the bytes that all ranks sent."""
        return sum(span.nbytes for span in self.spans if span.op.kind == SEND or span.op.kind in COLLECTIVES)

    @property
    def highest_peak_bytes(self) -> int:
        """Return the peak memory of the rank that needs most, in bytes."""
        return max(map(self.peak_bytes, range(self.world_size)))


def busy_of(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one compute stream of a rank with these spans was busy."""
    total_s = reached_s = 0.0
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans if not span.op.is_communication):
        total_s += max(0.0, end_s - max(start_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s
