"""How much a table depends on each constant: the scores with 5 % less and 5 % more of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.reproduce.galaxy_plus.testbed import Constants
from workbench.reproduce.result import Number, Table

VARIED = (
    "speed_factor",
    "ring_efficiency",
    "collective_efficiency",
    "handling_s_per_byte",
    "message_s",
    "operation_s",
    "pi_memory_bytes_per_s",
    "embedding_share",
)
CHANGE = 0.05


def sensitivity(
    constants: Constants,
    columns: Sequence[str],
    score: Callable[[Constants], Sequence[Number]],
    *,
    trivial: tuple[str, Sequence[Number]],
    varied: Sequence[str] = VARIED,
) -> Table:
    """Return the scores as they are, with each constant changed, and what a trivial rule scores.  trivial: the rule, and its scores."""
    rows: list[tuple[Number, ...]] = [("as they are", *score(constants))]
    for name in varied:
        for sign in (-1, 1):
            changed = replace(constants, **{name: getattr(constants, name) * (1 + sign * CHANGE)})
            rows.append((f"{name} {sign * CHANGE:+.0%}", *score(changed)))
    rule, scores = trivial
    rows.append((f"trivial rule: {rule}", *scores))
    return Table(
        title="Sensitivity to 5 % of each constant, and what a trivial rule scores", columns=("constants", *columns), rows=tuple(rows)
    )
