"""Lab 'Slopes': a gradient from pairs of losses, noise that is drawn again from its seed, and a step as seeds and
scalars (P-RGE, published as MobiZO, section 2 and Algorithm 1).

The judge's losses are planes and bowls, whose gradients are known by another way than by losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

import torch

from workbench.methods.p_rge.zeroth_order import gradients_of
from workbench.methods.p_rge.zeroth_order.directions import NORMAL
from workbench_labs.bowl import Bowl, descents, mean_slope
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_list,
    require_number,
)
from workbench_labs.exercises.judging import (
    CLOSE,
    Function,
    code_exercise,
    numbers_of,
    require_close,
)

Moves = Sequence[Sequence[float]]
"""[[seed, scale], ...]: scale times the noise of the seed is added, one after the other."""
CASES, ESTIMATES, DRAWN = 25, 300, 2000
WITHIN = 0.3
"""By this share a mean over ESTIMATES estimates may differ from the law."""


def _require_close(answer: Any, expected: Sequence[float], subject: str, case: str) -> list[float]:
    """Return an answer's numbers, none of which is off by more than CLOSE of the largest one (see require_close)."""
    return require_close(answer, expected, subject, case, absolute=CLOSE * max(1e-12, *map(abs, expected)))


def _plane(draws: Random, dimension: int, queries: int, epsilon: float) -> tuple[list[float], Any, Any]:
    """Return a gradient, noise [query][value], and [plus, minus] of each query: losses of a plane, 2 + a * theta."""
    gradient = [draws.uniform(-2, 2) for _ in range(dimension)]
    noise = [[draws.gauss(0, 1) for _ in range(dimension)] for _ in range(queries)]
    along = [_dot(gradient, z) for z in noise]
    return gradient, noise, [[2 + epsilon * slope, 2 - epsilon * slope] for slope in along]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def judge_slope(answer: Any, numbers: Numbers) -> str:
    """Compare with the difference of both losses over the distance between both points."""
    slope = (numbers["plus"] - numbers["minus"]) / (2 * numbers["epsilon"])
    return require_number(answer, slope, 0.005, f"{slope:.4g}: both points are 2 epsilon apart.")


def judge_estimate(answer: Function, draws: Random) -> str:
    """Compare with the mean of z (z * gradient) on planes; then the error's law, and a descent into a bowl."""
    for _ in range(CASES):
        dimension, queries, epsilon = draws.randint(1, 6), draws.randint(1, 5), draws.choice([0.5, 0.1, 0.01])
        gradient, noise, losses = _plane(draws, dimension, queries, epsilon)
        slopes = [_dot(gradient, z) for z in noise]
        expected = [fmean(slope * z[axis] for slope, z in zip(slopes, noise, strict=True)) for axis in range(dimension)]
        case = f"q = {queries}, d = {dimension}, epsilon = {epsilon:g}: the slopes along the noise are " + ", ".join(
            f"{slope:.4g}" for slope in slopes
        )
        _require_close(answer(losses, noise, epsilon), expected, "The estimate", case + ".")
    dimension, queries = 20, 4
    errors = []
    for _ in range(ESTIMATES):
        gradient, noise, losses = _plane(draws, dimension, queries, 0.1)
        estimate = numbers_of(answer(losses, noise, 0.1), "The estimate", dimension)
        squared = sum((value - other) ** 2 for value, other in zip(estimate, gradient, strict=True))
        errors.append(squared / _dot(gradient, gradient))
    law, measured = (dimension + 1) / queries, fmean(errors)
    if abs(measured / law - 1) > WITHIN:
        raise WrongAnswerError(f"The squared error is {measured:.3g} of the gradient's; the law says {law:g}.")
    walk = descents(Bowl(), (4,), passes=160, learning_rate=lambda q: 0.5, repeats=3, estimate=answer)["q = 4"]
    if not walk[-1][1] - 1 < 0.05 * (walk[0][1] - 1):
        raise WrongAnswerError(f"A descent into a bowl ends at a height of {walk[-1][1]:.3g}; 1 is the bottom.")
    return (
        f"It is the mean of slope times noise in {CASES} cases. In {dimension} dimensions with q = {queries} its "
        f"squared error is {measured:.2f} of the gradient's; the law says {law:.2f}. It finds the bottom of a bowl."
    )


