"""`workbench bench recovery`: the cost of a device that is lost, leaves, slows down or comes back, for every method that trains.

With --soak, random faults over all methods instead: no run may hang, give a wrong result, or leave anything behind.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from workbench.bench.frame import Progress
from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import random_faults
from workbench.core.errors import ConfigError, DeviceLostError, did_you_mean
from workbench.core.job import Job
from workbench.core.report import Recovery, Report
from workbench.experiment import run
from workbench.methods.base import Event
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
    known = (*CASES, *FAULTS)
    for word in only:
        if not any(word in name for name in known):
            asked = f"Only '{word}' of the benchmark was asked for."
            raise ConfigError(asked, f"There are {', '.join(known)}.", did_you_mean(word, known))
    methods = [name for name in CASES if any(word in name for word in only)] or list(CASES)
    if soak:
        return _soak(soak, [name for name in methods if name in SOAKED], progress)
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


TINY = {"model": "tiny-bert", "train_samples": 64, "validation_samples": 8, "test_samples": 8, "batch_size": 8, "micro_batches": 4}
SOAKED = {
    "pac_plus": Job(epochs=3, **TINY),  # type: ignore[arg-type]
    "fine_tuning, lora": Job(method="fine_tuning", epochs=3, options={"technique": "lora"}, **TINY),  # type: ignore[arg-type]
    "p_rge": Job(method="p_rge", epochs=1, options={"steps": 24, "after_loss": "repeat"}, **TINY | {"micro_batches": 1}),  # type: ignore[arg-type]
}


def _soak(count: int, methods: Sequence[str], progress: Progress) -> dict[str, Any]:
    """Do short runs with random faults; compare the results that do not depend on the devices with an undisturbed run.

    Raises ConfigError if no such method was named, AssertionError for a wrong result or leftovers.
    """
    if not methods:
        raise ConfigError("A soak of other methods was asked for.", f"There are {', '.join(SOAKED)}.", "Name one of them, or none for all.")
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    unbroken = {method: _run(SOAKED[method], CLUSTER) for method in methods}
    tally = {"runs": 0, "faults": 0, "recoveries": 0, "runs_without_devices": 0}
    for number in range(count):
        method = methods[number % len(methods)]
        whole = unbroken[method]
        faults = random_faults(
            whole.cluster.world_size, len(whole.steps), every=8.0, seed=number, unit="step", kinds=("slow", "kill", "freeze", "leave")
        )
        job = replace(SOAKED[method], faults="; ".join(fault.text for fault in faults))
        tally["runs"] += 1
        tally["faults"] += len(faults)
        try:
            report = _run(job, CLUSTER)
        except DeviceLostError as error:
            progress(f"{number + 1} of {count}, {method}, {job.faults}: {error}")
            tally["runs_without_devices"] += 1
            continue
        tally["recoveries"] += len(report.recoveries)
        _require_same(report, whole, f"Run {number + 1}, {method}, '{job.faults}'")
        progress(f"{number + 1} of {count}, {method}, {job.faults or 'no fault'}: {len(report.recoveries)} recoveries")
    default_pool().stop()
    left = set(Path(tempfile.gettempdir()).glob("workbench-*")) - before
    if left:
        raise AssertionError(f"left behind: {', '.join(map(str, left))}")
    return tally | {"wrong": 0, "left_behind": 0}


def _require_same(report: Report, whole: Report, what: str) -> None:
    """Raise AssertionError if a step is missing or a loss differs; mini-batches from a cache follow the devices' shares."""
    if [(step.epoch, step.step) for step in report.steps] != [(step.epoch, step.step) for step in whole.steps]:
        raise AssertionError(f"{what}: {len(report.steps)} steps instead of {len(whole.steps)}")
    for step, expected in zip(report.steps, whole.steps, strict=True):
        found, wanted = step.loss, expected.loss
        same = found is not None and wanted is not None and math.isfinite(found)
        if not same or not (step.cached or math.isclose(found or 0.0, wanted or 0.0, rel_tol=SAME_LOSS)):
            raise AssertionError(f"{what}: the loss of step {step.step + 1} of epoch {step.epoch + 1} is {found} instead of {wanted}")
