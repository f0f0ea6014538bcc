"""`workbench bench recovery`: the cost of a device that is lost, leaves, slows down or comes back, for every method that trains.

With --soak, random faults over all methods instead: no run may hang, give a wrong result, or leave anything behind.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from workbench.bench.frame import Progress
from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import FaultSchedule, parse_faults, random_faults
from workbench.core.errors import ConfigError, DeviceLostError, did_you_mean
from workbench.core.job import Job
from workbench.core.report import Recovery, Report
from workbench.experiment import run
from workbench.methods.base import Event
from workbench.methods.galaxy_plus.serving.experiments import REQUESTS_PER_S, soak_cluster
from workbench.methods.galaxy_plus.serving.experiments import soak as serve_randomly
from workbench.runtime.engines import default_pool

CLUSTER, DEVICE, ROUNDS = "laptop-equal", 1, 3
SAME_LOSS = 1e-3
"""Relative tolerance of a loss: sums are computed in another order."""


class Case(NamedTuple):
    """A job, and the step in which a device is lost, leaves or slows down."""

    job: Job
    step: int


def _job(method: str, epochs: int, **options: Any) -> Job:
    return Job(method=method, epochs=epochs, train_samples=320, validation_samples=32, test_samples=32, options=options)


CASES = {
    "pac_plus": Case(_job("pac_plus", 2), 4),
    "pac_plus, cached": Case(_job("pac_plus", 12), 14),
    "fine_tuning, lora": Case(_job("fine_tuning", 3, technique="lora"), 4),
    "confidant": Case(replace(_job("confidant", 2, technique="lora", drain_every=2), backup_every=2), 4),
    "confidant, idle": Case(replace(_job("confidant", 2, technique="lora", drain_every=2, devices=3), backup_every=2), 4),
    "ringada": Case(_job("ringada", 6, local_iterations=1), 4),
    "p_rge": Case(replace(_job("p_rge", 1, steps=60), micro_batches=1, batch_size=4, max_length=256), 8),
}
FAULTS = {
    "kill": "kill:{device}@step{step}",
    "freeze": "freeze:{device}@step{step}",
    "leave": "leave:{device}@step{step}",
    "slow": "slow:{device}:4@step{step}",
    "return": "kill:{device}@step{step}; return:{device}@step{later}",
}


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS, soak: int = 0) -> dict[str, Any]:
    """Return the seconds of each recovery, on the emulated devices' clock: the medians of some runs, and the maximum.

    only: methods or kinds of faults, none is all.  soak: instead, so many short runs with random faults.  Raises ConfigError.
    """
    soaked = (*SOAKED, SERVING)
    known = soaked if soak else (*CASES, *FAULTS)
    for word in only:
        if not any(word in name for name in known):
            asked = f"Only '{word}' of the benchmark was asked for."
            raise ConfigError(asked, f"There are {', '.join(known)}.", did_you_mean(word, known))
    methods = [name for name in (soaked if soak else CASES) if any(word in name for word in only)]
    if soak:
        return _soak(soak, methods or soaked, progress)
    methods = methods or list(CASES)
    kinds = [kind for kind in FAULTS if kind in only] or list(FAULTS)
    points = [_point(method, kind, rounds, progress) for method in methods for kind in kinds]
    return {"cluster": CLUSTER, "model": Job().model, "rounds": rounds, "points": points}


def _point(method: str, kind: str, rounds: int, progress: Progress) -> dict[str, Any]:
    case, cluster = CASES[method], load_cluster(CLUSTER)
    device = cluster.devices[DEVICE].name
    faults = FAULTS[kind].format(device=device, step=case.step, later=case.step + 4)
    found: list[Recovery] = []
    valid = True
    for number in range(rounds):
        progress(f"{method}: {faults}, run {number + 1} of {rounds}")
        job = replace(case.job, seed=number, faults=faults, options=case.job.options | ({"adapt": True} if method == "p_rge" else {}))
        report = _run(job, CLUSTER)
        valid = valid and report.valid
        found += [one for one in report.recoveries if one.what == f"{kind} {device}"]
    for one in found:
        progress(f"  {one.told}")
    point = {"method": method, "fault": kind, "recovered": f"{len(found)} of {rounds}"}
    if not found:
        return point
    medians = ("noticed_s", "noticed_steps", "planned_s", "resumed_s")
    return {
        **point,
        **{name: median(getattr(one, name) for one in found) for name in medians},
        "whole_s": median(one.seconds for one in found),
        "longest_s": max(one.seconds for one in found),
        "stood_still_s": median(one.stood_still_s for one in found),
        "step_s": median(one.step_s for one in found),
        "repeated_steps": max(one.repeated for one in found),
        "valid": valid,
    }


def _run(job: Job, cluster: str, progress: Callable[[Event], None] | None = None) -> Report:
    with tempfile.TemporaryDirectory(prefix="workbench-recovery-") as folder:
        return run(job, load_cluster(cluster), workdir=Path(folder) / "run", progress=progress)


TINY: dict[str, Any] = {
    "model": "tiny-bert", "epochs": 3, "train_samples": 64, "validation_samples": 8, "test_samples": 8, "batch_size": 8, "micro_batches": 4,
}  # fmt: skip
SOAKED = {
    "pac_plus": Job(**TINY),
    "fine_tuning, lora": Job(method="fine_tuning", options={"technique": "lora"}, **TINY),
    "fine_tuning, full": Job(method="fine_tuning", options={"technique": "full"}, backup_every=2, **TINY),
    "p_rge": Job(method="p_rge", options={"steps": 24, "after_loss": "repeat"}, **TINY | {"micro_batches": 1, "epochs": 1}),
    "ringada": Job(method="ringada", options={"local_iterations": 1, "unfreeze_every": 4, "depth": 1}, **TINY),
    "confidant": Job(method="confidant", options={"technique": "lora", "drain_every": 2}, backup_every=2, **TINY),
}
FOLLOWING = ("ringada", "confidant")
"""After a change these train on other data, or with weights of another age: their losses are those of an unbroken run only before it.

