"""Lab 11, Reproduction clinic: right answers that are no code, and wrong ones with what is said of them."""

from __future__ import annotations

from statistics import mean
from typing import Any

from tests.labs.solutions import defined, sources

SOLUTIONS = sources("11")


def deviation(cells: Any) -> Any:
    return defined(SOLUTIONS["deviation"])["deviation"](cells)


def all_count(cells: Any) -> Any:
    """Fitted and given cells count, too."""
    return deviation([["predicted", *cell[1:]] for cell in cells])


def of_ours(cells: Any) -> Any:
    """In per cent of ours."""
    return deviation([[kind, ours, paper] for kind, paper, ours in cells])


def mean_of_all(cells: Any) -> Any:
    single = [deviation([cell]) for cell in cells]
    results = [one[0] for one in single if one is not None]
    return [mean(results), max(results)] if results else None


def holds(factor: Any, pairs: Any) -> Any:
    return defined(SOLUTIONS["holds"])["holds"](factor, pairs)


def with_fitted(factor: Any, pairs: Any) -> Any:
    return holds(factor, [[own, other, "predicted", "predicted"] for own, other, *_ in pairs])


def only_own(factor: Any, pairs: Any) -> Any:
    """The other's seconds may be None, too."""
    return all(other >= factor * own for own, other, *_ in pairs if own is not None)


def once(factor: Any, pairs: Any) -> Any:
    """One setting is enough."""
    results = [holds(factor, [pair]) for pair in pairs]
    return None if not [one for one in results if one is not None] else any(results)


def line(drawn: dict[str, Any]) -> float:
    (one, one_gb), (two, two_gb) = drawn["first"], drawn["second"]
    return float(one_gb + (two_gb - one_gb) / (two - one) * (drawn["at"] - one))


def count(drawn: dict[str, Any], *begins: str) -> int:
    return sum(source.startswith(begins) for row in drawn["sources"] for source in row)


RIGHT = {"kinds": lambda drawn: count(drawn, "constants"), "predict": line}
WRONG: dict[str, dict[str, tuple[Any, str]]] = {
    "kinds": {
        "all": (9, "is not it"),
        "the fitted": (lambda drawn: 9 - count(drawn, "constants"), "is not it"),
        "one more": (lambda drawn: count(drawn, "constants") + 1, "is not it"),
    },
    "predict": {
        "the printed one": (lambda drawn: drawn["printed"], "is not it"),
        "in proportion": (lambda drawn: drawn["second"][1] * drawn["at"] / 8, "is not it"),
        "a step too far": (lambda drawn: line(drawn | {"at": drawn["at"] + 1}), "is not it"),
        "the second cell": (lambda drawn: drawn["second"][1], "is not it"),
    },
    "deviation": {
        "all cells": (all_count, "Entry [01] is|None is asked for"),
        "in per cent of ours": (of_ours, "Entry|None is asked for|is possible"),
        "the mean": (mean_of_all, "Entry 0 is"),
        "shares": (lambda cells: (found := deviation(cells)) and [one / 100 for one in found], "Entry 0 is"),
        "never": (lambda cells: None, "is possible"),
        "a constant": (lambda cells: [1.0, 2.0], "Entry [01] is|None is asked for"),
    },
    "holds": {
        "always": (lambda factor, pairs: True, "yours says True"),
        "fitted count": (with_fitted, "yours says"),
        "one setting is enough": (once, "yours says True"),
        "none is true": (lambda factor, pairs: holds(factor, pairs) is not False, "None; yours says True"),
        "its own seconds alone": (only_own, "yours says|It stops with TypeError"),
        "a text": (lambda factor, pairs: "yes", "yours says"),
    },
}
