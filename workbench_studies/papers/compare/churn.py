"""How well does a training progress if devices come and go all the time?  Goodput over the mean stay, simulated.

Every run is a prediction with faults (methods.training.faults): the coordinator of executed runs, in virtual time, with
its detection, new plans, moves of state and repeated steps.  Goodput is the samples of finished steps over the seconds
of the whole run, so a step that is done twice counts once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from random import Random
from statistics import fmean
from typing import Any, TypeVar

from workbench import experiment
from workbench.core.device_faults import Fault, FaultKind
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.once import shared_results
from workbench.core.report import Report
from workbench.core.schedule import paused_collector
from workbench_studies.papers.compare.boards import boards
from workbench_studies.papers.compare.runs import Ways
from workbench_studies.papers.result import Settings

MODEL, BOARD, MBIT_PER_S, COUNT = "all-MiniLM-L6-v2", "rpi-5", 200, 4
STAYS_S = (10, 30, 100, 300)
SHARE_AWAY = 0.25
"""The mean absence over the mean stay: a device is there for 1 / (1 + SHARE_AWAY) of the time."""
MEAN_STAYS, LEAST_S, MOST_S = 6, 200.0, 900.0
"""A run lasts so many mean stays, between two limits in seconds."""
START_S = 3.0
"""Seconds in which a device that comes back can take no part yet: a stay that is shorter changes nothing."""
JOB = Job(model=MODEL, validation_samples=1, test_samples=1, epochs=2)
LONGER = 1.2
"""A job has so many times the steps that an undisturbed run can do."""
LORA = {"technique": "lora"}
WAYS: Ways = {
    "P-RGE": ("p_rge", {}),
    "LoRA, data parallel": ("fine_tuning", {**LORA, "paradigm": "data_parallel"}),
    "LoRA, pipeline": ("fine_tuning", {**LORA, "paradigm": "pipeline_parallel"}),
    "PAC+": ("pac_plus", {}),
    "RingAda": ("ringada", {}),
    "FedAvg": ("ringada", {"federated": True}),
    "Confidant": ("confidant", {**LORA, "partition": "any_order"}),
}
LIDS, LID, LESSON_S = 30, "macbook-pro-m1", 300.0
SAMPLES = {BOARD: 2048, LID: 8000}
"""Training samples, by device."""
LID_OPEN_S, LID_CLOSED_S, LID_SIGMA = 480.0, 45.0, 1.0
"""Medians of lognormal stays and absences, and the deviation of their logarithms."""
CALL_S, CALLED, CALL_WITHIN_S, CALL_LASTS_S = 120.0, 2 / 3, 20.0, (60.0, 120.0)
"""When the teacher asks to close the lids, the share that obeys, within which time, and for how long."""


NOTHING_KEPT = Settings()
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Draws when a device is away.  stay, away: seconds from a generator.  kind: how it goes.  calls: absences besides,
    as (begin, end) from a generator.
    """

    stay: Callable[[Random], float]
    away: Callable[[Random], float]
    kind: FaultKind = "kill"
    calls: Callable[[Random], Sequence[tuple[float, float]]] = field(default=lambda draws: ())

    def absences(self, draws: Random, end_s: float) -> list[tuple[float, float]]:
        """Return a device's absences until end_s; what lies between two is at least START_S."""
        calls, now_s = list(self.calls(draws)), self.stay(draws)
        while now_s < end_s:
            calls.append((now_s, now_s + self.away(draws)))
            now_s = calls[-1][1] + self.stay(draws)
        merged: list[tuple[float, float]] = []
        for begin_s, until_s in sorted(calls):
            if merged and begin_s < merged[-1][1] + START_S:
                merged[-1] = merged[-1][0], max(merged[-1][1], until_s)
            else:
                merged.append((begin_s, until_s))
        return merged

    def faults(self, count: int, end_s: float, seed: int) -> tuple[Fault, ...]:
        """Return the absences of some devices as faults; at end_s all go for good, which ends a run."""
        faults = []
        for rank in range(count):
            for begin_s, until_s in self.absences(Random(f"{seed}, device {rank}"), end_s):
                back_s = until_s if until_s < end_s - START_S else None
                if begin_s < end_s:
                    faults.append(Fault(kind=self.kind, rank=rank, start=begin_s, end=back_s))
            faults.append(Fault(kind="kill", rank=rank, start=end_s))
        return tuple(faults)


