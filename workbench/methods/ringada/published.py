"""Time of a mini-batch in Single, PipeAdapter and RingAda on the paper's devices, simulated (RingAda, section IV, Table
I).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from workbench.core.catalogue import data_folder
from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.published import constants_of
from workbench.core.timeline import Timeline
from workbench.methods.ringada.costs import RingLayout, ring_costs
from workbench.methods.ringada.estimate import RingEstimate
from workbench.methods.ringada.planner import plan_ring
from workbench.methods.ringada.schedule import Iteration, ring_round
from workbench.planners import Problem
from workbench.profiler.analytic import layer_costs
from workbench.profiler.descriptions import ModelDescription
from workbench.schedules.costs import Crossing
from workbench.simulator import simulate
from workbench.simulator.steps import SAMPLES, equal_blocks

SINGLE, PIPE, RING, FEDERATED, PARALLEL = "Single", "PipeAdapter", "RingAda", "FedAvg", "Parallel Adapters"
TOGETHER = 40
"""Mini-batches simulated one after the other and averaged: the paper's number between two unfreezings."""


def simulated_round(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    iterations: Sequence[Iteration],
    *,
    has_side: bool = False,
    memory: bool = False,
) -> Timeline:
    """Return a round of mini-batches of SAMPLES samples.  memory: whether to compute the bytes in use, too."""
    return simulate(round_program(profile, cluster, plan, iterations, has_side=has_side), memory=memory)


def round_program(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    iterations: Sequence[Iteration],
    *,
    has_side: bool = False,
    hidden: int = 1,
) -> Program:
    """Return a round of mini-batches of SAMPLES samples.  hidden: numbers of a sample that cross a boundary."""
    sizes = tuple(
        SAMPLES // iteration.num_micro_batches for iteration in iterations for _ in range(iteration.num_micro_batches)
    )
    crossing = Crossing(hidden_size=hidden, side_width=int(has_side))
    layout = RingLayout(plan, iterations, sizes, (1,) * len(sizes))
    costs = ring_costs(profile, cluster, layout, crossing=crossing, head_values=1, beside_bytes=0)
    schedule = ring_round(plan, iterations, costs.seconds, in_flight=8, has_side=has_side)
    return Program.on(cluster, schedule, costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/ringada/constants.toml, which states the source of each value."""

    layer_s: float
    backward: float
    micro_batches: int
    epochs: float
    unfreeze_every: float
    devices: int
    layers: int
    hidden: int
    feed_forward: int
    vocabulary: int
    positions: int

    @property
    def model(self) -> ModelDescription:
        """Return mBERT's sizes."""
        return ModelDescription(
            name="mBERT",
            kind="encoder",
            num_layers=self.layers,
            hidden=self.hidden,
            heads=self.hidden // 64,
            feed_forward=self.feed_forward,
            vocab=self.vocabulary,
            positions=self.positions,
        )


def load_constants() -> Constants:
    """Read the constants."""
    return constants_of(data_folder() / "papers/ringada/constants.toml", Constants)


def depth_of(constants: Constants, scheme: str, step: int) -> int:
    """Return the number of trained adapters in a step."""
    layers = constants.layers
    return min(layers, 1 + int(step // constants.unfreeze_every)) if scheme in (RING, PARALLEL) else layers


@lru_cache(maxsize=64)
def layer_times(constants: Constants, scheme: str, micro_batches: int) -> tuple[dict[int, float], Plan | None]:
    """Return the time of a mini-batch by the number of trained adapters, in forward passes of one block, and the plan.

    PipeAdapter is the variant without stale weights.  FedAvg trains a mini-batch on each device at once; its averages
    are free.
    Parallel Adapters are on the ring; their cost is that of their FLOPs with 128 tokens.
    """
    layers, steps = constants.layers, range(round(constants.epochs))
    if scheme in (SINGLE, FEDERATED):
        at_once = constants.devices if scheme == FEDERATED else 1
        return {layers: (1 + constants.backward) * layers / at_once}, None
    depths = Counter(depth_of(constants, scheme, step) for step in steps)
    block = layer_costs(constants.model, "parallel_adapters", batch=1, sequence_length=128)[1]
    side = block.side_forward_flops / block.forward_flops if scheme == PARALLEL else 0.0
    profile, cluster = equal_blocks(layers, constants.devices, constants.backward, side=side)
    problem = Problem(profile, cluster, batch_size=SAMPLES, micro_batches=micro_batches, sequence_length=1)
    plan = plan_ring(RingEstimate(problem, depths=depths, has_side=side > 0))
    rounds = {depth: [Iteration(0, layers - depth, micro_batches)] * TOGETHER for depth in depths}
    seconds = {
        depth: simulated_round(profile, cluster, plan, each, has_side=side > 0).makespan_s / TOGETHER
        for depth, each in rounds.items()
    }
    return seconds, plan


def average(constants: Constants, scheme: str, micro_batches: int) -> float:
    """Return the layer times of a mini-batch, averaged over the run."""
    times, _ = layer_times(constants, scheme, micro_batches)
    return fmean(times[depth_of(constants, scheme, step)] for step in range(round(constants.epochs)))