def judge_queries(answer: Any, numbers: Numbers) -> str:
    """Is it the least number of queries whose error is small enough?"""
    dimension, share = numbers["dimension"], numbers["percent"] / 100
    queries = number_of(answer)
    if queries != int(queries) or queries < 1:
        raise WrongAnswerError("A whole number of queries is asked for.")
    is_enough = (dimension + 1) / queries <= share
    if not is_enough or (queries > 1 and (dimension + 1) / (queries - 1) <= share):
        raise WrongAnswerError(f"{queries:,.0f} is not the least number for which the law allows it.")
    return f"(d + 1) / q <= {share:g} from q = {queries:,.0f} on. Nobody takes that many."


def judge_walk(answer: Function, draws: Random) -> str:
    """Check the noise (normal, by its seed alone) and the walk: exactly the same in one go and in two."""
    _require_normal(answer, [draws.getrandbits(32) for _ in range(4)])
    for _ in range(CASES):
        dimension = draws.randint(1, 6)
        theta = [draws.randint(-16, 16) / 8 for _ in range(dimension)]  # exact in float32, too
        moves = [[draws.getrandbits(32), draws.choice([0.5, -1.0, 0.01, 2.0])] for _ in range(draws.randint(2, 5))]
        moves.append(draws.choice(moves))

        def walked(start: Sequence[float], some: Moves, size: int = dimension) -> list[float]:
            return numbers_of(answer(list(start), [list(move) for move in some]), "theta", size)

        if walked(theta, []) != theta:
            raise WrongAnswerError(f"Without moves theta stays {theta}; yours is {walked(theta, [])}.")
        once, cut = walked(theta, moves), draws.randint(1, len(moves) - 1)
        expected = list(theta)
        for seed, scale in moves:
            noise = walked([0.0] * dimension, [[seed, 1.0]])
            expected = [value + scale * z for value, z in zip(expected, noise, strict=True)]
        case = f"{len(moves)} moves, with scales {', '.join(f'{scale:g}' for _, scale in moves)}"
        _require_close(once, expected, "theta", f"{case}: theta should move by scale times noise, each time.")
        again = walked(walked(theta, moves[:cut]), moves[cut:])
        if again != once or walked(theta, moves) != once:
            rows = [
                (place, f"{value!r}", f"{other!r}")
                for place, (value, other) in enumerate(zip(once, again, strict=True))
            ]
            raise WrongAnswerError(
                f"{case}: in one go and in two ({cut} and {len(moves) - cut}) theta must be equal to the last bit.",
                comparison("theta", ("entry", "in one go", "in two"), rows),
            )
    return f"The noise is normal and belongs to its seed. {CASES} walks end at the same bits in one go and in two."


def _require_normal(answer: Function, seeds: Sequence[int]) -> None:
    """Raise WrongAnswerError unless the noise of seeds is standard normal, independent, and the same again."""

    def drawn(seed: int) -> list[float]:
        return numbers_of(answer([0.0] * DRAWN, [[seed, 1.0]]), "theta", DRAWN)

    noises = [drawn(seed) for seed in seeds]
    if drawn(seeds[0]) != noises[0]:
        raise WrongAnswerError(f"The noise of seed {seeds[0]} is another one the second time: nobody could replay it.")
    rows = []
    for seed, z in zip(seeds, noises, strict=True):
        moments = fmean(z), fmean(value**2 for value in z), fmean(value**4 for value in z)
        rows.append((seed, *(f"{moment:.2f}" for moment in moments)))
        if abs(moments[0]) > 0.12 or abs(moments[1] - 1) > 0.2 or abs(moments[2] - 3) > 1:
            table = comparison("Means over 2,000 values", ("seed", "z (0)", "z^2 (1)", "z^4 (3)"), rows)
            raise WrongAnswerError("The noise is standard normal: mean 0, variance 1, fourth moment 3.", table)
    pairs = [(noises[0], noises[1]), (noises[2], noises[3]), (noises[0][1:], noises[0][:-1])]
    if any(abs(_dot(first, other)) > 0.15 * DRAWN for first, other in pairs):
        raise WrongAnswerError("Values of one noise, and noises of two seeds, are independent; yours are not.")


