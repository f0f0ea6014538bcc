"""Costs of a step: from a profile and a cluster to the simulator's and the pacer's seconds and bytes."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.schedule import SEND, Op, Value
from workbench.methods.fine_tuning.layout import BackpropagationStep
from workbench.schedules.backpropagation import SHARE
from workbench.schedules.plan_costs import PlanCosts
from workbench.schedules.plan_costs import resident_bytes as layers_resident_bytes

FP32_BYTES = 4


class BackpropagationCosts:
    """Prices of a BackpropagationStep, a `Costs`: PlanCosts, and the gradients of shared parameters."""

    def __init__(self, profile: Profile, cluster: Cluster, step: BackpropagationStep) -> None:
        self._cluster, self._step = cluster, step
        self._plan_costs = PlanCosts(profile, cluster, step.plan, sizes=step.shape.sizes, lengths=step.shape.lengths)

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs); of SHARE, which copies, none."""
        if op.kind == SEND and op.reads[0].name == "shared":
            return self._cluster.link(*op.ranks).transfer_s(self.nbytes(op.reads[0]))
        return 0.0 if op.kind == SHARE else self._plan_costs.seconds(rank, op)

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        return FP32_BYTES * self._step.shared[value.part].numel if value.name == "shared" else self._plan_costs.nbytes(value)

    def resident_bytes(self, rank: int) -> int:
        """Return weights, gradients and optimizer state in bytes."""
        return self._plan_costs.resident_bytes(rank)


def resident_bytes(profile: Profile, plan: Plan, rank: int) -> int:
    """Return the bytes that stay on a rank: weights, gradients, optimizer state; 0 for one that the plan leaves idle."""
    index = plan.stage_of(rank)
    if index is None:
        return 0
    stage = plan.stages[index]
    return layers_resident_bytes(profile, profile.layers[rank][stage.start : stage.stop])
