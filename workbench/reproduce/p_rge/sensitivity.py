"""How much P-RGE's tables depend on each constant: the median and the largest deviation of what is not fitted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.reproduce.p_rge.testbed import Constants, median_deviation, worst
from workbench.reproduce.result import Comparison, Number, Table
from workbench.reproduce.sensitivity import sensitivity_table


def sensitivity(
    constants: Constants,
    compare: Callable[[Constants], Sequence[Comparison]],
    varied: Sequence[str],
    *,
    trivial: tuple[str, Sequence[Comparison]],
) -> Table:
    """Return the deviations as they are, with each constant changed, and of a trivial rule.

    compare: gives the comparisons of changed constants.  trivial: what the rule is, and its comparisons.
    """

    def score(comparisons: Sequence[Comparison]) -> tuple[Number, ...]:
        return median_deviation(comparisons), *worst(comparisons)

    return sensitivity_table(
        constants,
        ("median deviation % of what is not fitted", "largest %", "at"),
        lambda changed: score(compare(changed)),
        trivial=(trivial[0], score(trivial[1])),
        varied=varied,
    )
