"""The programs of a fine-tuning run: built alike by the driver, which simulates them, and by every rank, which executes them."""

from __future__ import annotations

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.schedule import Schedule
from workbench.methods.common.steps import StepShape
from workbench.methods.fine_tuning.layout import TARGET_LENGTH, SharedParameter
from workbench.models.facts import ModelFacts
from workbench.schedules.backpropagation import backpropagation
from workbench.schedules.lowering import insert_transfers
from workbench.schedules.plan_costs import Crossing, PlanCosts

FP32_BYTES = 4


class Programs:
    """Programs of one plan on one cluster; schedules are built once for each shape.

    facts: None for a model that is only priced.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, plan: Plan, facts: ModelFacts | None, shared: tuple[SharedParameter, ...] = ()
    ) -> None:
        self._profile, self._cluster, self._plan, self._shared = profile, cluster, plan, shared
        self._crossing = None
        if facts is not None:
            self._crossing = Crossing(
                hidden_size=facts.hidden_size, num_encoder_layers=facts.num_encoder_layers, target_length=TARGET_LENGTH
            )
        self._schedules: dict[tuple[int, ...], Schedule] = {}

    def step(self, shape: StepShape) -> Program:
        """Return one optimizer step: 1F1B over pipeline stages and device groups."""
        if shape.sizes not in self._schedules:
            stages = [parameter.stages for parameter in self._shared]
            schedule = backpropagation(self._plan, shape.sizes, shared=stages, world_size=self._cluster.world_size)
            self._schedules[shape.sizes] = insert_transfers(schedule)
        costs = PlanCosts(
            self._profile,
            self._cluster,
            self._plan,
            sizes=shape.sizes,
            lengths=shape.lengths,
            shared_bytes=[FP32_BYTES * parameter.numel for parameter in self._shared],
            crossing=self._crossing,
        )
        return Program.on(self._cluster, self._schedules[shape.sizes], costs)
