"""What a step's operations take on every device, by profile and cluster: what the simulator asks."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import TOKEN, Spec, opaque
from workbench.core.profile import LayerProfile, Profile
from workbench.core.schedule import SEND, STEP, Op, Value
from workbench.methods.common.layers import layers_seconds
from workbench.methods.p_rge.layout import QueryStep
from workbench.planners.adaptive import Setting
from workbench.schedules.plan_costs import Crossing


class Shape(NamedTuple):
    """A step's setting, and for how many tokens each of its rows is computed.

    rows, tokens: of one part's hidden states; crossing: what they are.  None where a step is only priced.
    """

    setting: Setting
    length: int
    rows: int = 0
    tokens: int = 0
    crossing: Crossing | None = None


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
        stage, shape = self._step.plan.stages[value.stage], self._shape
        if shape.crossing is not None:
            tokens = shape.crossing.tokens(stage.stop, shape.tokens)
            return Spec((parts * shape.rows, tokens, shape.crossing.hidden_size), shape.crossing.dtype)
        layer = self._profile.layers[stage.ranks[0]][stage.stop - 1]
        return opaque(layer.output_bytes(parts * shape.setting.batch_size, shape.length))

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes of what a device keeps: frozen weights, trained values and one query's noise."""
        return sum(layer.frozen_bytes + 2 * layer.trainable_bytes for layer in self._layers.get(rank, ()))