The step in which a device dies may be done again.
"""
SERVED, SERVED_FAULTS_EVERY_S = 100, 2.0
SERVING = "galaxy_plus, serving"


def _soak(count: int, methods: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Do short runs with random faults; compare the results that do not depend on the devices with an undisturbed run.

    Raises AssertionError for a wrong result or leftovers.
    """
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    unbroken = {method: _run(SOAKED[method], CLUSTER) for method in methods if method != SERVING}
    tally = Counter(runs=0, faults=0, recoveries=0, runs_without_devices=0)
    for number in range(count):
        method = methods[number % len(methods)]
        tally["runs"] += 1
        if method == SERVING:
            _serve(number, tally)
            progress(f"{number + 1} of {count}, {method}")
            continue
        whole = unbroken[method]
        faults = random_faults(
            whole.cluster.world_size, len(whole.steps), every=5.0, seed=number, unit="step", kinds=("slow", "kill", "freeze", "leave")
        )
        job = replace(SOAKED[method], faults="; ".join(fault.text for fault in faults))
        tally["faults"] += len(faults)
        try:
            report = _run(job, CLUSTER)
        except DeviceLostError as error:
            progress(f"{number + 1} of {count}, {method}, {job.faults}: {error}")
            tally["runs_without_devices"] += 1
            continue
        tally["recoveries"] += len(report.recoveries)
        first = min((fault.start for fault in parse_faults(job.faults, whole.cluster)), default=math.inf)
        _require_same(report, whole, f"Run {number + 1}, {method}, '{job.faults}'", first - 1 if method in FOLLOWING else math.inf)
        progress(f"{number + 1} of {count}, {method}, {job.faults or 'no fault'}: {len(report.recoveries)} recoveries")
    default_pool().stop()
    left = set(Path(tempfile.gettempdir()).glob("workbench-*")) - before
    if left:
        raise AssertionError(f"left behind: {', '.join(map(str, left))}")
    return {**tally, "wrong": 0, "left_behind": 0}


def _serve(seed: int, tally: Counter[str]) -> None:
    """Serve a short stream with random faults.  Raises AssertionError for a lost or wrong answer, or leftovers."""
    faults = random_faults(soak_cluster().world_size, SERVED / REQUESTS_PER_S, every=SERVED_FAULTS_EVERY_S, seed=seed)
    result = serve_randomly(SERVED, seed=seed, faults=FaultSchedule(faults))
    tally.update(faults=len(faults), recoveries=len(result.report.events_of("switched")))
    if not result.is_clean:
        report = result.report
        raise AssertionError(f"Seed {seed}: {report.num_lost} answers lost, {report.num_wrong} wrong, left behind: {result.left_behind}")


def _require_same(report: Report, whole: Report, what: str, same: float) -> None:
    """Raise AssertionError if a step is missing or a loss differs; mini-batches from a cache follow the devices' shares.

    same: number of steps whose losses are to be the same; later ones are to be finite.
    """
    if [(step.epoch, step.step) for step in report.steps] != [(step.epoch, step.step) for step in whole.steps]:
        raise AssertionError(f"{what}: {len(report.steps)} steps instead of {len(whole.steps)}")
    for number, (step, expected) in enumerate(zip(report.steps, whole.steps, strict=True)):
        found, wanted = step.loss, expected.loss
        is_there = found is not None and wanted is not None and math.isfinite(found)
        differs = number < same and not step.cached and not math.isclose(found or 0.0, wanted or 0.0, rel_tol=SAME_LOSS)
        if not is_there or differs:
            raise AssertionError(f"{what}: the loss of step {step.step + 1} of epoch {step.epoch + 1} is {found} instead of {wanted}")