def judge_moves(answer: Function, draws: Random) -> str:
    """Compare the step that the moves make with that along the estimated gradient of a plane."""
    for _ in range(CASES):
        dimension, queries, epsilon = draws.randint(1, 6), draws.randint(1, 5), draws.choice([0.5, 0.1, 0.01])
        rate = draws.choice([0.004, 0.1, 1.0])
        gradient, noise, losses = _plane(draws, dimension, queries, epsilon)
        seeds = [draws.getrandbits(32) for _ in range(queries)]
        given = require_list(answer(losses, seeds, epsilon, rate), "The moves", queries)
        moves = [numbers_of(move, "A move", 2) for move in given]
        if [seed for seed, _ in moves] != seeds:
            raise WrongAnswerError(
                f"The moves have the seeds {seeds}, in their order; yours have {[int(seed) for seed, _ in moves]}."
            )
        expected = [-rate * _dot(gradient, z) / queries for z in noise]
        case = f"q = {queries}, learning rate {rate:g}: theta goes against the mean of slope times noise."
        _require_close([scale for _, scale in moves], expected, "The scale of each move", case)
    return f"In {CASES} cases the moves are a step against the estimated gradient."


def judge_log(answer: Any, numbers: Numbers) -> str:
    """Compare with four bytes for each seed and for each scalar."""
    queries, steps = numbers["queries"], numbers["steps"]
    return require_number(
        answer, 8 * queries * steps, 0, f"{steps:,} steps of {queries} queries: {8 * queries * steps:,} bytes."
    )


def slope_error(epsilon: float, numbers: Numbers) -> float:
    """Return the model of a slope's error: rounding of the losses over epsilon, and curvature times epsilon squared."""
    return numbers["rounding"] / epsilon + numbers["bend"] * epsilon**2


def judge_epsilon(answer: Any, numbers: Numbers) -> str:
    """Is the error at the answer within 2 % of the least error on a fine grid?"""
    epsilon = number_of(answer)
    if epsilon <= 0:
        raise WrongAnswerError("Epsilon is above 0.")
    grid = [10 ** (power / 500) for power in range(-3000, 1001)]
    best = min(grid, key=lambda one: slope_error(one, numbers))
    error, least = slope_error(epsilon, numbers), slope_error(best, numbers)
    if error > 1.02 * least:
        raise WrongAnswerError(f"With {epsilon:g} the error is {error:.3g}. A smaller error is possible.")
    return f"With {epsilon:.3g} the error is {error:.3g}; on a fine grid the least one is {least:.3g}."


def _slope(draws: Random) -> Numbers:
    minus, difference = draws.randint(400, 900) / 1000, draws.randint(10, 90) / 1000
    plus = round(minus + draws.choice([1, -1]) * difference, 3)
    return {"plus": plus, "minus": minus, "epsilon": draws.choice([0.01, 0.02, 0.05])}


def _walk(theta: Sequence[float], moves: Moves) -> list[float]:
    """Return theta after moves, with the workbench's noise."""
    values, noise = torch.tensor(theta), torch.empty(len(theta))
    for seed, scale in moves:
        NORMAL.draw(int(seed)).fill(noise, ((len(theta),),))
        values.add_(noise, alpha=scale)
    return values.tolist()


def _moves_of(losses: Any, seeds: Sequence[int], epsilon: float, learning_rate: float) -> list[list[float]]:
    """Return a step's moves from the workbench's projected gradients."""
    slopes = gradients_of(torch.tensor(losses).flatten(), epsilon)
    return [[seed, -learning_rate * slope / len(slopes)] for seed, slope in zip(seeds, slopes, strict=True)]


