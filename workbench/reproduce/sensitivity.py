"""How much a table depends on each constant: the scores with 5 % less and 5 % more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.reproduce.result import Number, Table

CHANGE = 0.05


def sensitivity_table(
    constants: Any,
    columns: Sequence[str],
    score: Callable[[Any], Sequence[Number]],
    *,
    trivial: tuple[str, Sequence[Number]],
    varied: Sequence[str],
    together: Mapping[str, str] | None = None,
) -> Table:
    """Return the scores as they are, with each constant changed, and what a trivial rule scores.

    constants: a dataclass, the fields `varied` of which are changed one after the other; `together` names one that goes with another.
    trivial: the rule, and its scores.
    """
    rows: list[tuple[Number, ...]] = [("as they are", *score(constants))]
    for name in varied:
        names = [name, *([together[name]] if together and name in together else [])]
        for sign in (-1, 1):
            changed = {each: getattr(constants, each) * (1 + sign * CHANGE) for each in names}
            rows.append((f"{name} {sign * CHANGE:+.0%}", *score(replace(constants, **changed))))
    rule, scores = trivial
    rows.append((f"trivial rule: {rule}", *scores))
    return Table(
        title="Sensitivity to 5 % of each constant, and what a trivial rule scores", columns=("constants", *columns), rows=tuple(rows)
    )
