"""The programs of a PAC+ run: built alike by the driver, which simulates them, and by every rank, which executes them."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.collective_times import ring_allreduce_s
from workbench.core.costs import TOKEN, Spec, opaque
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.program import Program
from workbench.core.schedule import ALLREDUCE, RECV, SEND, Op, Schedule, Value
from workbench.methods.common.layers import layers_seconds
from workbench.methods.training.steps import StepShape
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.schedules.cached import cached_step
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.pipeline import ORDERS, OrderName, hybrid_1f1b
from workbench.schedules.plan_costs import Crossing, PlanCosts, resident_bytes, trainable_bytes


class Programs:
    """Programs of one plan on one cluster.  Schedules are built once for each shape.

    hidden_dtype: in which the backbone computes.  schedule: the order of the first epoch's micro-batches.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        config: ParallelAdapterConfig,
        *,
        hidden_dtype: str = "float32",
        schedule: OrderName = "1f1b",
    ) -> None:
        self._profile, self._cluster, self._plan, self._order = profile, cluster, plan, ORDERS[schedule]
        self._crossing = Crossing(
            hidden_size=config.hidden_size,
            dtype=hidden_dtype,
            side_width=config.width,
            num_encoder_layers=config.num_encoder_layers,
            target_length=config.target_length,
        )
        self._schedules: dict[object, Schedule] = {}

    def hybrid(self, shape: StepShape, *, backbone_only: bool = False) -> Program:
        """Return a step of the first epoch (section V-A).  backbone_only: leave out all training, to fill the activation cache again."""
        key = (shape.sizes, backbone_only)
        if key not in self._schedules:
            whole = insert_transfers(hybrid_1f1b(self._plan, shape.sizes, world_size=self._cluster.world_size, order=self._order))
            self._schedules[key] = _backbone_part(whole) if backbone_only else whole
        costs = PlanCosts(self._profile, self._cluster, self._plan, sizes=shape.sizes, lengths=shape.lengths, crossing=self._crossing)
        return Program.on(self._cluster, self._schedules[key], costs)

    def cached(self, shape: StepShape) -> Program:
        """Return a step from the cache (section V-B).  shape: of every rank's share; one of 0 samples only takes part in the all-reduce."""
        stage = self._plan.cached
        assert stage is not None, "a plan without shares for cached epochs"
        key = ("cached", shape.sizes)
        if key not in self._schedules:
            self._schedules[key] = cached_step(stage, [shape.sizes[rank] for rank in stage.ranks], world_size=len(shape.sizes))
        return Program.on(self._cluster, self._schedules[key], CachedCosts(profile=self._profile, cluster=self._cluster, shape=shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCosts:
    """Costs of a step from the cache: a core.costs.Costs.  shape: of every rank's share."""

    profile: Profile
    cluster: Cluster
    shape: StepShape

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        layers = self.profile.layers[rank]
        if op.kind == ALLREDUCE:
            return ring_allreduce_s(self.cluster, op.ranks, trainable_bytes(layers))
        if op.kind == "STEP":
            return layers_seconds(layers, "STEP", 1, 1)
        return layers_seconds(layers, op.kind, self.shape.sizes[rank], self.shape.lengths[rank])

    def spec(self, value: Value) -> Spec:
        """Return a value's bytes (see Costs); none of it crosses devices by itself."""
        if value.name == "gsum":
            return opaque(trainable_bytes(self.profile.layers[value.part]))
        if value.name not in ("tap", "ctx"):
            return TOKEN
        kept = LayerProfile.tap_bytes if value.name == "tap" else LayerProfile.context_bytes
        samples, length = self.shape.sizes[value.part], self.shape.lengths[value.part]
        return opaque(sum(kept(layer, samples, length) for layer in self.profile.layers[value.part]))

    def resident_bytes(self, rank: int) -> int:
        """Return the adapter, its gradients and its optimizer state in bytes; the backbone is released."""
        return adapter_bytes(self.profile, rank)


def adapter_bytes(profile: Profile, rank: int) -> int:
    """Return what the whole adapter keeps on a rank: its weights, gradients and optimizer state."""
    layers = profile.layers[rank]
    return resident_bytes(profile, layers) - sum(layer.frozen_bytes for layer in layers)


def _backbone_part(schedule: Schedule) -> Schedule:
    """Return the schedule with nothing but backbone forward passes and the transfers between them."""

    def belongs(op: Op) -> bool:
        return op.kind == "F" or (op.kind in (SEND, RECV) and (op.reads or op.writes)[0].name == "act")

    return Schedule(ops=tuple(tuple(op for op in ops if belongs(op)) for ops in schedule.ops), inputs=schedule.inputs)