EXERCISES = (
    Exercise(
        name="slope",
        question="""**One slope** (1 point). The loss at θ + εz is {plus:g}, at θ − εz it is {minus:g}, and ε = \
{epsilon:g}. What is the slope g along z?""",
        points=1,
        hints=(
            "A slope is a difference of heights over a distance.",
            "How far are both points apart, counted in z?",
            "Mind the sign: g is positive if the loss rises along z.",
        ),
        draw=_slope,
        judge=judge_slope,
    ),
    code_exercise(
        name="estimate",
        question="""**Write the estimator** (6 points). `estimate(losses, noise, epsilon)` gets for each query a pair \
`[plus, minus]` of losses and its noise z, a list of d numbers. It returns the estimated gradient, d numbers: the mean \
over the queries of slope times noise.""",
        points=6,
        hints=(
            "First the slopes: one number for each query.",
            "Each query proposes slope times z; the estimate is the mean of these proposals, entry by entry.",
            "q is len(losses), d is len(noise[0]).  NumPy or torch may be imported inside.",
        ),
        judge=judge_estimate,
        stand_in=mean_slope,
    ),
    Exercise(
        name="queries_needed",
        question="""**How many queries?** (2 points) An adapter has d = {dimension:,} trained values. What is the \
least number of queries for which the law allows a squared error of {percent} % of the gradient's squared length?""",
        points=2,
        hints=(
            "The law: squared error over squared length is (d + 1) / q.",
            "Set it equal to the share, and solve for q.",
            "The share is a number such as 0.25; round q up.",
        ),
        draw=lambda draws: {
            "dimension": draws.randint(20, 900) * 1000 + draws.randint(0, 7),
            "percent": draws.choice([10, 25, 50, 100]),
        },
        judge=judge_queries,
    ),
    code_exercise(
        name="walk",
        question="""**Draw it again** (8 points). `walk(theta, moves)` gets d numbers and moves `[[seed, scale], …]`. \
For each move, one after the other, it adds scale times the seed's noise to theta, and it returns the new theta. The \
noise of a seed is d standard normal numbers; draw them again for each move, and keep none. The same walk must end at \
the same bits, in one go and in two.""",
        points=8,
        hints=(
            "A generator of its own for each move: random.Random(seed), numpy.random.default_rng(seed) or torch's.",
            "random.Random(seed).gauss(0, 1) draws one normal number; a generator that others use, too, has moved on.",
            "Add each move to theta before the next one; a sum of all noises first rounds differently.",
        ),
        judge=judge_walk,
        stand_in=_walk,
    ),
    code_exercise(
        name="moves_of",
        question="""**A step is seeds and scalars** (5 points). `moves_of(losses, seeds, epsilon, learning_rate)` \
gets a pair `[plus, minus]` and a seed for each query. It returns the moves of the step, `[[seed, scale], …]` in the \
order of the seeds, with which `walk` goes against the estimated gradient.""",
        points=5,
        hints=(
            "You know the step with noise: minus learning rate times estimate. What stands before each z?",
            "The scale of a query has its slope, the learning rate and the number of queries.",
            "Downhill: the scale is negative where the slope is positive.",
        ),
        judge=judge_moves,
        stand_in=_moves_of,
    ),
    Exercise(
        name="log",
        question="""**The log** (1 point). A training of {steps:,} steps with {queries} queries is kept as seeds and \
scalars, of 32 bits each. How many bytes are that?""",
        points=1,
        hints=(
            "What does one query leave behind?",
            "32 bits are 4 bytes.",
            "Steps times queries times the bytes of one query.",
        ),
        draw=lambda draws: {"queries": draws.choice([2, 4, 8, 16]), "steps": draws.randint(3, 40) * 500},
        judge=judge_log,
    ),
    Exercise(
        name="epsilon",
        question="""**The best ε** (3 points). The losses are rounded, which makes a slope wrong by about \
{rounding:g} / ε. The loss bends, which makes it wrong by about {bend:g} ε². For which ε is the sum of both least? \
`slopes.slope_error(epsilon, lab.numbers("epsilon"))` is the sum.""",
        points=3,
        hints=(
            "Draw the sum over ε with logarithmic axes, or compute it for many ε.",
            "At the least sum its derivative is 0: one part falls as fast as the other one rises.",
            "-r / ε² + 2 b ε = 0.",
        ),
        draw=lambda draws: {
            "rounding": draws.randint(1, 9) * 10.0 ** draws.choice([-8, -7, -6, -5]),
            "bend": draws.randint(1, 40) / 10,
        },
        judge=judge_epsilon,
    ),
)


def best_on_bowl(estimate: Function, queries: Sequence[int], *, passes: int) -> int:
    """Return which number of queries ends lowest on the bowl with the same number of passes: medians of 25 descents."""
    curves = descents(Bowl(), queries, passes=passes, repeats=25, estimate=estimate)
    return min(queries, key=lambda count: curves[f"q = {count}"][-1][1])
