"""Functions for several judges: read lists of numbers, compare them, and try every division."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any, TypeVar

from workbench.core.costs import Costs
from workbench.core.errors import ScheduleError
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.core.timeline import Timeline
from workbench.simulator import simulate
from workbench.widgets.tables import Table
from workbench_labs.course.verdict import Exercise, Numbers, WrongAnswerError, comparison, number_of, require_list

Choice = TypeVar("Choice")
Function = Callable[..., Any]
"""A student's."""
CLOSE = 1e-5
"""Float32 is precise enough: so much, or this share of a value, may differ."""


def code_exercise(*, judge: Callable[[Any, Random], str], **texts: Any) -> Exercise:
    """Return an exercise whose answer is a function, which is tried on random cases.

    judge: (function, generator of the cases) -> what to say of a right function.  Raises WrongAnswerError.
    """

    def judge_seed(answer: Any, numbers: Numbers) -> str:
        return judge(answer, Random(numbers["seed"]))

    return Exercise(draw=lambda draws: {"seed": draws.getrandbits(32)}, judge=judge_seed, is_code=True, **texts)


def numbers_of(answer: Any, subject: str, length: int) -> list[float]:
    """Return an answer as a list of numbers.  Raises WrongAnswerError."""
    return [number_of(value) for value in require_list(answer, subject, length)]


def counts_of(answer: Any, subject: str, length: int, *, total: int, least: int = 0) -> tuple[int, ...]:
    """Return an answer as whole numbers that are `total` together, each at least `least`.  Raises WrongAnswerError."""
    numbers = numbers_of(answer, subject, length)
    if any(number != int(number) or number < least for number in numbers) or sum(numbers) != total:
        shown = ", ".join(f"{number:g}" for number in numbers)
        raise WrongAnswerError(f"{subject} has whole numbers from {least} on, {total} in all; this is [{shown}].")
    return tuple(map(int, numbers))


def require_close(
    answer: Any,
    expected: Sequence[float],
    subject: str,
    case: str,
    *,
    right: str = "right",
    given: Mapping[str, Iterable[object]] | None = None,
    absolute: float = CLOSE,
) -> list[float]:
    """Return an answer's numbers.  Raises WrongAnswerError, with both as a table, unless they are the expected ones.

    case: a description of the case.  right: the heading of the expected numbers.  given: the columns before them, by
    heading; None: the places from 0.
    """
    answered = numbers_of(answer, subject, len(expected))
    for place, (value, true) in enumerate(zip(answered, expected, strict=True)):
        if not math.isclose(value, true, rel_tol=CLOSE, abs_tol=absolute):
            given = {"entry": range(len(expected))} if given is None else given
            both = ([f"{number:.6g}" for number in numbers] for numbers in (answered, expected))
            table = comparison(subject, (*given, "yours", right), zip(*given.values(), *both, strict=True))
            raise WrongAnswerError(f"{case} Entry {place} is {true:.6g}, yours is {value:.6g}.", table)
    return answered


def require_best(
    own: Choice,
    possible: Iterable[Choice],
    seconds: Callable[[Choice], float],
    case: str,
    details: Table,
    unit: str = "s",
) -> Choice:
    """Return the fastest of all choices.  Raises WrongAnswerError if a student's own is slower.

    case: the subject of the message, such as 'With [1, 2] a step'.
    """
    best = min(possible, key=seconds)
    if seconds(own) > seconds(best) + CLOSE:
        raise WrongAnswerError(f"{case} takes {seconds(own):g} {unit}; {seconds(best):g} {unit} are possible.", details)
    return best


def is_none(answer: Any, possible: Sequence[Any], case: str, details: Table | None = None) -> bool:
    """Return whether None was answered because nothing is possible.  Raises WrongAnswerError if only one of both holds.

    possible: the right answers.
    """
    if (answer is None) != (not possible):
        why = f"{possible[0]} is possible" if possible else "nothing is possible, so None is asked for"
        raise WrongAnswerError(f"{case}: {why}; your function returned {answer!r:.80}.", details)
    return answer is None


def in_virtual_time(schedule: Schedule, costs: Costs) -> Timeline:
    """Return a student's schedule, simulated.  Raises WrongAnswerError if its operations wait for each other."""
    names = tuple(f"device {rank}" for rank in range(schedule.world_size))
    try:
        return simulate(Program(schedule=schedule, costs=costs, devices=names), memory=False)
    except ScheduleError as error:
        raise WrongAnswerError(f"The operations wait for each other for ever. {error}") from error


def every_division(total: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to divide whole things among `size`, of which some may get none."""
    for bars in combinations(range(total + size - 1), size - 1):
        yield tuple(stop - start - 1 for start, stop in pairwise((-1, *bars, total + size - 1)))


def within(needs: Iterable[float], budgets: Iterable[float]) -> bool:
    """Return whether no device needs more than it has."""
    return all(need <= budget for need, budget in zip(needs, budgets, strict=True))


def spans_of(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first layer of each device, and the one after its last."""
    first = 0
    for count in counts:
        yield first, first + count
        first += count
