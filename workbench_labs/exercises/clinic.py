"""Lab 'Reproduction clinic': which cells of a table are fitted and which predicted, how far they are off, and whether a
claim holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from statistics import median
from typing import Any

from workbench.widgets.tables import Table
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    require_number,
)
from workbench_labs.exercises.judging import Function, code_exercise, is_none, require_close

CASES = 50
Cell = list[Any]
"""[kind, paper, ours]: numbers, a word such as OOM, or None where nothing is printed."""


def case_table(numbers: Numbers) -> Table:
    """Return the made-up table of the exercise `kinds`: what each cell of ours comes from."""
    rows = [(row, *cells) for row, cells in zip(numbers["rows"], numbers["sources"], strict=True)]
    return Table(("seconds of a step", *numbers["columns"]), rows, title="Where our value of each cell comes from")


def judge_kinds(answer: Any, numbers: Numbers) -> str:
    """Count the cells that follow from constants which they did not fix."""
    sources = [source for row in numbers["sources"] for source in row]
    count = sum(source.startswith("constants") for source in sources)
    fitted = sum(source.startswith("fixed") for source in sources)
    return require_number(answer, count, 0, f"{count} cells are predicted; {fitted} were used to fix constants.")


def judge_predict(answer: Any, numbers: Numbers) -> str:
    """Compare with the line through both fitted cells."""
    (first, one_gb), (two, two_gb), size = numbers["first"], numbers["second"], numbers["at"]
    slope = (two_gb - one_gb) / (two - first)
    expected = one_gb + slope * (size - first)
    off = 100 * (expected / numbers["printed"] - 1)
    right = f"{expected:.3g} GB; the paper prints {numbers['printed']:g}, so the prediction is off by {off:+.1f} %."
    return require_number(answer, expected, 0.005, right)


def judge_deviation(answer: Function, draws: Random) -> str:
    """Compare with the median and the largest deviation, counted in fractions."""
    none = 0
    for _ in range(CASES):
        cells = _cells(draws)
        right, answered = _median_and_largest(cells), answer(cells)
        table = comparison("The case", ("kind", "paper", "ours"), [tuple(map(str, cell)) for cell in cells])
        if is_none(answered, [right] if right else [], "The predicted cells with two numbers", table):
            none += 1
        elif right:
            text = f"The cells are {cells}."
            require_close(answered, right, "[median, largest]", text, given={"deviation": ("median", "largest")})
    return f"It is right in {CASES} random tables; in {none} of them nothing is predicted."


def _median_and_largest(cells: Sequence[Cell]) -> list[float] | None:
    """Return the median and the largest deviation of the predicted cells, in per cent, without signs."""
    pairs = [
        (Fraction(paper), Fraction(ours))
        for kind, paper, ours in cells
        if kind == "predicted" and isinstance(paper, int | float) and isinstance(ours, int | float) and paper
    ]
    deviations = [float(abs(100 * (ours - paper) / paper)) for paper, ours in pairs]
    return [median(deviations), max(deviations)] if deviations else None


def _cells(draws: Random) -> list[Cell]:
    cells: list[Cell] = []
    for _ in range(draws.randint(1, 8)):
        paper = draws.choice([*(draws.randint(1, 400) / 4 for _ in range(6)), "OOM", None, 0.0])
        ours = paper if paper in ("OOM", None) else draws.randint(1, 400) / 4
        cells.append([draws.choice(["fitted", "predicted", "predicted", "given"]), paper, ours])
    return cells


def judge_holds(answer: Function, draws: Random) -> str:
    """Decide the claim by counting the pairs that speak for and against it."""
    counts = {True: 0, False: 0, None: 0}
    for _ in range(CASES):
        factor = draws.choice([1.0, 1.5, 2.0])
        pairs = [_pair(draws, factor) for _ in range(draws.randint(1, 4))]
        count = [
            Fraction(theirs) - Fraction(factor) * Fraction(ours)
            for ours, theirs, own_kind, their_kind in pairs
            if ours is not None and theirs is not None and (own_kind, their_kind) != ("fitted", "fitted")
        ]
        expected = None if not count else min(count) >= 0
        counts[expected] += 1
        answered = answer(factor, pairs)
        is_same = answered is None if expected is None else answered is not None and bool(answered) == expected
        if not is_same or (answered is not None and type(answered).__name__ not in ("bool", "bool_")):
            rows = [tuple(map(str, pair)) for pair in pairs]
            raise WrongAnswerError(
                f"At least {factor:g} times as fast in every setting: {expected}; yours says {answered!r:.40}.",
                comparison("The case", ("its seconds", "the other's", "kind", "the other's kind"), rows),
            )
    return (
        f"It is right for {CASES} claims: {counts[True]} hold, {counts[False]} do not, {counts[None]} cannot be judged."
    )


def _pair(draws: Random, factor: float) -> list[Any]:
    ours = draws.randint(1, 40) / 4
    theirs = ours * factor * draws.choice([0.5, 0.75, 0.875, 1.0, 1.25, 1.5])
    kinds = [draws.choice(["fitted", "predicted"]) for _ in range(2)]
    none = draws.choice(["own", "theirs", *[""] * 6])
    return [None if none == "own" else ours, None if none == "theirs" else theirs, *kinds]


def _kinds(draws: Random) -> Numbers:
    rows, columns = ["phone", "board", "laptop"], [f"batch {size}" for size in (1, 4, 16)]
    sources = [["constants of this row"] * 3 for _ in rows]
    crowded = draws.randrange(-1, 3)  # -1: no row has two fitted cells
    for row in range(3):
        for column in draws.sample(range(3), 2 if row == crowded else 1):
            sources[row][column] = "fixed a constant of this row"
    for row in draws.sample(range(3), draws.randint(0, 1)):
        free = [column for column in range(3) if sources[row][column].startswith("constants")]
        sources[row][draws.choice(free)] = "copied from the paper's text"
    return {"rows": rows, "columns": columns, "sources": sources}


def _predict(draws: Random) -> Numbers:
    one_gb, sample_gb = draws.randint(200, 500) / 100, draws.randint(12, 25) / 100
    size = draws.choice([12, 16, 32])
    printed = (one_gb + sample_gb * (size - 1)) * draws.choice([0.93, 0.97, 1.04, 1.08])
    return {
        "first": [1, one_gb],
        "second": [8, round(one_gb + 7 * sample_gb, 2)],
        "at": size,
        "printed": round(printed, 2),
    }


EXERCISES = (
    Exercise(
        name="kinds",
        question="""**Which cells are evidence?** (2 points) The table below says where each of *our* values comes \
