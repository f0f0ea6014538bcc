"""A step's program: what its operations take on every device, by profile and cluster.  Driver and ranks make it alike."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from workbench.core.cluster import Cluster
from workbench.core.costs import TOKEN, Spec
from workbench.core.profile import LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.schedule import SEND, STEP, Op, Value
from workbench.methods.common.layers import layers_seconds
from workbench.methods.p_rge.layout import QueryStep, Shape
from workbench.schedules.plan_costs import Crossing


def step_program(profile: Profile, cluster: Cluster, step: QueryStep, shape: Shape, crossing: Crossing) -> Program:
    """Return the program of a step.  crossing: the hidden states that go from stage to stage."""
    costs = QueryCosts(profile, cluster, step, shape, replace(crossing, target_length=shape.target_length))
    return Program.on(cluster, step.schedule, costs)


class QueryCosts:
    """Costs of one step: a core.costs.Costs."""

    def __init__(self, profile: Profile, cluster: Cluster, step: QueryStep, shape: Shape, crossing: Crossing) -> None:
        self._profile, self._cluster, self._step, self._shape, self._crossing = profile, cluster, step, shape, crossing

    @cached_property
    def _layers(self) -> dict[int, tuple[LayerProfile, ...]]:
        stages = self._step.plan.stages
        return {rank: self._profile.layers[rank][stage.start : stage.stop] for stage in stages for rank in stage.ranks}

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.spec(op.reads[0]).nbytes)
        layers, shape = self._layers[rank], self._shape
        if op.kind == STEP:
            return layers_seconds(layers, STEP, shape.setting.queries, 1)
        queries = len(self._step.queries(op.part))
        count, parts = self._step.passings[rank].passes(queries)
        rows = parts * shape.setting.batch_size
        return count * layers_seconds(layers, "F", rows, shape.length) + layers_seconds(layers, STEP, queries, 1)

    def spec(self, value: Value) -> Spec:
        """Return a value's shape and dtype (see Costs): with the losses travels a word that may ask for a pause."""
        if value.name not in ("loss", "act"):
            return TOKEN
        parts = 2 * len(self._step.queries(value.part))
        if value.name == "loss":
            return Spec((parts + 1,))
        tokens = self._crossing.tokens(self._step.plan.stages[value.stage].stop, self._shape.tokens)
        return Spec((parts * self._shape.rows, tokens, self._crossing.hidden_size), self._crossing.dtype)

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes of what a device keeps: frozen weights, trained values and one query's noise."""
        return sum(layer.frozen_bytes + 2 * layer.trainable_bytes for layer in self._layers.get(rank, ()))
