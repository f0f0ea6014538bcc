"""What a check says of an answer, and exercises: how their numbers are drawn and their answers are judged."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from random import Random
from typing import Any

from markupsafe import Markup

from workbench.widgets.tables import Table
from workbench_labs.course import interruption
from workbench_labs.course.interruption import at_most

LONGEST_MESSAGE = 2000
"""Characters of a message: an answer's error may have any length."""
Numbers = dict[str, Any]
"""The numbers of an exercise for one student."""
GREEN, RED, GREY = "#007A57", "#B04A00", "#4D4D4D"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check.  passed: None as long as there is no answer.  seconds: how long the check took.

    details: the first case that fails, as a table.
    """

    passed: bool | None
    message: str
    points: float = field(default=0.0, kw_only=True)
    seconds: float = field(default=0.0, kw_only=True)
    details: Table | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        result = {None: "Not answered yet.", True: "Right.", False: "Not yet."}[self.passed]
        return "\n".join([f"{result} {self.message}", *([str(self.details)] if self.details is not None else [])])

    __repr__ = __str__

    def require(self) -> Verdict:
        """Return it if the answer is right.  Raises AssertionError otherwise, which nbgrader takes for a failure."""
        if not self.passed:
            raise AssertionError(str(self))
        return self

    def _repr_html_(self) -> Markup:
        colour = {None: GREY, True: GREEN, False: RED}[self.passed]
        details = self.details._repr_html_() if self.details is not None else ""
        text = str(replace(self, details=None))
        style = f"border-left:4px solid {colour};padding:4px 10px"
        return Markup("<div role='status' style='{}'>{}</div>{}").format(style, text, details)


class WrongAnswerError(Exception):
    """An answer is wrong.  details: the case that shows it."""

    def __init__(self, message: str, details: Table | None = None) -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """One exercise of a lab.

    question: Markdown.  It may name the numbers that `draw` returns for a student in braces.
    judge: (answer, numbers) -> what to say of a right answer.  Raises WrongAnswerError.
    hints: three steps, each shown on demand.  is_code: the answer is a function, which is called with numbers,
    texts and lists of them, and returns such; so it can run in a separate process.
    stand_in: the workbench's own answer, with which a lab goes on until a student's is right; None: the lab needs none.
    """

    name: str
    question: str
    points: int
    hints: tuple[str, str, str]
    draw: Callable[[Random], Numbers]
    judge: Callable[[Any, Numbers], str]
    is_code: bool = False
    stand_in: Callable[..., Any] | None = None

    def numbers(self, seed: str) -> Numbers:
        """Return the numbers of one student: the same for the same seed, on every machine."""
        return copy.deepcopy(_drawn(self, seed))

    def question_for(self, seed: str) -> str:
        """Return the question with the student's numbers."""
        return self.question.format(**self.numbers(seed))

    def check(self, answer: Any, seed: str) -> Verdict:
        """Judge an answer.  One that raises an error, or takes too long, is wrong; one that is not there is not
        answered.
        """
        if answer is None:
            return Verdict(None, "Give an answer.")
        began = time.perf_counter()
        details = None

        def on_copies(*arguments: Any) -> Any:
            return answer(*copy.deepcopy(arguments))  # an answer may change its arguments, never the judge's

        try:
            with at_most(interruption.SECONDS):
                message = self.judge(on_copies if self.is_code else answer, self.numbers(seed))
            passed, points = True, float(self.points)
        except NotImplementedError:
            return Verdict(None, "The function still raises NotImplementedError: write it.")
        except WrongAnswerError as error:
            passed, points, message, details = False, 0.0, str(error), error.details
        except interruption.InterruptedAnswerError as error:
            passed, points, message = False, 0.0, str(error)
        except Exception as error:  # the answer is the student's own code
            passed, points = False, 0.0
            message = f"It stops with {type(error).__name__}: {error}"
        return Verdict(passed, in_short(message), points=points, seconds=time.perf_counter() - began, details=details)


@lru_cache(maxsize=100)
def _drawn(exercise: Exercise, seed: str) -> Numbers:
    """Return a student's numbers.  Those of some exercises are drawn until a simulation shows that they suit it."""
    return exercise.draw(Random(f"{seed}/{exercise.name}"))


def is_right(exercises: Iterable[Exercise], name: str, answer: Any) -> bool:
    """Return whether an answer to one of some exercises is right, with numbers of no student."""
    return bool(_named(exercises, name).check(answer, "is it right").passed)


def usable(exercises: Iterable[Exercise], name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a student's function, or the exercise's stand-in as long as it is not written or not right."""
    if is_right(exercises, name, answer):
        return answer
    stand_in = _named(exercises, name).stand_in
    assert stand_in is not None, f"nothing stands in for {name}"
    return stand_in


def _named(exercises: Iterable[Exercise], name: str) -> Exercise:
    [exercise] = [candidate for candidate in exercises if candidate.name == name]
    return exercise


def in_short(message: str) -> str:
    """Return a message on one line and not too long: it may hold the words of an answer's error."""
    return "".join(character if character.isprintable() else " " for character in message[:LONGEST_MESSAGE])


def number_of(answer: Any) -> float:
    """Return an answer as a number: Python's, a fraction, or a NumPy or torch scalar.  Raises WrongAnswerError."""
    value = answer.item() if hasattr(answer, "item") and not isinstance(answer, Real | Fraction) else answer
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongAnswerError(f"A number is asked for; this is {answer!r:.80}.{_without_return(answer)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WrongAnswerError("A finite number is asked for.")
    return number


def _without_return(answer: Any) -> str:
    return "" if answer is not None else " Does your function end with return?"


def whole_number(answer: Any, least: int, most: int, subject: str) -> int:
    """Return an answer as a whole number in a range.  Raises WrongAnswerError."""
    number = number_of(answer)
    if number != int(number) or not least <= number <= most:
        raise WrongAnswerError(f"{subject} is a whole number from {least} to {most}; this is {number:g}.")
    return int(number)


def require_number(answer: Any, expected: float, tolerance: float, right: str) -> str:
    """Return `right` if the answer is the number, which may differ by a share of it.  Raises WrongAnswerError."""
    if abs(number_of(answer) - expected) > tolerance * abs(expected):
        raise WrongAnswerError(f"{number_of(answer):g} is not it.")
    return right


def require_list(answer: Any, subject: str, length: int | None = None) -> list[Any]:
    """Return a list, tuple, or NumPy or torch array as a list.  length: None takes any.  Raises WrongAnswerError."""
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if not isinstance(answer, list | tuple):
        raise WrongAnswerError(f"{subject} is a list; this is {answer!r:.80}.{_without_return(answer)}")
    if length is not None and len(answer) != length:
        raise WrongAnswerError(f"{subject} has {length} entries; this has {len(answer)}.")
    return list(answer)


def comparison(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a case as a table."""
    return Table(tuple(columns), [tuple(row) for row in rows], title=title)
