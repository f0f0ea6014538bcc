"""How much a table depends on each constant: the scores with 5 % less and 5 % more of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from workbench.reproduce.pac_plus.testbed import Constants
from workbench.reproduce.result import Number, Table

VARIED = (
    "achieved_share",
    "backward_factor",
    "side_factor",
    "operation_overhead_s",
    "step_overhead_s",
    "nano_bytes",
    "link_efficiency",
    "nano_mb_per_s",
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
    """Return the scores as they are, with each constant changed, and what a trivial rule scores.

    trivial: what the rule is, and its scores.  tx2_bytes goes with nano_bytes, tx2_mb_per_s with nano_mb_per_s.
    """
    rows: list[tuple[Number, ...]] = [("as they are", *score(constants))]
    for name in varied:
        for sign in (-1, 1):
            names = (name, name.replace("nano", "tx2")) if name.startswith("nano") else (name,)
            changed = {each: getattr(constants, each) * (1 + sign * CHANGE) for each in names}
            rows.append((f"{name} {sign * CHANGE:+.0%}", *score(replace(constants, **changed))))
    rule, scores = trivial
    rows.append((f"trivial rule: {rule}", *scores))
    return Table(
        title="Sensitivity to 5 % of each constant, and what a trivial rule scores", columns=("constants", *columns), rows=tuple(rows)
    )
