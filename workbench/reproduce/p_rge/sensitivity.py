"""How much a table depends on each constant: the scores with 5 % less and 5 % more of it, and what a trivial rule scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.reproduce.p_rge.testbed import Constants, median_deviation, worst
from workbench.reproduce.result import Comparison, Number, Table

CHANGE = 0.05


def sensitivity(
    constants: Constants,
    compare: Callable[[Constants], Sequence[Comparison]],
    varied: Sequence[str],
    *,
    trivial: tuple[str, Sequence[Comparison]],
) -> Table:
    """Return the median and the largest deviation as they are, with each constant changed, and of a trivial rule.

    compare: gives the comparisons of changed constants.  trivial: what the rule is, and its comparisons.
    """

    def row(name: str, comparisons: Sequence[Comparison]) -> tuple[Number, ...]:
        largest, where = worst(comparisons)
        return name, median_deviation(comparisons), largest, where

    rows = [row("as they are", compare(constants))]
    for name in varied:
        for sign in (-1, 1):
            changed = replace(constants, **{name: getattr(constants, name) * (1 + sign * CHANGE)})
            rows.append(row(f"{name} {sign * CHANGE:+.0%}", compare(changed)))
    rows.append(row(f"trivial rule: {trivial[0]}", trivial[1]))
    return Table(
        title="Sensitivity to 5 % of each constant, and what a trivial rule scores",
        columns=("constants", "median deviation % of what is not fitted", "largest %", "at"),
        rows=tuple(rows),
    )
