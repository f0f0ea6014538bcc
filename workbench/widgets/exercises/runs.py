"""Checks of answers that a run's report decides."""

from __future__ import annotations

import math
from statistics import mean

from workbench import experiment
from workbench.core.errors import WorkbenchError
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.widgets.exercises.verdict import Verdict, number_verdict


def _epochs(report: Report) -> tuple[float, float]:
    """Return the seconds of the first epoch and of a cached one."""
    return report.epochs[0].seconds, mean(epoch.seconds for epoch in report.epochs if epoch.cached)


def check_speedup(answer: float | None, report: Report) -> Verdict:
    """How many times shorter is an epoch from the cache?"""
    first, cached = _epochs(report)
    return number_verdict(
        answer,
        first / cached,
        hint="Divide the first epoch's seconds by those of a later one; both are in the figure of the epoch times.",
        right=f"{first:.1f} s / {cached:.1f} s = {first / cached:.1f}.",
    )


def check_idlest(answer: str | None, report: Report, timeline: str = "first epoch, predicted") -> Verdict:
    """Which device computes for the smallest share of a first-epoch step?"""
    shown = report.timelines[timeline]
    hint = f"Look for the lane with the most grey in the Gantt chart '{timeline}'."
    if answer is None:
        return Verdict(None, hint)
    if answer not in shown.device_names:
        return Verdict(False, f"There is no device {answer!r}, only {', '.join(shown.device_names)}.")
    busy = {name: shown.busy_s(rank) for rank, name in enumerate(shown.device_names)}
    idlest = min(busy, key=busy.__getitem__)
    if math.isclose(busy[answer], busy[idlest], rel_tol=0.02, abs_tol=1e-9):
        return Verdict(True, f"{answer} computes for {busy[answer] / shown.makespan_s:.0%} of the step.")
    return Verdict(False, f"{answer} computes for {busy[answer] / shown.makespan_s:.0%} of the step; another one for less. {hint}")


def check_half_time(answer: int | None, report: Report) -> Verdict:
    """From how many epochs on does the cache save at least half of the time?"""
    first, cached = _epochs(report)
    if cached >= first / 2:
        return Verdict(None, "In this run a cached epoch takes more than half of the first: it never does. Train on more samples.")
    # first + (n - 1) cached <= n first / 2
    fewest = math.ceil((first - cached) / (first / 2 - cached) - 1e-9)
    hint = "With the cache n epochs take first + (n - 1) cached, without it n first. For which n is the one half of the other?"
    if answer is None:
        return Verdict(None, hint)
    if answer == fewest:
        with_cache = first + (fewest - 1) * cached
        return Verdict(True, f"{fewest} epochs take {with_cache:.1f} s with the cache and {fewest * first:.1f} s without.")
    return Verdict(False, f"Not {answer}. {hint}")


def check_faster_plan(plan: Plan | None, report: Report) -> Verdict:
    """Is the student's plan faster (simulated) than the planner's?  Close is good, too."""
    hint = "Write layers and groups of your own with fixed_plan; the groups name ranks, 0 is the first device."
    if plan is None:
        return Verdict(None, hint)
    try:
        mine, planned = experiment.sweep(report.job, report.cluster, {"mine": plan, "planner": report.plan}, "simulate", num_steps=4)
    except WorkbenchError as error:
        return Verdict(False, str(error))
    ratio = mine.predicted_s / planned.predicted_s
    said = f"A step takes {mine.predicted_s * 1e3:.0f} ms with yours, {planned.predicted_s * 1e3:.0f} ms with the planner's."
    if ratio < 1:
        return Verdict(
            True, f"{said} You beat the planner: its prices (Eq. 5-7) are approximations, and it keeps the devices in the cluster's order."
        )
    if ratio <= 1.2:
        return Verdict(True, f"{said} That is within 20 %.")
    return Verdict(False, f"{said} Get within 20 %: which device is the slowest of its stage, and what does it hold?")
