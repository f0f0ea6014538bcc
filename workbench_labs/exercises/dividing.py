"""Checks about pipelines and plans (PAC+, section V-A), and about single-shot inference (Galaxy+, section III)."""

from __future__ import annotations

import math
from statistics import mean

from workbench import experiment
from workbench.core.errors import did_you_mean
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench_labs.exercises.training import Verdict, exercise, number_verdict

_NONE_CACHED = Verdict(None, "No epoch of this run came from the cache. Train 2 epochs or more.")


def _epochs(report: Report) -> tuple[float, float] | None:
    """Return the seconds of the first epoch and of a cached one; None if no epoch was cached."""
    cached = [epoch.seconds for epoch in report.epochs if epoch.cached]
    return (report.epochs[0].seconds, mean(cached)) if cached else None


def check_speedup(answer: float | None, report: Report) -> Verdict:
    """How many times shorter is an epoch from the cache?"""
    if (seconds := _epochs(report)) is None:
        return _NONE_CACHED
    first, cached = seconds
    hint = "Divide the first epoch's seconds by those of a later one; both are in the figure of the epoch times."
    right = f"{first:.1f} s / {cached:.1f} s = {first / cached:.1f}."
    return number_verdict(answer, first / cached, hint, right)


@exercise("Look for the lane with the most grey in the Gantt chart 'first epoch, predicted'.")
def check_idlest(answer: str, report: Report) -> tuple[bool, str]:
    """Which device computes for the smallest share of a first-epoch step?"""
    shown = report.timelines["first epoch, predicted"]
    if answer not in shown.device_names:
        others = ", ".join(shown.device_names)
        return False, f"There is no device {answer!r}, only {others}. {did_you_mean(str(answer), shown.device_names)}"
    busy = {name: shown.busy_s(rank) for rank, name in enumerate(shown.device_names)}
    said, least_s = f"{answer} computes for {busy[answer] / shown.makespan_s:.0%} of the step", min(busy.values())
    if math.isclose(busy[answer], least_s, rel_tol=0.02, abs_tol=1e-9):
        return True, f"{said}."
    return False, f"{said}; another one for less."


def check_half_time(answer: int | None, report: Report) -> Verdict:
    """From how many epochs on does the cache save at least half of the time?"""
    if (seconds := _epochs(report)) is None:
        return _NONE_CACHED
    first, cached = seconds
    if cached >= first / 2:
        return Verdict(
            None, "In this run a cached epoch takes more than half of the first: it never does. Train on more samples."
        )
    # first + (n - 1) cached <= n first / 2
    fewest = math.ceil((first - cached) / (first / 2 - cached) - 1e-9)
    hint = (
        "With the cache n epochs take first + (n - 1) cached, without it n first. For which n is the one half of the "
        "other?"
    )
    right = (
        f"{fewest} epochs take {first + (fewest - 1) * cached:.1f} s with the cache and {fewest * first:.1f} s without."
    )
    return number_verdict(answer, fewest, hint, right, 0)


CLOSE_ENOUGH = 1.1
"""A plan of one's own may take so many times as long as the planner's: that one was improved by simulation."""


@exercise(
    "Make a plan with by_hand (rank 0 is the first device). Which is the slowest of its stage, and what does it hold?"
)
def check_faster_plan(plan: Plan, report: Report) -> tuple[bool, str]:
    """Is the student's plan faster (simulated) than the planner's?  Another one that is close also passes."""
    if plan.stages == report.plan.stages:
        return False, "This is the planner's own plan. Make another one."
    mine, planned = experiment.sweep(
        report.job, report.cluster, {"mine": plan, "planner": report.plan}, "simulate", num_steps=4
    )
    ratio = mine.predicted_s / planned.predicted_s
    said = (
        f"A step takes {mine.predicted_s * 1e3:.0f} ms with yours, {planned.predicted_s * 1e3:.0f} ms with the "
        "planner's."
    )
    if ratio >= 1:
        within = f"within {CLOSE_ENOUGH - 1:.0%} of it"
        close = f"A plan of your own {within} counts as right" if ratio <= CLOSE_ENOUGH else f"Get {within}"
        return (
            ratio <= CLOSE_ENOUGH,
            f"{said} You did not beat the planner: yours takes {ratio - 1:.0%} longer. {close}.",
        )
    why = "its prices (Eq. 5-7) are approximations, and it keeps the devices in the cluster's order"
    return True, f"{said} You beat the planner: {why}."
