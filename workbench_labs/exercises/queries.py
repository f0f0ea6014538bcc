"""Lab 'Forward only on a language model': q, E and passes within a memory budget, queries over unequal devices, and
what a step needs (P-RGE, published as MobiZO, section 3).  The judges try all choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from workbench.planners.shares import smallest_maximum
from workbench_labs.course.verdict import (
    Exercise,
    Numbers,
    WrongAnswerError,
    comparison,
    number_of,
    require_number,
)
from workbench_labs.exercises.judging import (
    Function,
    code_exercise,
    counts_of,
    every_division,
    is_none,
    numbers_of,
    require_best,
)

CASES = 50
Choice = tuple[int, int, int]
"""q, E, and p, the copies that go through the model together."""


def every_choice(product: int) -> Iterator[Choice]:
    """Yield all q and E with q x E = product, and all numbers of copies at once that divide 2q."""
    for queries in range(1, product + 1):
        if product % queries == 0:
            for copies in range(1, 2 * queries + 1):
                if 2 * queries % copies == 0:
                    yield queries, product // queries, copies


def need_mb(choice: Choice, sizes: Mapping[str, float]) -> float:
    """Return the memory of a step: the weights, and for each copy at once its values of B and its rows' activations."""
    _, samples, copies = choice
    return sizes["weights_mb"] + copies * (sizes["copy_mb"] + samples * sizes["sample_mb"])


def step_seconds(choice: Choice, sizes: Mapping[str, float]) -> float:
    """Return the time of a step: each pass reads the weights once, and computes each of its samples."""
    queries, samples, copies = choice
    return 2 * queries / copies * (sizes["read_s"] + copies * samples * sizes["sample_s"])


def _choice_of(answer: Any, product: int) -> Choice:
    queries, samples, copies = numbers_of(answer, "The choice [q, E, p]", 3)
    choice = int(queries), int(samples), int(copies)
    if choice != (queries, samples, copies) or choice not in set(every_choice(product)):
        raise WrongAnswerError(f"q x E is {product}, and p divides 2q; this is [{queries:g}, {samples:g}, {copies:g}].")
    return choice


def judge_choose(answer: Function, draws: Random) -> str:
    """Try all choices: as many queries as fit into memory and time, and among those the fastest."""
    none = 0
    for _ in range(CASES):
        product, sizes, budget_mb, limit_s = _budget_case(draws)
        fitting = [
            possible
            for possible in every_choice(product)
            if need_mb(possible, sizes) <= budget_mb and step_seconds(possible, sizes) <= limit_s
        ]
        answered = answer(product, sizes, budget_mb, limit_s)
        case, table = f"q x E = {product}, {budget_mb:g} MB, {limit_s:g} s", _sizes_table(sizes)
        if is_none(answered, fitting, case, table):
            none += 1
            continue
        choice = _choice_of(answered, product)
        if choice not in fitting:
            text = f"{need_mb(choice, sizes):g} MB and takes {step_seconds(choice, sizes):g} s"
            raise WrongAnswerError(f"{case}: yours, {list(choice)}, needs {text}.", table)
        if choice[0] < max(possible[0] for possible in fitting):
            raise WrongAnswerError(f"{case}: yours has q = {choice[0]}; more queries are possible.", table)
        alike = [possible for possible in fitting if possible[0] == choice[0]]
        require_best(choice, alike, partial(step_seconds, sizes=sizes), f"{case}: with {list(choice)} a step", table)
    return f"It is the best of all choices in {CASES} random cases; in {none} of them it says that none fits."


def _sizes_table(sizes: Mapping[str, float]) -> Any:
    return comparison("The case", ("size", "value"), [(name, f"{value:g}") for name, value in sizes.items()])


def _budget_case(draws: Random) -> tuple[int, dict[str, float], float, float]:
    """Return q x E, sizes, a memory budget (MB) and a limit of a step's seconds; binary fractions add up exactly."""
    product = draws.choice([4, 8, 12, 16])
    sizes = {
        "weights_mb": float(draws.randint(50, 400)),
        "copy_mb": draws.randint(1, 16) / 2,
        "sample_mb": draws.randint(2, 40) / 2,
        "read_s": draws.randint(1, 64) / 64,
        "sample_s": draws.randint(1, 16) / 64,
    }
    choices = list(every_choice(product))
    middle = draws.choice(choices)
    budget_mb = round(need_mb(middle, sizes) * draws.choice([0.9, 1.0, 1.2]))
    limit_s = step_seconds(draws.choice(choices), sizes) * draws.choice([0.75, 1.0, 1.5])
    return product, sizes, float(budget_mb), limit_s


def slowest_s(counts: Sequence[int], first_s: Sequence[float], query_s: Sequence[float]) -> float:
    """Return the seconds until all losses are known: a device without a query costs nothing."""
    return max(
        (first + count * further if count else 0.0)
        for count, first, further in zip(counts, first_s, query_s, strict=True)
    )


def judge_spread(answer: Function, draws: Random) -> str:
    """Compare the slowest device with that of the best of all divisions."""
    spared = 0
    for _ in range(CASES):
        devices, queries = draws.randint(1, 4), draws.randint(1, 9)
        first_s = [draws.randint(0, 12) / 4 for _ in range(devices)]
        query_s = [draws.randint(1, 16) / 4 for _ in range(devices)]
        counts = counts_of(answer(queries, first_s, query_s), "The division", devices, total=queries)
        seconds = partial(slowest_s, first_s=first_s, query_s=query_s)
        rows = list(zip(range(devices), first_s, query_s, counts, strict=True))
        case = comparison("The case", ("device", "first_s", "query_s", "your queries"), rows)
        best = require_best(counts, every_division(queries, devices), seconds, f"With {list(counts)} a step", case)
        spared += 0 in best
    return f"It is as fast as the best of all divisions in {CASES} random clusters; in {spared} a device gets nothing."


