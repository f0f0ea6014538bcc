"""Checks about devices, and about forward passes (P-RGE, sections 2 and 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from functools import wraps
from typing import Any, get_type_hints

from workbench.core.errors import WorkbenchError
from workbench_labs.course.verdict import Verdict, WrongAnswerError, require_number

BY_EYE = 0.10  # tolerance, as a share, of an answer read off a figure


def number_verdict(answer: float | None, expected: float, hint: str, right: str, tolerance: float = BY_EYE) -> Verdict:
    """Compare a number with the expected one; it may differ by a share of it."""
    if answer is None:
        return Verdict(None, hint)
    try:
        return Verdict(True, require_number(answer, expected, tolerance, right))
    except WrongAnswerError as error:
        return Verdict(False, f"{error} {hint}")


def exercise(hint: str) -> Callable[[Callable[..., tuple[bool, str]]], Callable[..., Verdict]]:
    """Return a decorator for a function that examines an answer and returns whether it is right, and why; it becomes a
    check.

    hint: what the check says before there is an answer, and after why an answer is wrong.  An answer that raises an
    error is wrong.
    """

    def decorate(examine: Callable[..., tuple[bool, str]]) -> Callable[..., Verdict]:
        wanted = next(iter(get_type_hints(examine).values()))

        @wraps(examine)
        def check(answer: Any, *given: Any, **named: Any) -> Verdict:
            if answer is None:
                return Verdict(None, hint)
            if isinstance(wanted, type) and is_dataclass(wanted) and not isinstance(answer, wanted):
                return Verdict(False, f"A {wanted.__name__} is asked for, this is {answer!r}. {hint}")
            try:
                passed, why = examine(answer, *given, **named)
            except (WorkbenchError, AttributeError, TypeError) as error:
                passed, why = False, str(error)
            return Verdict(passed, why if passed else f"{why} {hint}")

        return check

    return decorate
