"""Checks about training by forward passes (P-RGE, sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import ConfigError
from workbench.models.zeroth_order import StepLog
from workbench.plots.zeroth_order_roofline import Pass
from workbench.widgets.exercises.verdict import Verdict, number_verdict
from workbench.widgets.gradient_error import SlopeStudy
from workbench.widgets.query_problem import QueryProblem


def check_projected_gradient(answer: float | None, *, plus: float, minus: float, epsilon: float) -> Verdict:
    """What is g of a query whose two losses are known (Algorithm 1, line 10)?"""
    expected = (plus - minus) / (2 * epsilon)
    hint = "The two losses lie 2 epsilon apart, in units of z. Which one is subtracted?"
    right = f"({plus:g} - {minus:g}) / (2 x {epsilon:g}) = {expected:g}. Theta moves by -learning rate x g x z."
    return number_verdict(answer, expected, hint, right, 0.01)


def check_forward_passes(answer: int | None, *, queries: int, steps: int) -> Verdict:
    """How many forward passes does a whole training take?"""
    hint = "Every query asks on both sides of theta; every step asks all its queries."
    right = f"2 x {queries} x {steps} = {2 * queries * steps:,}, and no backward pass."
    return number_verdict(answer, 2 * queries * steps, hint, right, 0)


def check_queries_for_error(answer: int | None, *, dimension: int) -> Verdict:
    """From how many queries on is the estimate's error no longer than the gradient itself (on a plane)?"""
    hint = "The squared error is (d + 1) / q of the gradient's squared length. When is that 1?"
    right = f"d + 1 = {dimension + 1:,}. Nobody takes that many: thousands of poor steps add up, since their errors do not."
    return number_verdict(answer, dimension + 1, hint, right, 0.01)


def check_epsilon(answer: float | None, studies: Sequence[SlopeStudy]) -> Verdict:
    """Which epsilon of a study gives the slopes best?  Within a factor of two of the best deviation counts."""
    best = min(studies, key=lambda one: one.deviation)
    hint = "Too large, and the loss bends between the two points; too small, and their difference is rounding. Look for the lowest point."
    if answer is None:
        return Verdict(None, hint)
    chosen = [one for one in studies if isinstance(answer, int | float) and abs(one.epsilon - answer) <= 1e-9 * one.epsilon]
    if not chosen:
        return Verdict(False, f"{answer!r} is none of {', '.join(f'{one.epsilon:g}' for one in studies)}. {hint}")
    said = f"With {answer:g} slopes are off by {chosen[0].deviation:.2%}, with {best.epsilon:g} by {best.deviation:.2%}."
    return Verdict(chosen[0].deviation <= 2 * best.deviation + 1e-12, f"{said} {hint if chosen[0] is not best else ''}".strip())


def check_knee(answer: int | None, passes: Sequence[Pass]) -> Verdict:
    """Which measured number of parts is the largest that costs less than half of as many single passes?"""
    first = passes[0]
    cheap = [one.parts for one in passes if one.seconds < 0.5 * first.seconds * one.parts / first.parts]
    hint = "Compare the two lines of the figure: in one pass, and one after the other. 0 if no number of parts saves half."
    if answer is None:
        return Verdict(None, hint)
    expected = max(cheap, default=0)
    if answer == expected:
        return Verdict(
            True, f"{expected} parts in one pass cost less than half of {expected} passes." if expected else "Nothing saves half here."
        )
    return Verdict(False, f"Not {answer!r}. {hint}")


def check_travelling(answer: float | None, log: StepLog) -> Verdict:
    """How many bytes does a device need of the others' work to make a step (32-bit seeds and scalars)?"""
    queries = len(log.seeds)
    hint = "A seed and a scalar for each query, four bytes each. Is the noise sent?"
    right = f"{queries} x (4 + 4) = {log.nbytes}. Whoever knows seed and scalar knows the direction and how far."
    return number_verdict(answer, log.nbytes, hint, right, 0)


def check_division(answer: Sequence[int] | None, problem: QueryProblem, *, within: float = 0.02) -> Verdict:
    """Is a division of the queries as fast as the planner's?"""
    hint = "Take `divider.counts`. All wait for the slowest device: give it less."
    if answer is None:
        return Verdict(None, hint)
    try:
        problem.divided(tuple(answer))
        mine_s = problem.seconds(tuple(answer))
    except (ConfigError, TypeError) as error:
        return Verdict(False, f"{error} {hint}")
    best_s = problem.planned().total_s
    said = f"A step takes {mine_s * 1e3:.1f} ms with yours, {best_s * 1e3:.1f} ms with the planner's."
    return Verdict(mine_s <= best_s * (1 + within), said if mine_s <= best_s * (1 + within) else f"{said} {hint}")
