"""Checks about single-shot inference on several devices (Galaxy+, section III)."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.errors import PlanError, WorkbenchError
from workbench.core.inference import InferencePlan, StackShape
from workbench.planners.galaxy_plus import replan
from workbench.plots.layer_cut import sent_bytes
from workbench.widgets.exercises.verdict import Verdict, number_verdict
from workbench.widgets.inference_problem import InferenceProblem

MOST_SLOWER = 64.0


def check_travelling_bytes(answer: float | None, plan: InferencePlan, shape: StackShape, *, length: int, scheme: int) -> Verdict:
    """How many bytes travel for one layer, all devices together (Table II)?"""
    expected = sum(sent_bytes(plan, shape, length=length, scheme=scheme))
    size, token = plan.num_positions, shape.hidden_bytes
    collectives = 4 if scheme == 1 else 2
    hint = f"A ring collective takes every token ({token} bytes) over {size - 1} links. Scheme 1 has four of them, scheme 2 two."
    right = f"{collectives} x {size - 1} x {length} tokens x {token} bytes = {expected / 1e6:.2f} MB."
    return number_verdict(answer, expected, hint, right, 0.02)


def check_ring_time(answer_s: float | None, *, num_devices: int, product_s: float, transfer_s: float, overlapped: bool) -> Verdict:
    """How long do a ring all-gather and the product behind it take, with equal tiles (Fig. 9)?"""
    together = num_devices * product_s
    if overlapped:
        expected = (num_devices - 1) * max(product_s, transfer_s) + product_s
        hint = "While a tile is multiplied the next one is under way. The last product hides no transfer."
        right = f"({num_devices} - 1) x max({product_s:g}, {transfer_s:g}) + {product_s:g} = {expected:g} s."
    else:
        expected = (num_devices - 1) * transfer_s + together
        hint = "All tiles but one's own must have come before the first product begins."
        right = f"({num_devices} - 1) x {transfer_s:g} + {num_devices} x {product_s:g} = {expected:g} s."
    return number_verdict(answer_s, expected, hint, right, 0.01)


def check_most_scheme_2(answer: int | None, problem: InferenceProblem, plan: InferencePlan) -> Verdict:
    """How many layers can be in scheme 2 before a device is out of memory (Algorithm 1, lines 18-26)?"""
    layers = problem.profile.num_layers
    hint = "Move the slider until the budget is exceeded, then one back."
    if answer is None:
        return Verdict(None, hint)
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer <= layers:
        return Verdict(False, f"A number of layers from 0 to {layers} is asked for, this is {answer!r}. {hint}")
    fits = problem.refusal(_first_in_scheme_2(problem, plan, answer)) is None
    one_more = answer < layers and problem.refusal(_first_in_scheme_2(problem, plan, answer + 1)) is None
    if fits and not one_more:
        return Verdict(True, f"[{layers - answer}, {answer}], as the paper writes it.")
    return Verdict(False, f"{answer} {'leave' if fits else 'do not fit; they leave no'} room for another. {hint}")


def check_faster_inference(answer: InferencePlan | None, problem: InferenceProblem, planned: InferencePlan) -> Verdict:
    """Does the student's plan fit, and is its simulated latency below the planner's?"""
    hint = "Take `editor.plan`, or dataclasses.replace(plan, units=..., shares=...) of a planner's plan."
    if answer is None:
        return Verdict(None, hint)
    try:
        refusal, mine_s, planned_s = problem.refusal(answer), problem.seconds(answer), problem.seconds(planned)
    except (WorkbenchError, AttributeError, TypeError) as error:
        return Verdict(False, f"{error} {hint}")
    if refusal is not None:
        return Verdict(False, str(refusal))
    said = f"A sequence takes {mine_s * 1e3:.1f} ms with yours, {planned_s * 1e3:.1f} ms with the planner's."
    if mine_s < planned_s * (1 - 1e-9):
        return Verdict(True, f"{said} You beat it.")
    return Verdict(False, f"{said} Which device does the others wait for? Are heads, columns and tokens all in proportion?")


def break_even(problem: InferenceProblem, plan: InferencePlan, rank: int) -> float:
    """Return how many times slower a device must become until a plan without it is as fast as the plan that still waits for it."""
    without = problem.seconds(replan(plan, problem.profile, problem.cluster, length=problem.length, excluded=(rank,), price=problem.prices))
    low, high = 1.0, MOST_SLOWER
    while high / low > 1.01:
        factor = (low * high) ** 0.5
        slow = replace(problem, profile=problem.profile.slowed(rank, factor))
        low, high = (factor, high) if slow.seconds(plan) < without else (low, factor)
    return low


def check_break_even(answer: float | None, problem: InferenceProblem, plan: InferencePlan, device: str) -> Verdict:
    """From how many times slower on is it better to leave a device out than to wait for it?"""
    names = [one.name for one in problem.cluster.devices]
    hint = f"Let {device} become slower, little by little, and compare waiting ('nothing') with leaving it out, once both have settled."
    if answer is None:
        return Verdict(None, hint)
    try:
        expected = break_even(problem, plan, names.index(device))
    except PlanError as error:
        return Verdict(None, f"The others cannot do without it: {error}")
    return number_verdict(answer, expected, hint, f"From {expected:.1f} times slower on.", 0.2)


def _first_in_scheme_2(problem: InferenceProblem, plan: InferencePlan, count: int) -> InferencePlan:
    return problem.with_schemes(plan, [2] * count + [1] * (problem.profile.num_layers - count))
