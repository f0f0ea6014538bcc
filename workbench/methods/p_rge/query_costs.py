"""Costs of P-RGE's parts on a device: passes, noise, sending losses, memory (P-RGE, sections 3.1 and 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from workbench.core.errors import PlanError
from workbench.core.plan import Plan, named_layers
from workbench.core.profile import Layers, Profile, trainable_bytes
from workbench.methods.p_rge.estimator_table import ESTIMATORS
from workbench.methods.p_rge.options import Execution
from workbench.planners.memory import Demand, too_small
from workbench.planners.problem import Problem

LOSS_BYTES = 4


def passes(execution: Execution, queries: int, query_parts: int = 2) -> tuple[int, int]:
    """Return (forward passes, parts per pass) for the parts of some queries (section 3.1 and 3.2)."""
    return {
        "sequential": (query_parts * queries, 1),
        "outer": (query_parts, queries),
        "inner": (queries, query_parts),
        "both": (1, query_parts * queries),
    }[execution]


class Passing(NamedTuple):
    """How a device computes its queries: the number per group, the execution of each group, and the parts of a
    query.
    """

    queries: int
    execution: Execution
    query_parts: int = 2

    def groups(self, queries: int) -> int:
        """Return the number of groups for `queries` queries."""
        return -(-queries // self.queries)

    @property
    def parts(self) -> int:
        """Return the parts of one pass."""
        return self.passes(self.queries)[1]

    def passes(self, queries: int) -> tuple[int, int]:
        """Return (passes, parts per pass) of a group of `queries` queries; the last group may be smaller than the
        others.
        """
        return passes(self.execution, queries, self.query_parts)


def passings(problem: Problem[Profile], queries: int, *, cut: bool = False) -> list[Passing]:
    """Return the ways to compute `queries` queries in equal groups; cut: whether to allow several groups even if the
    execution is given.
    """
    rule = ESTIMATORS[problem.estimator]
    sizes = [size for size in range(queries, 0, -1) if queries % size == 0]
    if problem.execution != "auto" and not cut:
        sizes = [queries]
    executions = [execution for execution in rule.executions if problem.execution in ("auto", execution)]
    return [Passing(size, execution, rule.query_parts) for size in sizes for execution in executions]


def momentum_copies(problem: Problem[Profile]) -> int:
    """Return the copies of the trained values that momentum takes at most: that of a vector is as large as it."""
    return int(ESTIMATORS[problem.estimator].has_momentum)


@dataclass(frozen=True, kw_only=True)
class QueryCosts:
    """Seconds and bytes of queries in layers [start, stop) on one device."""

    problem: Problem[Profile]
    rank: int
    start: int
    stop: int

    @cached_property
    def _layers(self) -> Layers:
        return self.problem.profile.layers[self.rank][self.start : self.stop]

    def pass_s(self, parts: int) -> float:
        """Return the seconds of one forward pass of `parts` parts."""
        rows = parts * self.problem.batch_size
        return self._seconds("F", rows, self.problem.sequence_length)

    def noise_s(self, queries: int) -> float:
        """Return the seconds to draw and add the noise of some queries, to perturb the parameters or to make
        the step.
        """
        return self._seconds("STEP", queries, 1) if queries else 0.0

    def _seconds(self, kind: str, batch: int, sequence_length: int) -> float:
        return self.problem.profile.seconds(self.rank, kind, batch, sequence_length, self.start, self.stop)

    def group_s(self, passing: Passing, queries: int | None = None) -> float:
        """Return the seconds of one group, its noise included.

        queries: number of queries in the group, by default as many as the other groups have.
        """
        queries = passing.queries if queries is None else queries
        count, parts = passing.passes(queries)
        pass_s = ESTIMATORS[self.problem.estimator].pass_cost * self.pass_s(parts)
        return count * pass_s + self.noise_s(queries)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes that the device keeps: frozen weights, trained values, one query's noise, and momentum."""
        return sum(
            layer.frozen_bytes + (2 + momentum_copies(self.problem)) * layer.trainable_bytes for layer in self._layers
        )

    def need_bytes(self, parts: int) -> int:
        """Return the bytes that these layers need to compute `parts` parts at once.

        These are frozen and trainable values, the parts' perturbed copies of the trainable values and their noise,
        momentum, the temporary memory of a pass, and its input and output.
        """
        rows, length = parts * self.problem.batch_size, self.problem.longest
        scratch = max(layer.workspace_bytes(rows, length) for layer in self._layers)
        crossing = 2 * max(layer.output_bytes(rows, length) for layer in self._layers)
        return (
            sum(layer.frozen_bytes for layer in self._layers)
            + (2 + momentum_copies(self.problem) + parts) * trainable_bytes(self._layers)
            + scratch
            + crossing
        )

    def fits(self, parts: int) -> bool:
        """Return whether the device's memory suffices."""
        return self.need_bytes(parts) <= self.problem.cluster.devices[self.rank].memory_bytes

    def best(self, queries: int) -> tuple[float, Passing | None]:
        """Return the seconds and the way of the fastest computation of `queries` queries that fits; infinity and None
        if none does.
        """
        if queries not in self._best:  # a search over sets of devices asks for the same again and again
            self._best[queries] = self._find_best(queries)
        return self._best[queries]

    @cached_property
    def _best(self) -> dict[int, tuple[float, Passing | None]]:
        return {}

    def _find_best(self, queries: int) -> tuple[float, Passing | None]:
        fastest: tuple[float, Passing | None] = (math.inf, None)
        for passing in passings(self.problem, queries):
            if self.fits(passing.parts):
                seconds = passing.groups(queries) * self.group_s(passing)
                if seconds < fastest[0]:
                    fastest = (seconds, passing)
        return fastest

    def told_s(self, ranks: Sequence[int], losses: int) -> float:
        """Return the seconds that this device takes to send its losses to the others, one after the other."""
        nbytes = LOSS_BYTES * losses
        return sum(
            self.problem.cluster.link(self.rank, other).transfer_s(nbytes) for other in ranks if other != self.rank
        )


def stage_costs(problem: Problem[Profile], plan: Plan) -> dict[int, QueryCosts]:
    """Return the costs of each rank of a plan, for the layers of its stage."""
    return {
        rank: QueryCosts(problem=problem, rank=rank, start=stage.start, stop=stage.stop)
        for stage in plan.stages
        for rank in stage.ranks
    }


def full_model_costs(problem: Problem[Profile]) -> list[QueryCosts]:
    """Return every device's costs of the whole model."""
    return [
        QueryCosts(problem=problem, rank=rank, start=0, stop=problem.profile.num_layers)
        for rank in range(problem.cluster.world_size)
    ]


def refusal(costs: QueryCosts, queries: int) -> PlanError:
    """Return the error of a device whose memory is too small for its layers and the smallest pass of its queries."""
    parts = min(passing.parts for passing in passings(costs.problem, queries))
    query_parts = ESTIMATORS[costs.problem.estimator].query_parts
    layers = named_layers(costs.start, costs.stop)
    part = f"a pass of {parts} of {query_parts * queries} parts of {costs.problem.batch_size} samples in {layers}"
    why = "" if costs.problem.execution == "auto" else " With execution 'auto' it may need less."
    return too_small(costs.problem.cluster, Demand(costs.rank, part, costs.need_bytes(parts)), why)
