"""Lab 05, Slopes: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

import math
import random
from typing import Any

from tests.labs.solutions import defined, sources

SOLUTIONS = sources("05")


def estimate(losses: Any, noise: Any, epsilon: Any) -> Any:
    return defined(SOLUTIONS["estimate"])["estimate"](losses, noise, epsilon)


def first_query(losses: Any, noise: Any, epsilon: Any) -> Any:
    """Only one query counts."""
    return estimate(losses[:1], noise[:1], epsilon)


def in_unit_steps(losses: Any, noise: Any, epsilon: Any) -> Any:
    """As if the directions had length 1."""
    return estimate(losses, [[value / math.hypot(*z) for value in z] for z in noise], epsilon)


def shared_generator(theta: Any, moves: Any) -> Any:
    """One generator for all calls: the noise is another one the second time."""
    return [value + sum(scale * random.gauss(0, 1) for _, scale in moves) for value in theta]


def uniform(theta: Any, moves: Any) -> Any:
    for seed, scale in moves:
        draws = random.Random(seed)
        theta = [value + scale * draws.uniform(-(3**0.5), 3**0.5) for value in theta]
    return theta


def one_number(theta: Any, moves: Any) -> Any:
    """Every value gets the same number."""
    return [value + sum(scale * random.Random(seed).gauss(0, 1) for seed, scale in moves) for value in theta]


def summed_first(theta: Any, moves: Any) -> Any:
    """All noise is summed, and added at the end."""
    changes = [0.0] * len(theta)
    for seed, scale in moves:
        draws = random.Random(seed)
        changes = [value + scale * draws.gauss(0, 1) for value in changes]
    return [value + change for value, change in zip(theta, changes, strict=True)]


def seed_of_the_first(theta: Any, moves: Any) -> Any:
    return defined(SOLUTIONS["walk"])["walk"](theta, [[moves[0][0], scale] for _, scale in moves])


def moves_of(losses: Any, seeds: Any, epsilon: Any, learning_rate: Any) -> Any:
    return defined(SOLUTIONS["moves_of"])["moves_of"](losses, seeds, epsilon, learning_rate)


def uphill(*given: Any) -> Any:
    return [[seed, -scale] for seed, scale in moves_of(*given)]


def summed(losses: Any, *given: Any) -> Any:
    """The sum over the queries instead of their mean."""
    return [[seed, scale * len(losses)] for seed, scale in moves_of(losses, *given)]


def best_epsilon(drawn: dict[str, Any]) -> float:
    return float((drawn["rounding"] / (2 * drawn["bend"])) ** (1 / 3))


RIGHT = {
    "slope": lambda drawn: (drawn["plus"] - drawn["minus"]) / (2 * drawn["epsilon"]),
    "queries_needed": lambda drawn: math.ceil((drawn["dimension"] + 1) * 100 / drawn["percent"]),
    "log": lambda drawn: 8 * drawn["queries"] * drawn["steps"],
    "epsilon": best_epsilon,
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "slope": {
        "one epsilon": (lambda drawn: (drawn["plus"] - drawn["minus"]) / drawn["epsilon"], "is not it"),
        "the other sign": (lambda drawn: (drawn["minus"] - drawn["plus"]) / (2 * drawn["epsilon"]), "is not it"),
        "the difference": (lambda drawn: drawn["plus"] - drawn["minus"], "is not it"),
    },
    "estimate": {
        "one epsilon": (lambda *given: [2 * value for value in estimate(*given)], "the slopes along the noise"),
        "one query": (first_query, "the slopes along the noise"),
        "directions of length 1": (in_unit_steps, "the slopes along the noise"),
        "the slopes alone": (lambda losses, noise, epsilon: [plus - minus for plus, minus in losses], "entries|slopes"),
        "downhill": (lambda *given: [-value for value in estimate(*given)], "the slopes along the noise"),
    },
    "queries_needed": {
        "one": (1, "not the least number"),
        "one too few": (lambda drawn: RIGHT["queries_needed"](drawn) - 1, "not the least number"),
        "one too many": (lambda drawn: RIGHT["queries_needed"](drawn) + 1, "not the least number"),
        "no whole number": (12.5, "whole number"),
    },
    "walk": {
        "one generator": (shared_generator, "could replay|the second time"),
        "uniform noise": (uniform, "standard normal"),
        "one number for all": (one_number, "standard normal"),
        "summed first": (summed_first, "equal to the last bit"),
        "the first seed": (lambda theta, moves: seed_of_the_first(theta, moves) if moves else theta, "times noise"),
        "it stays": (lambda theta, moves: theta, "standard normal"),
    },
    "moves_of": {
        "uphill": (uphill, "against the mean"),
        "the sum": (summed, "against the mean"),
        "one epsilon": (lambda *given: [[seed, 2 * scale] for seed, scale in moves_of(*given)], "against the mean"),
        "backwards": (lambda *given: moves_of(*given)[::-1], "in their order"),
        "scales alone": (lambda *given: [scale for _, scale in moves_of(*given)], "A move is a list"),
    },
    "log": {
        "seeds alone": (lambda drawn: 4 * drawn["queries"] * drawn["steps"], "is not it"),
        "of one step": (lambda drawn: 8 * drawn["queries"], "is not it"),
        "two passes each": (lambda drawn: 16 * drawn["queries"] * drawn["steps"], "is not it"),
    },
    "epsilon": {
        "small": (1e-6, "A smaller error is possible"),
        "both parts alike": (
            lambda drawn: (drawn["rounding"] / drawn["bend"]) ** (1 / 3),
            "A smaller error is possible",
        ),
        "one": (1.0, "A smaller error is possible"),
        "zero": (0, "above 0"),
    },
}
