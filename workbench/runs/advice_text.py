"""An adviser's answer as rows, points and sentences, the same for the terminal and for a notebook."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.runs.advice import Advice, by_reason

STAR = "* nothing else is as good in time, energy and memory, and better in one of them."
RIGHT = (0, 4, 5, 6, 7)
"""Columns of numbers."""


def columns(advice: Advice) -> tuple[str, ...]:
    """Return the columns of the table."""
    until = "run, s" if advice.score is None else f"to {advice.score:g}, s"
    return ("", "", "what", "layers on devices", "step, ms", until, "J", "MB")


def rows(advice: Advice) -> list[tuple[str, ...]]:
    """Return a row for each combination, best first."""
    return [
        (
            f"{number}",
            "" if choice.is_dominated else "*",
            choice.name,
            f"{choice.report.plan.partition()} on {choice.report.plan.grouping()}",
            _three_digits(1e3 * choice.step_s),
            "unknown" if choice.seconds is None else f"{choice.seconds:.1f}",
            "" if choice.joules is None else _three_digits(choice.joules),
            _three_digits(choice.memory_bytes / 1e6) if choice.memory_bytes else "",
        )
        for number, choice in enumerate(advice.choices, 1)
    ]


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def title(advice: Advice) -> str:
    """Return where the numbers come from."""
    return f"Simulated, {advice.costs} costs; {advice.spent_s:.1f} s"


def points(advice: Advice) -> list[tuple[str, float | None, float | None, int, bool]]:
    """Return the points of the picture (see plots.choices)."""
    return [
        (choice.name, choice.seconds, choice.joules, choice.memory_bytes, choice.is_dominated)
        for choice in advice.choices
    ]


def conclusion(advice: Advice) -> str:
    """Return which combination is best, and why."""
    best = advice.choices[0]
    if best.figure(advice.goal) is None:
        return "No measured curve says when one of these reaches the score. The order is that of the whole run's time."
    return f"Best for {advice.goal}: {best.name}. {advice.reason}"


def impossible(refused: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason why some combinations cannot run."""
    return [f"Not possible: {', '.join(names)}. {why}" for why, names in by_reason(refused).items()]
