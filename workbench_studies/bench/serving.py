"""`workbench bench serving`: serve a tiny model while many random faults strike, and look for leftovers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from workbench.core.cluster import Cluster, Device, Link
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.methods.galaxy_plus.profiles import made_up_host
from workbench.methods.galaxy_plus.serving.records import (
    ReschedulingSettings,
    ServedRequest,
    ServingReport,
    StreamSettings,
)
from workbench.methods.galaxy_plus.serving.serve import serve
from workbench.runtime.engine_starter import settle, warm_up
from workbench.runtime.engines import EngineCluster
from workbench_studies.bench.frame import Figures, Progress
from workbench_studies.random_faults import random_faults

SOAK_MODEL = "tiny-bert-2"
SOAK_LENGTH = 16
SOAK_FLOPS_PER_S = 4e7
"""Speed of an imaginary core: a request takes four devices about 15 ms, and the host computes little."""
FAULT_EVERY_S = 15.0
REQUESTS_PER_S = 30.0
"""A guess at the resulting request rate, by which faults are spread over the stream."""
SETTINGS = ReschedulingSettings(report_every_s=0.2, silence_s=5.0, request_timeout_s=10.0, calm_s=5.0)


NUM_REQUESTS = 2000
SHOWN_EVERY = 500


def bench(progress: Progress = print, *, soak: int = 0) -> Figures:
    """Return the figures of a stream under random faults.  soak: so many requests, by default NUM_REQUESTS.

    Raises AssertionError for a lost or wrong answer, or leftovers.
    """
    count = soak or NUM_REQUESTS

    def show(request: ServedRequest) -> None:
        if (request.number + 1) % SHOWN_EVERY == 0:
            progress(f"{request.number + 1} of {count} answered after {request.end_s:.0f} s")

    result = serve_randomly(count, on_request=show)
    report = result.report
    if not result.is_clean:
        raise AssertionError(
            f"{report.num_lost} answers lost, {report.num_wrong} wrong, left behind: {result.left_behind}"
        )
    return {
        "label": report.label,
        "requests": len(report.requests),
        "repeated": report.num_repeated,
        "faults": len(report.faults),
        "plans_switched_to": len(report.events_of("switched")),
        "answers_per_s": report.throughput_per_s(0.0, report.end_s),
        "latency_p95_s": report.percentile_s(0.95),
        "memory_last_fifth_over_first": 1.0 + result.growth,
        "valid": report.valid,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """report: the stream's report.  left_behind: processes and run folders that exist after the engines have ended and
    did not exist before.
    """

    report: ServingReport
    left_behind: tuple[str, ...]

    @property
    def growth(self) -> float:
        """Return the relative growth of all processes' resident memory from the first fifth of the time to the last.

        A restarting device counts with its current memory, so medians are compared.
        """
        totals = [sum(by_process) for _, by_process in self.report.memory if all(by_process)]
        fifth = max(1, len(totals) // 5)
        if len(totals) < 2:
            return 0.0
        first, last = sorted(totals[:fifth]), sorted(totals[-fifth:])
        return last[len(last) // 2] / first[len(first) // 2] - 1

    @property
    def is_clean(self) -> bool:
        """Return whether every answer was right, none lost, and nothing left behind."""
        return not (self.report.num_lost or self.report.num_wrong or self.left_behind)


def soak_cluster() -> Cluster:
    """Return four unequal emulated devices for a tiny model."""
    link = Link(bytes_per_s=1.25e8, latency_s=1e-4)
    shares = (0.5, 0.5, 0.27, 0.27)
    devices = tuple(
        Device(
            name=f"device-{rank}", flops_per_s=SOAK_FLOPS_PER_S * share, memory_bytes=10**9, link=link, host_share=share
        )
        for rank, share in enumerate(shares)
    )
    return Cluster(name="soak", devices=devices, description="Four unequal imagined devices for a tiny model")


def serve_randomly(
    num_requests: int,
    *,
    seed: int = 0,
    rate_per_s: float = 0.0,
    faults: Sequence[Fault] | FaultSchedule | None = None,
    fidelity: Literal["auto", "kernel", "paced"] = "auto",
    rescheduling: ReschedulingSettings = SETTINGS,
    **settings: Any,
) -> SoakResult:
    """Serve a tiny model with random faults (or the given ones), and look for leftovers at the end.  settings:
    see `serve`.
    """
    warm_up(with_models=False)  # the process that starts engines stays for whoever serves next
    settle()
    before = _traces()
    cluster = soak_cluster()
    if faults is None:
        faults = FaultSchedule(
            random_faults(cluster.world_size, num_requests / REQUESTS_PER_S, every=FAULT_EVERY_S, seed=seed)
        )
    with EngineCluster.start(cluster, fidelity=fidelity) as engines:
        report = serve(
            SOAK_MODEL,
            cluster,
            engines,
            made_up_host(SOAK_MODEL, SOAK_FLOPS_PER_S),
            stream=StreamSettings(num_requests=num_requests, rate_per_s=rate_per_s, seed=seed, length=SOAK_LENGTH),
            rescheduling=rescheduling,
            faults=faults,
            **settings,
        )
    return SoakResult(report=report, left_behind=tuple(sorted(_traces() - before)))


def _traces() -> set[str]:
    """Return what runs of this process may leave behind: its descendants, run folders that name it, and network
    interfaces.
    """
    traces = {f"process {process.pid}: {' '.join(process.cmdline())[:80]}" for process in _descendants()}
    folders = Path(tempfile.gettempdir()).glob("workbench-run-*")
    mine = [folder for folder in folders if f'"pid": {os.getpid()}' in _text(folder / "owner.json")]
    traces |= {f"folder {folder}" for folder in mine}
    return traces | {f"network interface {name}" for name in psutil.net_if_addrs()}


def _descendants() -> list[psutil.Process]:
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.is_running()
        and process.status() != psutil.STATUS_ZOMBIE
        and "workbench" in " ".join(process.cmdline())
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
