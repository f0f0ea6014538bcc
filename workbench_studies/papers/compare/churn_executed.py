"""Points of churn.py that were executed: emulated boards that come and go, next to the simulation of the same run.

A tiny model on boards a hundred times slower stands in for all-MiniLM-L6-v2 on Raspberry Pi 5: a step takes about as
long, and the host computes little, so it keeps pace.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from workbench import experiment
from workbench.core.cluster import Cluster, Device
from workbench.core.device_faults import RETURN
from workbench.core.job import Mode
from workbench.core.report import Report
from workbench.core.run_folder import scratch_folder
from workbench.methods.training.faults import CHANGES
from workbench.runs.advice import COMPUTED
from workbench_studies.papers.compare.boards import boards
from workbench_studies.papers.compare.churn import COUNT, JOB, MBIT_PER_S, WAYS, exponential
from workbench_studies.papers.items import Item
from workbench_studies.papers.result import Result, Settings

MODEL, SLOWER = "tiny-bert-6", 100
EXECUTED_WAYS, EXECUTED_STAYS_S = ("P-RGE", "LoRA, data parallel", "LoRA, pipeline"), (10, 30)
SAMPLES, UNDISTURBED_S = 256, 24.0
"""Samples of an epoch; seconds of a run in which no board goes, to a whole epoch."""
HORIZON_S = 20 * UNDISTURBED_S
"""Boards come and go until this time; no run takes so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Measurements of a run.  seconds: on the emulated boards' clock, or simulated.  returns_s: seconds until the
    return of each board was noticed.  in_pace: whether the host kept pace with the emulated boards.
    """

    samples: int
    seconds: float
    changes: int = 0
    returns_s: tuple[float, ...] = ()
    dilation: float = 1.0
    in_pace: bool = True

    @property
    def rate(self) -> float:
        """Return the samples per second."""
        return self.samples / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A way at a mean stay, and undisturbed, executed and simulated."""

    way: str
    stay_s: int
    executed: Run
    executed_alone: Run
    simulated: Run
    simulated_alone: Run

    @property
    def goodput(self) -> float:
        """Return the executed goodput over that of boards that stay."""
        return self.executed.rate / self.executed_alone.rate

    @property
    def simulated_goodput(self) -> float:
        """Return the simulated one."""
        return self.simulated.rate / self.simulated_alone.rate

    @property
    def in_pace(self) -> bool:
        """Return whether the host kept pace in both runs."""
        return self.executed.in_pace and self.executed_alone.in_pace


def slow_boards() -> Cluster:
    """Return the boards of churn.py, a hundred times slower, on the same links."""

    def slower(device: Device) -> Device:
        return replace(
            device,
            flops_per_s=device.flops_per_s / SLOWER,
            memory_bytes_per_s=device.memory_bytes_per_s and device.memory_bytes_per_s / SLOWER,
            host_share=1 / SLOWER,
            model=COMPUTED,
        )

    return boards(COUNT, MBIT_PER_S).with_each(slower)


def run(way: str, stay_s: int | None, mode: Mode, seed: int = 0, undisturbed_s: float = UNDISTURBED_S) -> Run:
    """Run a way on boards that stay so long in the mean, or for good with None."""
    method, options = WAYS[way]
    cluster = slow_boards()
    job = replace(JOB, model=MODEL, method=method, options=dict(options), train_samples=SAMPLES, seed=seed, epochs=1)
    costs = experiment.profile(job, cluster)
    epoch = experiment.run(job, cluster, "simulate", costs=costs)
    epochs = max(1, round(undisturbed_s / epoch.predicted_s))
    job = replace(job, epochs=epochs, faults=_faults(stay_s, seed))
    with scratch_folder() as folder:
        return _run(experiment.run(job, cluster, mode, costs=costs, workdir=folder / "run"))


def _faults(stay_s: int | None, seed: int) -> str:
    faults = () if stay_s is None else exponential(stay_s).faults(COUNT, HORIZON_S, seed)
    return "; ".join(fault.text for fault in faults)


def _run(report: Report) -> Run:
    if report.mode == "execute":
        seconds = report.spent_s["train"] / report.dilation
    else:
        seconds = report.predicted_s + report.phases_s.get(CHANGES, 0.0)
    return Run(
        samples=sum(step.samples for step in report.steps),
        seconds=seconds,
        changes=len(report.recoveries),
        returns_s=tuple(each.noticed_s for each in report.recoveries if each.what.startswith(RETURN)),
        dilation=report.dilation,
        in_pace=report.valid,
    )


def churn_executed(item: Item, settings: Settings) -> Result:
    """Execute and simulate some ways at some mean stays.  Finished runs are stored."""
    seed = settings.seeds[0]
    ways, stays_s = (EXECUTED_WAYS[:1], EXECUTED_STAYS_S[:1]) if settings.quick else (EXECUTED_WAYS, EXECUTED_STAYS_S)
    undisturbed_s = 1.0 if settings.quick else UNDISTURBED_S

    def run_of(way: str, stay_s: int | None, mode: Mode) -> Run:
        name = re.sub("[^a-z0-9]+", "_", f"{way} {stay_s} {seed} {mode}".lower())
        make = partial(run, way, stay_s, mode, seed, undisturbed_s)
        outcome = settings.remember(f"churn-executed/{name}.json", Run, make)
        settings.progress(
            f"{way}, mean stay {stay_s} s, {mode}: {outcome.rate:.2f} samples a second, {outcome.seconds:.0f} s"
        )
        return outcome

    points = [
        Point(
            way=way,
            stay_s=stay_s,
            executed=run_of(way, stay_s, "execute"),
            executed_alone=run_of(way, None, "execute"),
            simulated=run_of(way, stay_s, "simulate"),
            simulated_alone=run_of(way, None, "simulate"),
        )
        for way in ways
        for stay_s in stays_s
    ]
    return compared(item, points)


def compared(item: Item, points: list[Point]) -> Result:
    """Return the comparison of the points."""
    rows = [
        (
            point.way,
            float(point.stay_s),
            point.goodput,
            point.simulated_goodput,
            float(point.executed.changes),
            median(point.executed.returns_s) if point.executed.returns_s else None,
            point.executed.dilation,
            "yes" if point.in_pace else "no",
        )
        for point in points
    ]
    alone = {point.way: point.executed_alone.rate / point.simulated_alone.rate for point in points}
    return item.result(
        tables={"executed": rows},
        model=MODEL,
        slower=SLOWER,
        undisturbed=UNDISTURBED_S,
        off=max(abs(point.goodput - point.simulated_goodput) for point in points) * 100,
        pace=", ".join(f"{way} {ratio:.2f}" for way, ratio in alone.items()),
        in_pace=sum(point.in_pace for point in points),
        points=len(points),
    )
