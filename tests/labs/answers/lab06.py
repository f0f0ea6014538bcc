"""Lab 06, Forward only on a language model: right answers that are no code, and wrong ones with what is said of
them."""

from __future__ import annotations

import math
from typing import Any

from tests.labs.solutions import defined, sources
from workbench_labs.exercises.queries import every_choice, need_mb, step_seconds

SOLUTIONS = sources("06")


def fastest(product: Any, sizes: Any, budget_mb: Any, limit_s: Any) -> Any:
    """The fastest that fits, whatever its number of queries."""
    choices = [one for one in every_choice(product) if need_mb(one, sizes) <= budget_mb]
    fitting = [choice for choice in choices if step_seconds(choice, sizes) <= limit_s]
    return list(min(fitting, key=lambda one: step_seconds(one, sizes))) if fitting else None


def one_copy(product: Any, sizes: Any, budget_mb: Any, limit_s: Any) -> Any:
    """One copy at a time needs least memory, and takes longest."""
    result = defined(SOLUTIONS["choose"])["choose"](product, sizes, budget_mb, limit_s)
    return None if result is None else [*result[:2], 1]


def ignores_time(product: Any, sizes: Any, budget_mb: Any, limit_s: Any) -> Any:
    return defined(SOLUTIONS["choose"])["choose"](product, sizes, budget_mb, 1e9)


def equal(queries: Any, first_s: Any, query_s: Any) -> Any:
    size = len(first_s)
    return [queries // size + (device < queries % size) for device in range(size)]


def by_speed(queries: Any, first_s: Any, query_s: Any) -> Any:
    """In proportion to the speed, the rest to the first device."""
    speeds = [1 / each for each in query_s]
    counts = [int(queries * speed / sum(speeds)) for speed in speeds]
    return [counts[0] + queries - sum(counts), *counts[1:]]


def without_first(queries: Any, first_s: Any, query_s: Any) -> Any:
    return defined(SOLUTIONS["spread"])["spread"](queries, [0.0] * len(first_s), query_s)


def tokens(drawn: dict[str, Any]) -> int:
    return math.ceil(drawn["weight_bytes"] * drawn["gflops"] / (2 * drawn["gb_per_s"]))


RIGHT = {
    "ridge": tokens,
    "checkpointing": lambda drawn: drawn["layers"] * drawn["edge_mb"] + drawn["inside_mb"],
    "traffic": lambda drawn: 8 * (drawn["queries"] - drawn["own"]),
}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "ridge": {
        "one token": (1, "where the two times meet"),
        "one too many": (lambda drawn: tokens(drawn) + 1, "where the two times meet"),
        "one operation": (lambda drawn: 2 * tokens(drawn) + 2, "where the two times meet"),
        "a fraction": (2.5, "whole number"),
    },
    "checkpointing": {
        "all is kept": (lambda drawn: drawn["layers"] * (drawn["inside_mb"] + drawn["edge_mb"]), "is not it"),
        "inputs alone": (lambda drawn: drawn["layers"] * drawn["edge_mb"], "is not it"),
        "one layer": (lambda drawn: drawn["inside_mb"] + drawn["edge_mb"], "is not it"),
    },
    "choose": {
        "the fastest": (fastest, "more queries are possible|takes"),
        "one copy at a time": (one_copy, "are possible|takes"),
        "time is ignored": (ignores_time, "None is asked for|needs"),
        "never": (lambda *given: None, "is possible; your function returned None"),
        "a constant": (lambda product, *_: [1, product, 2], "asked for|needs|possible"),
        "q x E is another": (lambda product, *_: [product, product, 1], "q x E is|None is asked for"),
    },
    "spread": {
        "equal": (equal, "are possible"),
        "by speed": (by_speed, "are possible"),
        "without the fixed seconds": (without_first, "are possible"),
        "all to the first": (lambda queries, first_s, query_s: [queries, *[0] * (len(first_s) - 1)], "are possible"),
        "one too few": (lambda queries, first_s, query_s: [queries - 1, *[0] * (len(first_s) - 1)], "in all"),
    },
    "traffic": {
        "all queries": (lambda drawn: 8 * drawn["queries"], "is not it"),
        "its own": (lambda drawn: 8 * drawn["own"] + 8 * drawn["queries"], "is not it"),
        "one loss": (lambda drawn: 4 * (drawn["queries"] - drawn["own"]), "is not it"),
        "the gradient": (lambda drawn: 4 * drawn["values"], "is not it"),
    },
}
