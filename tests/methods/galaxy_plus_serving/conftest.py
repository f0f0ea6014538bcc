"""A small world of unequal devices for the portal's tests, with a planner and prices that can be reckoned by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import pytest

from tests.clusters import cluster_of
from tests.plans import inference_plan
from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.errors import PlanError
from workbench.core.heat import Levels
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.proportions import proportional_parts
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile, PieceCost, StackTimes
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import BlockTimes
from workbench.methods.galaxy_plus.serving.simulation import simulate_serving

WORK_S = 0.0004  # of one unit in one block on a device of speed 1
EXCHANGE_S = 0.002  # between two blocks, with more than one device


@dataclass(frozen=True)
class World:
    """Devices of given speeds; a model of 2 layers (4 blocks) and `units` units.  most_units: that a device can
    hold."""

    speeds: tuple[float, ...] = (1.0, 1.0, 0.5, 0.5)
    units: int = 30
    most_units: int = 30
    curves: Mapping[int, Levels] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        return cluster_of(
            len(self.speeds),
            flops_per_s=[1e9 * speed for speed in self.speeds],
            bytes_per_s=1e8,
            latency_s=1e-4,
            storage_bytes_per_s=1e6,
            sustained=[self.curves.get(rank, ()) for rank in range(len(self.speeds))],
        )

    @property
    def profile(self) -> InferenceProfile:
        shape = StackShape(
            num_layers=2,
            num_units=self.units,
            hidden_size=8,
            columns=self.units,
            unit_bytes=20_000,
            column_bytes=10_000,
        )
        costs = tuple((StackTimes(pieces={"QKV": PieceCost(unit_s=WORK_S / speed)}),) for speed in self.speeds)
        return InferenceProfile(model="hand-made", source="analytic", stacks=(shape,), costs=costs)

    def plan(self, ranks: tuple[int, ...]) -> InferencePlan:
        weights = [self.speeds[rank] for rank in ranks]
        units = proportional_parts(self.units, weights)
        if max(units) > self.most_units:
            raise PlanError("A plan was asked for.", "It does not fit.", "Add a device.")
        plan = inference_plan(
            method="galaxy_plus",
            ranks=ranks,
            units=units,
            columns=units,
            shares=tuple(weights),
            schemes=(1, 1),
            length=16,
        )
        return replace(plan, predicted_s=self.times(plan, {}).seconds)

    def times(self, plan: InferencePlan, slow_downs: Mapping[int, float]) -> BlockTimes:
        blocks = {
            rank: {block: plan.units[i] * WORK_S / self.speeds[rank] * slow_downs.get(rank, 1.0) for block in range(4)}
            for i, rank in enumerate(plan.ranks)
            if plan.units[i]
        }
        exchange_s = EXCHANGE_S if len(plan.ranks) > 1 else 0.0
        return BlockTimes(sum(max(by[block] for by in blocks.values()) + exchange_s for block in range(4)), blocks)

    def serve(
        self,
        num_requests: int,
        *faults: Fault,
        rate_per_s: float = 0.0,
        seed: int = 0,
        noise: float = 0.0,
        draws: int = 0,
        **settings: object,
    ) -> ServingReport:
        return simulate_serving(
            self.profile,
            self.cluster,
            self.plan,
            self.times,
            stream=StreamSettings(num_requests=num_requests, rate_per_s=rate_per_s, seed=seed),
            rescheduling=ReschedulingSettings(**settings),  # type: ignore[arg-type]
            faults=faults,
            noise=noise,
            seed=draws,
        )


@pytest.fixture(scope="session")
def make_world() -> Callable[..., World]:
    return World