def judge_ridge(answer: Any, numbers: Numbers) -> str:
    """Is it the least number of tokens for which arithmetic takes at least as long as reading the weights?"""
    tokens = number_of(answer)
    if tokens != int(tokens) or tokens < 1:
        raise WrongAnswerError("A whole number of tokens is asked for.")

    def is_above(count: float) -> bool:
        return 2 * count / (numbers["gflops"] * 1e9) >= numbers["weight_bytes"] / (numbers["gb_per_s"] * 1e9)

    if not is_above(tokens) or (tokens > 1 and is_above(tokens - 1)):
        raise WrongAnswerError(f"{tokens:g} tokens are not where the two times meet.")
    return f"From {tokens:g} tokens on the machine computes all the time; with fewer it waits for memory."


def judge_checkpointing(answer: Any, numbers: Numbers) -> str:
    """Compare with all layers' inputs, and the activations of one layer."""
    layers, inside, edge = numbers["layers"], numbers["inside_mb"], numbers["edge_mb"]
    right = f"{layers} inputs of {edge} MB, and {inside} MB while one layer is computed again."
    return require_number(answer, layers * edge + inside, 0.001, right)


def judge_traffic(answer: Any, numbers: Numbers) -> str:
    """Compare with the losses of both signs that the other devices send."""
    received = numbers["queries"] - numbers["own"]
    return require_number(answer, 8 * received, 0, f"{received} queries, two losses of 4 bytes each: {8 * received}.")


def _traffic(draws: Random) -> Numbers:
    queries = draws.choice([8, 16, 32])
    return {"queries": queries, "own": draws.randint(1, queries // 2), "values": draws.randint(100, 900) * 1000}


def _planned(queries: int, first_s: Sequence[float], query_s: Sequence[float]) -> list[int]:
    """Return the planner's queries of each device."""
    tables = [
        [0.0, *(first + count * further for count in range(1, queries + 1))]
        for first, further in zip(first_s, query_s, strict=True)
    ]
    return list(smallest_maximum(tables, queries) or ())


EXERCISES = (
    Exercise(
        name="ridge",
        question="""**The ridge** (2 points) A machine computes {gflops} billion operations per second and reads \
{gb_per_s} GB per second. A weight has {weight_bytes} bytes; each token of a pass needs 2 operations with each weight. \
From how many tokens on does computing take as long as reading the weights?""",
        points=2,
        hints=(
            "For one weight: how long does it take to read it, and how long to compute with it for one token?",
            "Reading: bytes over bytes per second. Computing: 2 x tokens over operations per second.",
            "Set both equal, solve for tokens, and round up.",
        ),
        draw=lambda draws: {
            "gflops": draws.randint(20, 400) * 10,
            "gb_per_s": draws.randint(8, 120),
            "weight_bytes": draws.choice([2, 4]),
        },
        judge=judge_ridge,
    ),
    Exercise(
        name="checkpointing",
        question="""**Checkpointing** (2 points) A model has {layers} layers. Backpropagation keeps {inside_mb} MB of \
activations inside each layer. With checkpointing it keeps only each layer's input, {edge_mb} MB, and computes the \
inside of one layer again when the backward pass gets there. How many MB are kept at most?""",
        points=2,
        hints=(
            "What is kept of all layers at the end of the forward pass?",
            "And what is there in addition, while one layer is computed again?",
            "All inputs, plus the inside of a single layer.",
        ),
        draw=lambda draws: {
            "layers": draws.randint(12, 40),
            "inside_mb": draws.randint(20, 90),
            "edge_mb": draws.randint(1, 6),
        },
        judge=judge_checkpointing,
    ),
    code_exercise(
        name="choose",
        question="""**Choose q, E and p** (8 points) `choose(product, sizes, budget_mb, limit_s)` returns `[q, E, p]` \
with q x E = product, where p copies go through the model together (p divides 2q), or `None` if nothing fits. A \
step needs `weights_mb + p (copy_mb + E sample_mb)` MB and takes `2q / p (read_s + p E sample_s)` seconds; `sizes` is \
a dict with these names. Take as many queries as fit into memory and time; among those choices the fastest.""",
        points=8,
        hints=(
            "There are few choices: all divisors of product, and for each q all divisors of 2q.",
            "Collect those that fit. If the list is empty, return None.",
            "max(fitting, key=lambda one: (one[0], -seconds(one))) prefers queries, then time.",
        ),
        judge=judge_choose,
    ),
    Exercise(
        name="traffic",
        question="""**What is received** (2 points) Several devices share a step with {queries} queries; one of them \
computes {own}. The adapter has {values:,} values. How many bytes of the others' losses (float32, both signs) does \
this device receive in a step, to make the same update as they?""",
        points=2,
        hints=(
            "The noise is drawn from seeds that all know. What is not known?",
            "Two losses for each query of the others.",
            "A float32 has 4 bytes.",
        ),
        draw=_traffic,
        judge=judge_traffic,
    ),
    code_exercise(
        name="spread",
        question="""**Spread the queries** (8 points) `spread(queries, first_s, query_s)` returns how many queries \
each device gets. A device with n > 0 queries takes `first_s + n query_s` seconds, a device without any takes none. \
All wait for the slowest: make it as fast as possible.""",
        points=8,
        hints=(
            "If all must be done after t seconds, how many queries can each device compute? Is t long enough?",
            "Give the queries one by one, each to the device that would then be done first.",
            "min(devices, key=lambda d: first_s[d] + (counts[d] + 1) * query_s[d]), once for each query.",
        ),
        judge=judge_spread,
        stand_in=_planned,
    ),
)
