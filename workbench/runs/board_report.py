"""Measurements of a user's boards, as a file to publish: no names, addresses, users or paths, only numbers and known
words.

It is made from a kit's file that `workbench kit measure` has filled, or from the report of a run on real devices.  All
text in it is from a fixed list or has a fixed form, so nothing that its owner has named can come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from workbench import __version__
from workbench.assets.fetch import ASSETS
from workbench.core.catalogue import device_models, load_cluster, load_device
from workbench.core.cluster import Cluster, DataPlane, Device
from workbench.core.errors import ConfigError
from workbench.core.heat import MOST_LEVELS, Level, require_curve
from workbench.core.medium import Medium
from workbench.core.methods import registered
from workbench.core.ranges import Seconds, Share
from workbench.core.report import Report, median_s
from workbench.core.serial import read_json, shown
from workbench.runs.history import one_report
from workbench.tasks import TASKS

LARGEST_FILE = 1 << 20
OWN = "own"
"""Stands for a model, a method or data that is not ours: its name may be somebody's."""

KnownWord = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.:-]{1,60}\Z")]
Version = Annotated[str, Meta(pattern=r"\A[0-9][0-9A-Za-z.+]{0,30}\Z")]
Rank = Annotated[int, Meta(ge=0, lt=1024)]
Amount = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=0, le=10**9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBoard:
    """A board.  model: its name in the catalogue, or OWN.

    Its rates are those that it measured itself: arithmetic in fp32 (gflops), also of each of its processors if it has
    several, memory (read and written) and storage (read; written).  None: the catalogue's.  memory_mb: its budget.
    sustained: its speed over seconds of computing, relative to the cold board (see core.heat).
    """

    model: KnownWord
    memory_mb: Amount
    gflops: Amount | None = None
    processors_gflops: Annotated[tuple[Amount, ...], Meta(max_length=16)] = ()
    memory_gb_per_s: Amount | None = None
    storage_mb_per_s: Amount | None = None
    storage_write_mb_per_s: Amount | None = None
    sustained: Annotated[tuple[tuple[Seconds, Share], ...], Meta(max_length=MOST_LEVELS)] = ()

    def __post_init__(self) -> None:
        request = "A board report was read."
        if self.model not in (OWN, *device_models()):
            raise ConfigError(
                request, f"The catalogue has no board '{shown(self.model)}'.", f"Write '{OWN}' for a board of your own."
            )
        require_curve(tuple(Level(heat_s=heat_s, speed=speed) for heat_s, speed in self.sustained), "A board")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLink:
    """A path between two boards, by their numbers, as they measured it.  latency_ms: one way."""

    source: Rank
    destination: Rank
    mbit_per_s: Amount
    latency_ms: Annotated[float, Meta(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """A run on all the boards.  method, model, task: OWN if not the workbench's.

    predicted_s, measured_s: medians over its steps, if it trained.  num_faults: requested faults.
    recoveries: devices lost or regained.
    """

    method: KnownWord
    model: KnownWord
    task: KnownWord
    batch_size: Count
    micro_batches: Count
    max_length: Count
    num_steps: Count
    predicted_s: Seconds | None = None
    measured_s: Seconds | None = None
    num_faults: Count = 0
    recoveries: Count = 0

    def __post_init__(self) -> None:
        for kind, name, known in (
            ("method", self.method, _our_methods()),
            ("model", self.model, ASSETS),
            ("task", self.task, TASKS),
        ):
            if name != OWN and name not in known:
                raise ConfigError(
                    "A board report was read.",
                    f"The workbench has no {kind} '{shown(name)}'.",
                    f"Write '{OWN}' for one of your own.",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardReport:
    """The file.  month: when it was made.  medium, data: how the boards are joined, and their tensors travel."""

    workbench: Version
    month: Annotated[str, Meta(pattern=r"\A20\d\d-(0[1-9]|1[0-2])\Z")]
    boards: Annotated[tuple[SharedBoard, ...], Meta(min_length=1, max_length=1024)]
    medium: Medium
    data: DataPlane
    links: Annotated[tuple[SharedLink, ...], Meta(max_length=10_000)] = ()
    run: SharedRun | None = None
    kind: Literal["workbench board report"] = "workbench board report"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        pairs = Counter((link.source, link.destination) for link in self.links)
        for (source, destination), times in pairs.items():
            if times > 1 or source == destination or max(source, destination) >= len(self.boards):
                counted = f"{times} times and has" if times > 1 else "and has"
                raise ConfigError(
                    "A board report was read.",
                    f"It names a link from board {source} to board {destination} {counted} {len(self.boards)} boards.",
                    "Name two boards of the file, each pair once.",
                )


def read_board_report(path: Path) -> BoardReport:
    """Read a file that somebody has sent.  Raises ConfigError if it is missing, too large, or not of this form."""
    return read_json(path, BoardReport, "the board report", most_bytes=LARGEST_FILE)


def board_report(name: str, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> BoardReport:
    """Return the facts about the boards from a kit's file, or from a run on real devices.  name: a .toml file, or see
    one_report.

    Raises ConfigError for emulated or simulated devices, and for a kit that has not measured itself.
    """
    if Path(name).suffix == ".toml":
        return _board_report(_measured_kit(name), None, now)
    report = Report.read(one_report(name))
    if report.source != "real":
        did = "Its devices were emulated on one machine" if report.source == "emulated" else "It was only simulated"
        raise ConfigError(
            f"Sharing what boards did in '{shown(name)}' was asked for.",
            f"{did}, so it says nothing about a board.",
            "Run on a kit of real devices: workbench run --cluster kit.toml.",
        )
    return _board_report(report.cluster, _run_of(report), now)


def _measured_kit(name: str) -> Cluster:
    cluster = load_cluster(name)
    request = f"Sharing what the boards of '{shown(name)}' do was asked for."
    if not cluster.is_real:
        raise ConfigError(request, "Its devices have no address: they are emulated.", "Name a kit's file.")
    if not any(_measured(device, "flops_per_s") for device in cluster.devices):
        raise ConfigError(
            request, "Its speeds are the catalogue's.", f"Measure first: workbench kit measure --file {name}."
        )
    return cluster


def _board_report(cluster: Cluster, run: SharedRun | None, now: Callable[[], datetime]) -> BoardReport:
    ranks = {device.name: rank for rank, device in enumerate(cluster.devices)}
    links = []
    for pair, link in cluster.pairs.items():
        source, destination = pair.split(">")
        links.append(
            SharedLink(
                source=ranks[source],
                destination=ranks[destination],
                mbit_per_s=round(link.mbit_per_s, 1),
                latency_ms=round(link.latency_s * 1e3, 3),
            )
        )
    return BoardReport(
        workbench=__version__,
        month=now().strftime("%Y-%m"),
        boards=tuple(map(_board, cluster.devices)),
        links=tuple(links),
        medium=cluster.medium,
        data=cluster.data,
        run=run,
    )


def _board(device: Device) -> SharedBoard:
    published = load_device(device.model).sustained if device.model in device_models() else ()
    return SharedBoard(
        model=device.model if device.model in device_models() else OWN,
        memory_mb=round(device.memory_bytes / 1e6, 1),
        gflops=_measured(device, "flops_per_s", 1e9),
        processors_gflops=tuple(float(f"{processor.flops_per_s / 1e9:.4g}") for processor in device.processors),
        memory_gb_per_s=_measured(device, "memory_bytes_per_s", 1e9),
        storage_mb_per_s=_measured(device, "storage_bytes_per_s", 1e6),
        storage_write_mb_per_s=_measured(device, "storage_write_bytes_per_s", 1e6),
        sustained=()
        if device.sustained == published
        else tuple((level.heat_s, level.speed) for level in device.sustained),
    )


def _measured(device: Device, rate: str, unit: float = 1.0) -> float | None:
    """Return a rate in a unit; None if it is the catalogue's or a device's default, so that nobody has measured it."""
    value = getattr(device, rate)
    if value is None or (device.model in device_models() and value == getattr(load_device(device.model), rate)):
        return None
    default = next(field.default for field in fields(Device) if field.name == rate)
    return None if value == default else float(f"{value / unit:.4g}")


def _run_of(report: Report) -> SharedRun:
    job = report.job
    return SharedRun(
        method=job.method if job.method in _our_methods() else OWN,
        model=job.model if job.model in ASSETS else OWN,
        task=job.task if job.task in TASKS and not job.data else OWN,
        batch_size=job.batch_size,
        micro_batches=job.micro_batches,
        max_length=job.max_length,
        num_steps=len(report.steps),
        predicted_s=median_s(report.steps, "predicted_s"),
        measured_s=median_s(report.steps, "measured_s"),
        num_faults=len([fault for fault in job.faults.split(";") if fault.strip()]),
        recoveries=len(report.recoveries),
    )


def _our_methods() -> set[str]:
    return {name for name, point in registered().items() if point.value.startswith("workbench.")}


def summary_of(report: BoardReport) -> str:
    """Return a file's content in one line."""
    models = [board.model for board in report.boards]
    counted = ", ".join(f"{models.count(model)} x {model}" for model in dict.fromkeys(models))
    rates = sum(board.gflops is not None for board in report.boards)
    run = "" if report.run is None else f", a run of {report.run.num_steps} steps of {report.run.method}"
    return f"{counted}: {rates} measured speeds, {len(report.links)} links{run}"
