"""Costs of P-RGE's parts on a device: passes, noise, sending losses, memory (P-RGE, sections 3.1 and 3.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile, layers_seconds, trainable_bytes
from workbench.methods.p_rge.options import Choice, Execution
from workbench.planners.memory import readable

EXECUTIONS: tuple[Execution, ...] = ("both", "outer", "inner", "sequential")
LOSS_BYTES = 4


def passes(execution: Execution, queries: int) -> tuple[int, int]:
    """Return (forward passes, parts per pass) for the 2 x queries parts (section 3.1 and 3.2)."""
    return {"sequential": (2 * queries, 1), "outer": (2, queries), "inner": (queries, 2), "both": (1, 2 * queries)}[execution]


class Passing(NamedTuple):
    """How a device computes its queries: the number per group, and the execution of each group."""

    queries: int
    execution: Execution

    def groups(self, queries: int) -> int:
        """Return the number of groups for `queries` queries."""
        return -(-queries // self.queries)

    @property
    def parts(self) -> int:
        """Return the parts of one pass."""
        return passes(self.execution, self.queries)[1]

    def passes(self, queries: int) -> tuple[int, int]:
        """Return (passes, parts per pass) of a group of `queries` queries; the last group may be smaller than the others."""
        return passes(self.execution, queries)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The size of one step: q queries, E samples each, their padded length in tokens; memory is computed for memory_length."""

    queries: int
    batch_size: int
    sequence_length: int
    memory_length: int
    execution: Choice = "auto"

    @property
    def executions(self) -> tuple[Execution, ...]:
        """Return the executions to choose from."""
        return EXECUTIONS if self.execution == "auto" else (self.execution,)

    def passings(self, queries: int, *, cut: bool = False) -> list[Passing]:
        """Return the ways to compute `queries` queries in equal groups; cut: allow several groups even if the execution is given."""
        sizes = [size for size in range(queries, 0, -1) if queries % size == 0]
        if self.execution != "auto" and not cut:
            sizes = [queries]
        return [Passing(size, execution) for size in sizes for execution in self.executions]


@dataclass(frozen=True, kw_only=True)
class RankCosts:
    """Costs of some layers on one device."""

    profile: Profile
    cluster: Cluster
    size: StepSize
    rank: int
    start: int
    stop: int

    @cached_property
    def _layers(self) -> tuple[LayerProfile, ...]:
        return self.profile.layers[self.rank][self.start : self.stop]

    def pass_s(self, parts: int) -> float:
        """Return the seconds of one forward pass of `parts` parts."""
        rows = parts * self.size.batch_size
        return layers_seconds(self._layers, "F", rows, self.size.sequence_length)

    def noise_s(self, queries: int) -> float:
        """Return the seconds to draw and add the noise of some queries, to perturb the parameters or to make the step."""
        return layers_seconds(self._layers, "STEP", queries, 1) if queries else 0.0

    def group_s(self, passing: Passing, queries: int | None = None) -> float:
        """Return the seconds of one group, its noise included.  queries: of the group, by default as many as the others have."""
        queries = passing.queries if queries is None else queries
        count, parts = passing.passes(queries)
        return count * self.pass_s(parts) + self.noise_s(queries)

    @property
    def resident_bytes(self) -> int:
        """Return the bytes that the device keeps: frozen weights, trained values and one query's noise."""
        return sum(layer.frozen_bytes + 2 * layer.trainable_bytes for layer in self._layers)

    def need_bytes(self, parts: int) -> int:
        """Return the bytes that these layers need to compute `parts` parts at once.

        These are frozen and trainable values, the parts' perturbed copies of the trainable values and their noise, the temporary memory of
        a pass, and its input and output.
        """
        rows, length = parts * self.size.batch_size, self.size.memory_length
        scratch = max(layer.workspace_bytes(rows, length) for layer in self._layers)
        crossing = 2 * max(layer.output_bytes(rows, length) for layer in self._layers)
        return sum(layer.frozen_bytes for layer in self._layers) + (2 + parts) * trainable_bytes(self._layers) + scratch + crossing

    def fits(self, parts: int) -> bool:
        """Return whether the device's memory suffices."""
        return self.need_bytes(parts) <= self.cluster.devices[self.rank].memory_bytes

    def best(self, queries: int) -> tuple[float, Passing | None]:
        """Return the seconds and the way of the fastest computation of `queries` queries that fits; infinity and None if none does."""
        found: tuple[float, Passing | None] = (math.inf, None)
        for passing in self.size.passings(queries):
            if self.fits(passing.parts):
                seconds = passing.groups(queries) * self.group_s(passing)
                if seconds < found[0]:
                    found = (seconds, passing)
        return found

    def told_s(self, ranks: Sequence[int], losses: int) -> float:
        """Return the seconds in which this device sends its losses to the others, one after the other."""
        nbytes = LOSS_BYTES * losses
        return sum(self.cluster.link(self.rank, other).transfer_s(nbytes) for other in ranks if other != self.rank)


def stage_costs(profile: Profile, cluster: Cluster, plan: Plan, size: StepSize) -> dict[int, RankCosts]:
    """Return the costs of each rank of a plan, for the layers of its stage."""
    return {
        rank: RankCosts(profile=profile, cluster=cluster, size=size, rank=rank, start=stage.start, stop=stage.stop)
        for stage in plan.stages
        for rank in stage.ranks
    }


def whole(profile: Profile, cluster: Cluster, size: StepSize) -> list[RankCosts]:
    """Return every device's costs of the whole model."""
    return [
        RankCosts(profile=profile, cluster=cluster, size=size, rank=rank, start=0, stop=profile.num_layers)
        for rank in range(cluster.world_size)
    ]


def too_small(costs: RankCosts, queries: int) -> PlanError:
    """Return the error of a device whose memory is too small for its layers and the smallest pass of its queries."""
    device = costs.cluster.devices[costs.rank]
    parts = min(passing.parts for passing in costs.size.passings(queries))
    layers = f"layers {costs.start}-{costs.stop - 1}"
    return PlanError(
        f"Device '{device.name}' has {readable(device.memory_bytes)};",
        f"{layers} need {readable(costs.need_bytes(parts))} for {parts} of {2 * queries} parts of {costs.size.batch_size} samples at once.",
        "Add a device, raise its memory, lower batch_size or max_length, choose execution 'auto', or quantize the backbone.",
    )