from. How many of its nine cells are predicted, so that they could have come out wrong?""",
        points=2,
        hints=(
            "A cell that was used to fix a constant had to come out right.",
            "A value that was copied from the paper is given. It says nothing about a model.",
            "Count the cells that follow from constants which other cells fixed.",
        ),
        draw=_kinds,
        judge=judge_kinds,
    ),
    Exercise(
        name="predict",
        question="""**Fit two, predict one** (2 points) A model of memory is a line over the batch size. Two printed \
cells fix it, [batch, GB]: {first} and {second}. What does it predict for batch {at}, in GB, \
to 0.5 %?""",
        points=2,
        hints=(
            "Two unknowns: what is needed with batch 0, and what each sample adds.",
            "The slope is the difference of the GB over the difference of the batch sizes.",
            "Go from the first cell with this slope to the new batch size.",
        ),
        draw=_predict,
        judge=judge_predict,
    ),
    code_exercise(
        name="deviation",
        question="""**How far off?** (6 points) `deviation(cells)` gets cells `[kind, paper, ours]` and returns \
`[median, largest]`, the deviation of ours from the paper's in per cent of the paper's, without signs. Only cells of \
the kind `"predicted"` count, and only where both are numbers and the paper's is not 0 (others are `None` or a word \
such as `"OOM"`). If none counts, it returns `None`.""",
        points=6,
        hints=(
            "First make the list of deviations, then ask for its median.",
            "isinstance(paper, (int, float)) tells a number from a word.",
            "statistics.median; of an even number of values it is the mean of both in the middle.",
        ),
        judge=judge_deviation,
        stand_in=_median_and_largest,
    ),
    code_exercise(
        name="holds",
        question="""**Does the claim hold?** (6 points) A paper claims to be at least `factor` times as fast as the \
other method in every setting. `holds(factor, pairs)` gets for each setting `[its seconds, the other's seconds, kind, \
the other's kind]`. Seconds are `None` where a method did not run, or nothing is printed. A setting counts \
unless one of its seconds is `None`, or both cells are `"fitted"`: these had to come out right. Return `True` or \
`False`, or `None` if no setting counts.""",
        points=6,
        hints=(
            "First leave out the settings that do not count.",
            "At least factor times as fast: the other's seconds >= factor x its seconds.",
            "all(...) of an empty list is True: think of None before.",
        ),
        judge=judge_holds,
    ),
)
