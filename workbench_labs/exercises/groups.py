"""Lab 'Cut for unequal devices': a table of the dynamic programme, and the samples of a group of devices (PAC+, section
V-A, Eq. 4).  The judge tries everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from workbench_labs.course.verdict import Exercise, Numbers, WrongAnswerError, comparison
from workbench_labs.exercises.judging import (
    Function,
    code_exercise,
    counts_of,
    every_division,
    numbers_of,
    require_best,
)

CASES = 50
MOST_SAMPLES = 8


def slowest_s(counts: Sequence[int], sample_s: Sequence[float]) -> float:
    """Return the seconds until the last device of a group has finished its samples."""
    return max(count * seconds for count, seconds in zip(counts, sample_s, strict=True))


def best_division(samples: int, sample_s: Sequence[float]) -> tuple[int, ...]:
    """Return the division whose last device finishes first, of all divisions."""
    return min(every_division(samples, len(sample_s)), key=partial(slowest_s, sample_s=sample_s))


def judge_divide(answer: Function, draws: Random) -> str:
    """Compare the slowest device of a student's division with that of the best of all."""
    for _ in range(CASES):
        samples = draws.randint(1, MOST_SAMPLES)
        sample_s = [draws.choice([1, 1.5, 2, 3, 4, 8]) for _ in range(draws.randint(1, 4))]
        size = len(sample_s)
        counts = counts_of(answer(samples, sample_s), "A division", size, total=samples)
        rows = [
            (device, seconds, count, f"{count * seconds:g}")
            for device, (seconds, count) in enumerate(zip(sample_s, counts, strict=True))
        ]
        columns = ("device", "seconds a sample", "your samples", "its seconds")
        table = comparison("Your division", columns, rows)
        case = f"{samples} samples, {sample_s} s each: with yours the last one"
        require_best(counts, every_division(samples, size), partial(slowest_s, sample_s=sample_s), case, table)
    return f"No division is faster, in {CASES} random groups."


def judge_trace(answer: Any, numbers: Numbers) -> str:
    """Compare a row of the table with the best of all cuts of each beginning."""
    first, second = numbers["first"], numbers["second"]
    expected = [
        min(max(sum(first[:cut]), sum(second[cut:stop])) for cut in range(1, stop)) for stop in range(2, len(first) + 1)
    ]
    row = numbers_of(answer, "The row", len(expected))
    wrong = [place + 2 for place, (value, best) in enumerate(zip(row, expected, strict=True)) if value != best]
    if wrong:
        raise WrongAnswerError(
            f"best[2][n] is not right for n = {', '.join(map(str, wrong))}. Try every place to cut these layers."
        )
    return f"best[2] is {expected}; the last one is the answer for all layers."


def _two_devices(draws: Random) -> Numbers:
    first = [draws.randint(1, 5) for _ in range(5)]
    return {"first": first, "second": [draws.choice([2, 3]) * seconds for seconds in first]}


TRACE = Exercise(
    name="trace",
    question="""**Fill a row by hand** (4 points). Five layers take {first} s on device 0 and {second} s on device 1. \
`best[2][n]` is the slowest stage of the best cut of the first *n* layers over both devices, one layer or more for \
each. Give the list `best[2][2]`, `best[2][3]`, `best[2][4]`, `best[2][5]`.""",
    points=4,
    hints=(
        "For n = 2 there is one cut: layer 0 on device 0, layer 1 on device 1. The slower one counts.",
        "For n = 3 there are two cuts: k = 1 and k = 2. Take the smaller of the two maxima.",
        "max(sum of the first k on device 0, sum of layers k to n on device 1), for each k from 1 to n - 1.",
    ),
    draw=_two_devices,
    judge=judge_trace,
)
DIVIDE = code_exercise(
    name="divide",
    question="""**Divide a group's samples** (6 points). `divide(samples, sample_s)` gets a number of samples and the \
seconds that each device takes for one. It returns whole samples for each device, `samples` in all, none allowed, so \
that the last one finishes as early as possible.""",
    points=6,
    hints=(
        "Give the samples away one by one. Who should get the next one?",
        "The device that would have finished it first: the least (count + 1) * seconds.",
        "`min(range(len(sample_s)), key=lambda d: (counts[d] + 1) * sample_s[d])`, as often as there are samples.",
    ),
    judge=judge_divide,
    stand_in=best_division,
)
