"""`workbench bench recovery`: the cost of a device that is lost, leaves, slows down or comes back, for every method
that trains.

With --soak, random faults over all methods instead: no run may hang, give a wrong result, or leave anything behind.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from workbench.core.catalogue import load_cluster
from workbench.core.device_faults import FaultSchedule, parse_faults
from workbench.core.errors import DeviceLostError
from workbench.core.job import Job
from workbench.core.report import Recovery, Report
from workbench.core.run_folder import scratch_folder
from workbench.core.serial import read_toml
from workbench.experiment import run
from workbench.methods.base import Event
from workbench.runtime.engines import default_pool
from workbench_studies.bench.frame import JOBS, Figures, Progress, jobs_of, require_words
from workbench_studies.bench.serving import REQUESTS_PER_S, serve_randomly, soak_cluster
from workbench_studies.random_faults import random_faults

CLUSTER, DEVICE, ROUNDS = "laptop-equal", 1, 3
SAME_LOSS = 1e-3
"""Relative tolerance of a loss: sums are computed in another order."""


FAULTS = {
    "kill": "kill:{device}@step{step}",
    "freeze": "freeze:{device}@step{step}",
    "leave": "leave:{device}@step{step}",
    "slow": "slow:{device}:4@step{step}",
    "return": "kill:{device}@step{step}; return:{device}@step{later}",
}


def words_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the words of jobs' names, such as 'pac_plus' and 'cached'."""
    return tuple(dict.fromkeys(word for name in names for word in name.split(", ")))


WORDS = (*words_of(jobs_of("recovery")), *FAULTS)


def bench(progress: Progress = print, *, only: Sequence[str] = (), rounds: int = ROUNDS, soak: int = 0) -> Figures:
    """Return the seconds of each recovery, on the emulated devices' clock: the medians of some runs, and the maximum.

    only: methods or kinds of faults, none is all.  soak: instead, so many short runs with random faults.  Raises
    ConfigError.
    """
    jobs = jobs_of("soak" if soak else "recovery")
    named = (*jobs, SERVING) if soak else (*jobs,)
    require_words(only, words_of(named) if soak else WORDS)
    methods = [name for name in named if set(only).intersection(words_of([name]))] or named
    if soak:
        return _soak(soak, methods, jobs, progress)
    step_of = read_toml(JOBS)["recovery"]["steps"]
    kinds = [kind for kind in FAULTS if kind in only] or list(FAULTS)
    points = [
        _point(method, jobs[method], step_of[method], kind, rounds, progress) for method in methods for kind in kinds
    ]
    return {"cluster": CLUSTER, "model": Job().model, "rounds": rounds, "points": points}


def _point(method: str, job: Job, step: int, kind: str, rounds: int, progress: Progress) -> Figures:
    cluster = load_cluster(CLUSTER)
    device = cluster.devices[DEVICE].name
    faults = FAULTS[kind].format(device=device, step=step, later=step + 4)
    recoveries: list[Recovery] = []
    valid = True
    for number in range(rounds):
        progress(f"{method}: {faults}, run {number + 1} of {rounds}")
        options = job.options | ({"adapt": True} if job.method == "p_rge" else {})
        report = _run(replace(job, seed=number, faults=faults, options=options), CLUSTER)
        valid = valid and report.valid
        recoveries += [recovery for recovery in report.recoveries if recovery.what == f"{kind} {device}"]
    for recovery in recoveries:
        parts = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in recovery.parts_s.items())
        progress(f"  {recovery.described} In parts: {parts}.")
    point = {"method": method, "fault": kind, "recovered": f"{len(recoveries)} of {rounds}"}
    if not recoveries:
        return point
    foreseen_s = [recovery.predicted_s for recovery in recoveries if recovery.predicted_s is not None]
    medians = ("noticed_s", "noticed_steps", "planned_s", "resumed_s")
    return {
        **point,
        **{name: median(getattr(recovery, name) for recovery in recoveries) for name in medians},
        "whole_s": median(recovery.seconds for recovery in recoveries),
        **({"simulated_s": median(foreseen_s)} if foreseen_s else {}),
        "longest_s": max(recovery.seconds for recovery in recoveries),
        "stood_still_s": median(recovery.stood_still_s for recovery in recoveries),
        "bound_s": median(recovery.step_s for recovery in recoveries),
        "repeated_steps": max(recovery.repeated for recovery in recoveries),
        "parts_s": {
            name: median(recovery.parts_s.get(name, 0.0) for recovery in recoveries)
            for name in dict.fromkeys(name for recovery in recoveries for name in recovery.parts_s)
        },
        "valid": valid,
    }


