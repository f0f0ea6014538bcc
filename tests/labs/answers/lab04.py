"""Lab 04, Cut for unequal devices: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tests.labs.solutions import defined, sources
from workbench_labs.exercises.cuts import equal_cut, every_cut, makespan_s, stage_seconds

SOLUTIONS = sources("04")


def shortest(drawn: dict[str, Any]) -> tuple[int, ...]:
    """Return the cut with the shortest mini-batch of all (simulated)."""
    return min(every_cut(7, 3), key=lambda cut: makespan_s(cut, drawn["layer_s"], drawn["micro_batches"]))


def greedy(layer_s: Any) -> Any:
    """Each device takes layers up to its share of the whole: nearly balanced."""
    layers = len(layer_s[0])
    weights = [1 / sum(own) for own in layer_s]
    counts = [max(1, round(layers * weight / sum(weights))) for weight in weights[:-1]]
    return [*counts, layers - sum(counts)]


def ignores_memory(layer_s: Any, layer_bytes: Any, budgets: Any) -> Any:
    return defined(SOLUTIONS["cut"])["cut"](layer_s)


def never_fits(layer_s: Any, layer_bytes: Any, budgets: Any) -> Any:
    return None


def balanced(drawn: dict[str, Any]) -> Any:
    return defined(SOLUTIONS["cut"])["cut"](drawn["layer_s"])


def row(drawn: dict[str, Any], layers: int = 5) -> list[float]:
    """Return best[2][n] of two devices."""
    beginnings = [[drawn["first"][:stop], drawn["second"][:stop]] for stop in range(2, layers + 1)]
    return [min(max(stage_seconds(cut, layer_s)) for cut in every_cut(len(layer_s[0]), 2)) for layer_s in beginnings]


def by_speed(samples: int, sample_s: Any) -> list[int]:
    """Round each device's fair share; the first device gets the rest."""
    fair = [samples / one / sum(1 / each for each in sample_s) for one in sample_s]
    counts = [round(one) for one in fair]
    return [counts[0] + samples - sum(counts), *counts[1:]]


def equally(samples: int, sample_s: Any) -> list[int]:
    return equal_cut(samples, len(sample_s))


RIGHT = {
    "trace": row,
    "ways": lambda drawn: np.int64(math.comb(drawn["layers"] - 1, drawn["devices"] - 1)),
    "beat": shortest,
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "ways": {
        "all orders": (lambda drawn: drawn["layers"] ** drawn["devices"], "is not it"),
        "one place more": (lambda drawn: math.comb(drawn["layers"], drawn["devices"] - 1), "is not it"),
        "a constant": (56, "is not it"),
    },
    "cut": {
        "equal": (lambda layer_s: equal_cut(len(layer_s[0]), len(layer_s)), "are possible"),
        "by speed": (greedy, "are possible|in all"),
        "too many": (lambda layer_s: [len(layer_s[0])] * len(layer_s), "in all"),
        "none for the last": (lambda layer_s: [len(layer_s[0]), *[0] * (len(layer_s) - 1)], "from 1 on"),
        "a text": (lambda layer_s: "3, 1", "is a list"),
    },
    "cut_within": {
        "memory is ignored": (ignores_memory, "None is asked for|needs"),
        "never": (never_fits, "is possible; your function returned None"),
        "equal": (lambda layer_s, *_: equal_cut(len(layer_s[0]), len(layer_s)), "asked for|needs|possible"),
    },
    "beat": {
        "the planner's own cut": (balanced, "with the planner's cut"),
        "equal": ([3, 2, 2], "with the planner's cut"),
        "all on one": ([7, 0, 0], "from 1 on"),
        "too few devices": ([4, 3], "has 3 entries"),
    },
    "trace": {
        "one device": (lambda drawn: [sum(drawn["first"][:stop]) for stop in range(2, 6)], "is not right for n"),
        "always cut first": (
            lambda drawn: [max(drawn["first"][0], sum(drawn["second"][1:stop])) for stop in range(2, 6)],
            "is not right for n = .*",
        ),
        "the last alone": (lambda drawn: row(drawn)[-1], "is a list"),
        "from n = 1 on": (lambda drawn: [drawn["first"][0], *row(drawn)], "has 4 entries"),
    },
    "divide": {
        "equally": (equally, "are possible"),
        "by speed, rounded": (by_speed, "are possible|in all"),
        "all to the fastest": (
            lambda samples, sample_s: [samples * (place == 0) for place in range(len(sample_s))],
            "are possible",
        ),
        "fair shares": (lambda samples, sample_s: [samples / len(sample_s)] * len(sample_s), "whole numbers"),
        "one too few": (lambda samples, sample_s: [samples - 1, *[0] * (len(sample_s) - 1)], "in all"),
    },
}
