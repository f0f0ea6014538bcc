"""The gradient estimators of forward-only training: their passes, directions, and how losses become slopes.

A step has q random directions.  A query is the computation for one of them; it yields
`query_parts` numbers, its parts.
P-RGE: section 2 and Algorithm 1.
FZOO: Dang et al., "FZOO: Fast Zeroth-Order Optimizer for Fine-Tuning Large Language Models towards Adam-Scale Speed",
ICLR 2026, arXiv:2506.09034, with the arithmetic of the authors' code.
LOZO: Chen et al., "Enhancing Zeroth-Order Fine-Tuning for Language Models with Low-Rank Structures", ICLR 2025,
arXiv:2410.07698, section 4, and its variant with momentum, LOZO-M.
Forward gradient: Baydin et al., "Gradients without Backpropagation", arXiv:2202.08587, Definition 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import pstdev
from types import MappingProxyType
from typing import Literal

from workbench.methods.p_rge.options import Execution

DirectionKind = Literal["normal", "rademacher", "low_rank"]

Results = Mapping[int, Sequence[float]]
"""The parts of each computed query, by the query's number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorRule:
    """An entry of the table.

    signs: for each perturbed part of a query the factor of its perturbation.  has_base: query 0 has no direction; its
    only part is the loss of theta itself, and the directions are queries 1 to q.  tangent: the second part is not a
    loss, but the derivative along the direction, from the same pass.
    direction: how a direction is drawn from its seed.  executions: the ways in which a device can compute the parts.
    min_directions: the fewest directions from which a step can be made.  slopes: (results, epsilon) -> the factor of
    each direction in the update, by query; empty if the results do not suffice.
    has_momentum: whether a step also goes along the former steps (see Trainables.apply).
    pass_cost: the time of a pass over that of one of as many parts without derivatives (measured for 'jvp':
    all-MiniLM-L6-v2, q = 4, E = 4, .68 against .32 s of one core).
    """

    signs: tuple[int, ...]
    direction: DirectionKind
    slopes: Callable[[Results, float], dict[int, float]]
    executions: tuple[Execution, ...] = ("both", "outer", "inner", "sequential")
    has_base: bool = False
    tangent: bool = False
    has_momentum: bool = False
    min_directions: int = 1
    pass_cost: float = 1.0

    @property
    def query_parts(self) -> int:
        """Return the number of parts of a query."""
        return 2 if self.tangent else len(self.signs)

    def num_queries(self, directions: int) -> int:
        """Return the number of a step's queries for a number of directions."""
        return directions + self.has_base

    def num_passes(self, directions: int) -> int:
        """Return a step's passes, a tangent counted as one."""
        return self.query_parts * self.num_queries(directions)

    def sign(self, query: int, part: int) -> int:
        """Return the factor of a part's perturbation."""
        return 0 if self.has_base and query == 0 else self.signs[part]

    def losses(self, results: Results) -> list[float]:
        """Return the losses among the results."""
        return [value for parts in results.values() for value in (parts[:1] if self.tangent else parts)]


def two_point_slopes(results: Results, epsilon: float) -> dict[int, float]:
    """Return g_i = (l_i+ - l_i-) / (2 epsilon) (P-RGE, Algorithm 1, line 10; LOZO, section 4.1, without its 1 / r)."""
    return {query: (plus - minus) / (2 * epsilon) for query, (plus, minus) in results.items()}


def one_sided_slopes(results: Results, epsilon: float) -> dict[int, float]:
    """Return (l_i - l_0) / sigma: one-sided differences over the standard deviation sigma of the losses l_1 ... l_q.

    The epsilon of difference and deviation cancels out, so that the learning rate is the length of a step whatever the
    slope is.  sigma divides by the number of losses.  All 0 if the losses are all the same.
    """
    losses = {query: parts[0] for query, parts in results.items() if query}
    if 0 not in results or len(losses) < ESTIMATORS["one_sided"].min_directions:
        return {}
    base, deviation = results[0][0], pstdev(losses.values()) if all(map(math.isfinite, losses.values())) else math.nan
    return {query: (loss - base) / deviation if deviation else 0.0 for query, loss in losses.items()}


def tangent_slopes(results: Results, epsilon: float) -> dict[int, float]:
    """Return the derivatives along the directions, which the passes have computed."""
    return {query: slope for query, (_, slope) in results.items()}


ESTIMATORS: Mapping[str, EstimatorRule] = MappingProxyType(
    {
        "two_point": EstimatorRule(
            signs=(1, -1),
            direction="normal",
            slopes=two_point_slopes,
        ),
        "one_sided": EstimatorRule(
            signs=(1,),
            direction="rademacher",
            slopes=one_sided_slopes,
            executions=("both", "sequential"),
            has_base=True,
            min_directions=2,
        ),
        "low_rank": EstimatorRule(
            signs=(1, -1),
            direction="low_rank",
            slopes=two_point_slopes,
        ),
        "low_rank_momentum": EstimatorRule(
            signs=(1, -1),
            direction="low_rank",
            slopes=two_point_slopes,
            has_momentum=True,
        ),
        "jvp": EstimatorRule(
            signs=(1,),
            direction="normal",
            slopes=tangent_slopes,
            executions=("both", "inner"),
            tangent=True,
            pass_cost=2.1,
        ),
    }
)