def _run(job: Job, cluster: str, progress: Callable[[Event], None] | None = None) -> Report:
    with scratch_folder() as folder:
        return run(job, load_cluster(cluster), workdir=folder / "run", progress=progress)


FOLLOWING = ("ringada", "confidant")
"""After a change these train on other data, or with weights of another age: their losses are those of an unbroken run
only before it.

The step in which a device dies may be done again.
"""
SERVED, SERVED_FAULTS_EVERY_S = 100, 2.0
SERVING = "galaxy_plus, serving"


def _soak(count: int, methods: Sequence[str], jobs: Mapping[str, Job], progress: Progress) -> Figures:
    """Do short runs with random faults; compare the results that do not depend on the devices with an undisturbed run.

    Raises AssertionError for a wrong result or leftovers.
    """
    before = set(Path(tempfile.gettempdir()).glob("workbench-*"))
    unbroken = {method: _run(jobs[method], CLUSTER) for method in methods if method != SERVING}
    tally = Counter(runs=0, faults=0, recoveries=0, runs_without_devices=0)
    for number in range(count):
        method = methods[number % len(methods)]
        tally["runs"] += 1
        if method == SERVING:
            _serve(number, tally)
            progress(f"{number + 1} of {count}, {method}")
            continue
        undisturbed = unbroken[method]
        faults = random_faults(
            undisturbed.cluster.world_size,
            len(undisturbed.steps),
            every=5.0,
            seed=number,
            unit="step",
            kinds=("slow", "kill", "freeze", "leave"),
        )
        job = replace(jobs[method], faults="; ".join(fault.text for fault in faults))
        tally["faults"] += len(faults)
        try:
            report = _run(job, CLUSTER)
        except DeviceLostError as error:
            progress(f"{number + 1} of {count}, {method}, {job.faults}: {error}")
            tally["runs_without_devices"] += 1
            continue
        tally["recoveries"] += len(report.recoveries)
        first = min((fault.start for fault in parse_faults(job.faults, undisturbed.cluster)), default=math.inf)
        _require_same(
            report,
            undisturbed,
            f"Run {number + 1}, {method}, '{job.faults}'",
            first - 1 if method in FOLLOWING else math.inf,
        )
        progress(f"{number + 1} of {count}, {method}, {job.faults or 'no fault'}: {len(report.recoveries)} recoveries")
    default_pool().stop()
    leftovers = set(Path(tempfile.gettempdir()).glob("workbench-*")) - before
    if leftovers:
        raise AssertionError(f"left behind: {', '.join(map(str, leftovers))}")
    return {**tally, "wrong": 0, "left_behind": 0}


def _serve(seed: int, tally: Counter[str]) -> None:
    """Serve a short stream with random faults.  Raises AssertionError for a lost or wrong answer, or leftovers."""
    faults = random_faults(soak_cluster().world_size, SERVED / REQUESTS_PER_S, every=SERVED_FAULTS_EVERY_S, seed=seed)
    result = serve_randomly(SERVED, seed=seed, faults=FaultSchedule(faults))
    tally.update(faults=len(faults), recoveries=len(result.report.events_of("switched")))
    if not result.is_clean:
        report = result.report
        raise AssertionError(
            f"Seed {seed}: {report.num_lost} answers lost, {report.num_wrong} wrong, left behind: {result.left_behind}"
        )


def _require_same(report: Report, undisturbed: Report, run_name: str, same: float) -> None:
    """Raise AssertionError if a step is missing or a loss differs; mini-batches from a cache follow the devices'
    shares.

    same: number of steps whose losses are to be the same; later ones are to be finite.
    """
    if [(step.epoch, step.step) for step in report.steps] != [(step.epoch, step.step) for step in undisturbed.steps]:
        raise AssertionError(f"{run_name}: {len(report.steps)} steps instead of {len(undisturbed.steps)}")
    for number, (step, expected) in enumerate(zip(report.steps, undisturbed.steps, strict=True)):
        loss, expected_loss = step.loss, expected.loss
        is_there = loss is not None and expected_loss is not None and math.isfinite(loss)
        differs = (
            number < same and not step.cached and not math.isclose(loss or 0.0, expected_loss or 0.0, rel_tol=SAME_LOSS)
        )
        if not is_there or differs:
            raise AssertionError(
                f"{run_name}: the loss of step {step.step + 1} of epoch {step.epoch + 1} is {loss} instead of "
                f"{expected_loss}"
            )
