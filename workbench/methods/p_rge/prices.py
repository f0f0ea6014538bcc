"""What a step's operations take on every device, by profile and cluster: what the simulator asks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.profile import LayerProfile, Profile
from workbench.core.schedule import SEND, STEP, Op, Value
from workbench.methods.common.layers import layers_seconds
from workbench.methods.p_rge.layout import QueryStep
from workbench.planners.adaptive import Setting
from workbench.planners.query_costs import LOSS_BYTES


class Shape(NamedTuple):
    """A step's setting, and for how many tokens each of its rows is computed."""

    setting: Setting
    length: int


class QueryCosts:
    """Costs of one step: a core.costs.Costs."""

    def __init__(self, profile: Profile, cluster: Cluster, step: QueryStep, shape: Shape) -> None:
        self._profile, self._cluster, self._step, self._shape = profile, cluster, step, shape

    @cached_property
    def _layers(self) -> dict[int, tuple[LayerProfile, ...]]:
        stages = self._step.plan.stages
        return {rank: self._profile.layers[rank][stage.start : stage.stop] for stage in stages for rank in stage.ranks}

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.nbytes(op.reads[0]))
        layers, shape = self._layers[rank], self._shape
        if op.kind == STEP:
            return layers_seconds(layers, STEP, shape.setting.queries, 1)
        queries = len(self._step.queries(op.part))
        count, parts = self._step.passings[rank].passes(queries)
        rows = parts * shape.setting.batch_size
        return count * layers_seconds(layers, "F", rows, shape.length) + layers_seconds(layers, STEP, queries, 1)

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs): of losses also the word that may ask for a pause."""
        if value.name == "loss":
            return LOSS_BYTES * (2 * len(self._step.queries(value.part)) + 1)
        if value.name == "act":
            stage = self._step.plan.stages[value.stage]
            rows = 2 * len(self._step.queries(value.part)) * self._shape.setting.batch_size
            return self._profile.layers[stage.ranks[0]][stage.stop - 1].output_bytes(rows, self._shape.length)
        return 0

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes of what a device keeps: frozen weights, trained values and one query's noise."""
        return sum(layer.frozen_bytes + 2 * layer.trainable_bytes for layer in self._layers.get(rank, ()))