NEVER = Draw(stay=lambda draws: math.inf, away=lambda draws: 0.0)


def exponential(stay_s: float) -> Draw:
    """Return devices that stay and are away for exponential times, independent of each other."""
    return Draw(
        stay=lambda draws: draws.expovariate(1 / stay_s),
        away=lambda draws: draws.expovariate(1 / (SHARE_AWAY * stay_s)),
    )


def _called(draws: Random) -> list[tuple[float, float]]:
    begin_s = CALL_S + draws.uniform(0, CALL_WITHIN_S)
    return [(begin_s, begin_s + draws.uniform(*CALL_LASTS_S))] if draws.random() < CALLED else []


CLASSROOM = Draw(
    stay=lambda draws: LID_OPEN_S * draws.lognormvariate(0, LID_SIGMA),
    away=lambda draws: LID_CLOSED_S * draws.lognormvariate(0, LID_SIGMA),
    kind="freeze",
    calls=_called,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A simulated run.  rate: samples of finished steps per second.  in_use: devices of its first plan.  lost_s: the
    seconds in which steps were lost or repeated, devices met and state was moved.  present: the devices' mean share of
    the time.
    """

    rate: float
    in_use: int
    lost_s: float
    changes: int
    present: float


def length_s(stay_s: float) -> float:
    """Return the seconds of a run."""
    return min(MOST_S, max(LEAST_S, MEAN_STAYS * stay_s))


def run(way: str, count: int, device: str, draw: Draw, end_s: float, seed: int = 0) -> Run:
    """Simulate a way of training on devices of the catalogue that come and go."""
    cluster, faults = boards(count, MBIT_PER_S, device), draw.faults(count, end_s, seed)
    job = replace(
        _job(way, device), epochs=_epochs(way, count, device, end_s), faults="; ".join(fault.text for fault in faults)
    )
    report = experiment.run(job, cluster, "simulate")
    away_s = sum(min(end_s, fault.end or end_s) - fault.start for fault in faults)
    return Run(
        rate=sum(step.samples for step in report.steps) / end_s,
        in_use=len(report.plan.busy_ranks),
        lost_s=end_s - report.predicted_s,
        changes=len(faults) - count,
        present=1 - away_s / (end_s * count),
    )


def _job(way: str, device: str) -> Job:
    method, options = WAYS[way]
    return replace(JOB, method=method, options=dict(options), train_samples=SAMPLES[device])


@lru_cache
def _short(way: str, count: int, device: str) -> Report:
    return experiment.run(_job(way, device), boards(count, MBIT_PER_S, device), "simulate")


def _epochs(way: str, count: int, device: str, end_s: float) -> int:
    """Return the epochs of a job that no run of so many seconds can finish."""
    report = _short(way, count, device)
    last = report.steps[-1].epoch
    epoch_s = sum(step.predicted_s or 0.0 for step in report.steps if step.epoch == last)
    return 2 + math.ceil(LONGER * end_s / epoch_s)


def undisturbed(way: str, count: int, device: str, end_s: float, settings: Settings = NOTHING_KEPT) -> float:
    """Return the samples per second of the plain prediction of devices that stay; 0 if the way needs more of them."""
    return _remember(settings, f"{way}-{count}-{device}-{end_s:.0f}", float, _undisturbed, way, count, device, end_s)


@lru_cache
def _undisturbed(way: str, count: int, device: str, end_s: float) -> float:
    try:
        job = replace(_job(way, device), epochs=_epochs(way, count, device, end_s))
    except ConfigError:  # it needs two devices
        return 0.0
    report = experiment.run(job, boards(count, MBIT_PER_S, device), "simulate")
    ends_s = accumulate(step.predicted_s or 0.0 for step in report.steps)
    return sum(step.samples for step, done_s in zip(report.steps, ends_s, strict=True) if done_s <= end_s) / end_s


def share_present(faults: Sequence[Fault], count: int, end_s: float) -> dict[int, float]:
    """Return the share of the time for which so many of the devices are there, by the number."""
    moves = [(fault.start, -1) for fault in faults if fault.start < end_s]
    moves += [(fault.end, 1) for fault in faults if fault.end is not None]
    shares: dict[int, float] = {}
    now_s = 0.0
    for at_s, change in [*sorted(moves), (end_s, 0)]:
        shares[count] = shares.get(count, 0.0) + (at_s - now_s) / end_s
        now_s, count = at_s, count + change
    return shares


def free(way: str, stay_s: float, seed: int, settings: Settings = NOTHING_KEPT) -> float:
    """Return the goodput over the undisturbed one if a change cost nothing: the undisturbed rate of as many boards as
    are there, over the time.
    """
    end_s = length_s(stay_s)
    shares = share_present(exponential(stay_s).faults(COUNT, end_s, seed), COUNT, end_s)
    rates = sum(share * undisturbed(way, count, BOARD, end_s, settings) for count, share in shares.items() if count)
    return rates / undisturbed(way, COUNT, BOARD, end_s, settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Goodputs over the undisturbed one, and what they would be if changes cost nothing, of all seeds.  lost: share of
    the time in which steps were lost or repeated, devices met and state was moved.
    """

    way: str
    stay_s: float
    goodputs: tuple[float, ...]
    free: tuple[float, ...]
    lost: float

    @property
    def goodput(self) -> float:
        """Return their mean."""
        return fmean(self.goodputs)

    @property
    def of_free(self) -> float:
        """Return their mean over the one if changes cost nothing."""
        return fmean(self.goodputs) / fmean(self.free)


def points(settings: Settings, seeds: Sequence[int]) -> Iterator[Point]:
    """Yield every way at every mean stay."""
    for way in WAYS:
        with shared_results(), paused_collector():
            for stay_s in STAYS_S:
                end_s, arguments = length_s(stay_s), (way, COUNT, BOARD)
                runs = [
                    _remember(
                        settings, f"{way}-{stay_s}-{seed}", Run, run, *arguments, exponential(stay_s), end_s, seed
                    )
                    for seed in seeds
                ]
                alone = undisturbed(*arguments, end_s, settings)
                point = Point(
                    way=way,
                    stay_s=stay_s,
                    goodputs=tuple(run.rate / alone for run in runs),
                    free=tuple(free(way, stay_s, seed, settings) for seed in seeds),
                    lost=sum(run.lost_s for run in runs) / (len(runs) * end_s),
                )
                words = f"{point.goodput:.2f}, {point.of_free:.2f} of free changes"
                settings.progress(f"{way}, mean stay {stay_s} s: {words}")
                yield point


def lessons(settings: Settings, seed: int) -> Iterator[tuple[str, Run, float]]:
    """Yield the lesson of every way in the classroom, and its goodput over the one of lids that stay open."""
    for way in WAYS:
        with shared_results(), paused_collector():
            lesson = _remember(settings, f"{way}-lids-{seed}", Run, run, way, LIDS, LID, CLASSROOM, LESSON_S, seed)
            goodput = lesson.rate / undisturbed(way, LIDS, LID, LESSON_S, settings)
            settings.progress(f"{way}, classroom: {goodput:.2f}")
            yield way, lesson, goodput


def _remember(settings: Settings, name: str, kind: type[T], make: Callable[..., T], *arguments: Any) -> T:
    return settings.remember(f"churn/{re.sub('[^a-z0-9-]+', '_', name.lower())}.json", kind, partial(make, *arguments))
