"""Checks about pipelines and plans (PAC+, section V-A), and of answers that a run's report decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean

from workbench import experiment
from workbench.core.errors import WorkbenchError
from workbench.core.plan import Plan
from workbench.core.report import Report
from workbench.widgets.exercises.verdict import Verdict, number_verdict
from workbench.widgets.planning import Comparison, PlanningProblem


def check_pipeline_time(answer_s: float | None, *, num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float) -> Verdict:
    """How long does 1F1B take on equal stages and free links?"""
    expected = (num_micro_batches + num_stages - 1) * (forward_s + backward_s)
    hint = "Every micro-batch costs one forward and one backward; filling and draining the pipeline costs p - 1 of them more."
    right = f"(M + p - 1) (f + b) = ({num_micro_batches} + {num_stages} - 1) x {forward_s + backward_s:g} s = {expected:g} s."
    return number_verdict(answer_s, expected, hint, right, 0.01)


def check_grouping(answer: Sequence[int] | str | None, made: Comparison) -> Verdict:
    """Which device groups does the planner choose, such as [2, 1, 1] or '[2-1-1]' (Fig. 17)?"""
    hint = "Fewest stages whose weights fit come first: every stage more is a boundary to cross and a device that waits."
    if answer is None:
        return Verdict(None, hint)
    if made.plan is None:
        return Verdict(answer == "OOM", f"Nothing fits: answer 'OOM'. {made.why}")
    mine = answer if isinstance(answer, str) else "[" + "-".join(str(count) for count in answer) + "]"
    if mine == made.plan.grouping():
        return Verdict(True, f"{mine}, with {made.plan.partition()} layers: {made.samples_per_s:.3g} samples/s.")
    return Verdict(False, f"Not {mine}. {hint}")


def check_faster_split(answer: Plan | None, problem: PlanningProblem, planned: Plan, *, by: float = 0.0) -> Verdict:
    """Does the student's plan fit, and is its simulated step shorter than the planner's (by a share of it)?"""
    hint = "Take `editor.plan` once the editor shows a split that you like."
    if answer is None:
        return Verdict(None, hint)
    try:
        refusals = problem.refusals(answer)
        mine_s, planned_s = problem.step_s(answer), problem.step_s(planned)
    except (WorkbenchError, AttributeError) as error:
        return Verdict(False, f"{error} {hint}")
    if refusals:
        return Verdict(False, str(refusals[0]))
    said = f"A step takes {mine_s * 1e3:.0f} ms with yours, {planned_s * 1e3:.0f} ms with the planner's {planned.partition()}."
    if mine_s < planned_s * (1 - by):
        return Verdict(True, f"{said} You beat it.")
    return Verdict(False, f"{said} Which device is busy all the time, and which waits?")


def check_memory_floor(answer_bytes: float | None, problem: PlanningProblem, made: Plan, device: str) -> Verdict:
    """How many bytes must a device have at least, so that a plan still fits?"""
    names = [one.name for one in problem.cluster.devices]
    need = problem.needs(made)[names.index(device)].total_bytes
    hint = f"The table of needs has a row for {device}; 1 MB is 1e6 bytes."
    right = f"{need / 1e6:.0f} MB."
    return number_verdict(answer_bytes, need, hint, right, 0.02)


def check_bubble(answer: float | None, *, num_stages: int, num_micro_batches: int) -> Verdict:
    """Which share of the time does a device of a balanced pipeline wait?"""
    expected = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    hint = "A mini-batch takes M + p - 1 turns of forward and backward; a device works in M of them."
    right = f"(p - 1) / (M + p - 1) = {num_stages - 1} / {num_micro_batches + num_stages - 1} = {expected:.0%}."
    return number_verdict(answer, expected, hint, right, 0.02)


def _epochs(report: Report) -> tuple[float, float]:
    """Return the seconds of the first epoch and of a cached one."""
    return report.epochs[0].seconds, mean(epoch.seconds for epoch in report.epochs if epoch.cached)


def check_speedup(answer: float | None, report: Report) -> Verdict:
    """How many times shorter is an epoch from the cache?"""
    first, cached = _epochs(report)
    hint = "Divide the first epoch's seconds by those of a later one; both are in the figure of the epoch times."
    right = f"{first:.1f} s / {cached:.1f} s = {first / cached:.1f}."
    return number_verdict(answer, first / cached, hint, right)


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
