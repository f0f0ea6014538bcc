"""Checks about pipelines and plans (PAC+, section V-A)."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import WorkbenchError
from workbench.core.plan import Plan
from workbench.widgets.exercises.verdict import Verdict, number_verdict
from workbench.widgets.planning import Comparison, PlanningProblem


def check_live_contexts(answer: Sequence[int] | None, *, num_stages: int, num_micro_batches: int) -> Verdict:
    """How many contexts does each stage of a 1F1B pipeline keep at most?"""
    hint = "Count, for each stage, the forwards before its first backward. The last stage goes back at once."
    if answer is None:
        return Verdict(None, hint)
    expected = [min(num_stages - stage, num_micro_batches) for stage in range(num_stages)]
    if list(answer) == expected:
        return Verdict(True, f"Stage s of p keeps min(p - s, M) contexts: {expected}.")
    if len(list(answer)) != num_stages:
        return Verdict(False, f"One number for each of the {num_stages} stages is asked for. {hint}")
    wrong = next(stage for stage, (mine, right) in enumerate(zip(answer, expected, strict=True)) if mine != right)
    return Verdict(False, f"Stage {wrong} is the first that differs. {hint}")


def check_pipeline_time(answer_s: float | None, *, num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float) -> Verdict:
    """How long does 1F1B take on equal stages and free links?"""
    expected = (num_micro_batches + num_stages - 1) * (forward_s + backward_s)
    return number_verdict(
        answer_s,
        expected,
        tolerance=0.01,
        hint="Every micro-batch costs one forward and one backward; filling and draining the pipeline costs p - 1 of them more.",
        right=f"(M + p - 1) (f + b) = ({num_micro_batches} + {num_stages} - 1) x {forward_s + backward_s:g} s = {expected:g} s.",
    )


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
    return number_verdict(
        answer_bytes,
        need,
        tolerance=0.02,
        hint=f"The table of needs has a row for {device}; 1 MB is 1e6 bytes.",
        right=f"{need / 1e6:.0f} MB.",
    )


def check_bubble(answer: float | None, *, num_stages: int, num_micro_batches: int) -> Verdict:
    """Which share of the time does a device of a balanced pipeline wait?"""
    expected = (num_stages - 1) / (num_micro_batches + num_stages - 1)
    return number_verdict(
        answer,
        expected,
        tolerance=0.02,
        hint="A mini-batch takes M + p - 1 turns of forward and backward; a device works in M of them.",
        right=f"(p - 1) / (M + p - 1) = {num_stages - 1} / {num_micro_batches + num_stages - 1} = {expected:.0%}.",
    )
