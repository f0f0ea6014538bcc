"""Every method of the evaluation in an environment: its plan, and the simulated seconds of one sequence (Galaxy+, section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, InferenceProfile, proportional_parts
from workbench.planners.galaxy_plus import (
    InferencePlanner,
    algorithm_1,
    capacity,
    check_inference,
    edgeshard,
    galaxy,
    megatron_lm,
    sequence_parallel,
    stack_lengths,
)
from workbench.reproduce.galaxy_plus.printed import printed_s
from workbench.reproduce.galaxy_plus.testbed import Constants, cluster, handling, profile
from workbench.reproduce.result import OOM

OURS, GALAXY, MEGATRON, SEQUENCE, EDGESHARD = "Galaxy+", "Galaxy", "M-LM", "SP", "ES"
PLANNERS: dict[str, InferencePlanner] = {
    OURS: algorithm_1,
    GALAXY: galaxy,
    MEGATRON: megatron_lm,
    SEQUENCE: sequence_parallel,
    EDGESHARD: edgeshard,
}
WITH_GPUS = ("Env. C", "Env. D")
"""Where overlap costs launches and no processor time: there it is used only where it is faster."""
BASELINES = (MEGATRON, SEQUENCE, EDGESHARD, GALAXY)
Reading = Literal["latency", "balanced", "equal"]
"""Of EdgeShard: its programme for latency; a pipeline whose slowest stage is as fast as can be; as many layers on every device."""
READINGS: tuple[Reading, ...] = ("latency", "balanced", "equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a method does.  plan, seconds: None where it runs out of memory, for the reason given."""

    plan: InferencePlan | None = None
    seconds: float | None = None
    reason: str = ""

    @property
    def configuration(self) -> str:
        """Return the layers of both schemes as '[P,Q]', or OOM."""
        return OOM if self.plan is None else "[{},{}]".format(*self.plan.configuration)

    def speed_up(self, other: Run) -> float | None:
        """Return another method's seconds over these; None where one of them runs out of memory."""
        return None if self.seconds is None or other.seconds is None else other.seconds / self.seconds


@lru_cache(maxsize=8192)
def run_system(
    constants: Constants,
    model: str,
    environment: str,
    system: str,
    mbit_per_s: float | None = None,
    reading: Reading = "balanced",
) -> Run:
    """Return a method's plan under the paper's memory accounting and its simulated seconds for a model in an environment."""
    on = cluster(constants, environment, mbit_per_s, collectives=system in (MEGATRON, SEQUENCE))
    costs = profile(constants, model, environment)
    length, decoder_length = constants.length(model), constants.decoder_tokens
    try:
        if system == EDGESHARD and reading != "latency":
            plan = _staged(constants, costs, on, length, decoder_length, is_equal=reading == "equal")
        else:
            plan = PLANNERS[system](costs, on, length=length, decoder_length=decoder_length, memory=constants.memory_rule)
    except PlanError as error:
        return Run(reason=str(error))
    lengths = stack_lengths(costs, length, decoder_length)
    handled = handling(constants, on)
    ways = [plan, replace(plan, overlap=False)] if plan.overlap and environment in WITH_GPUS else [plan]
    seconds = {way: printed_s(way, costs, on, lengths, handled) for way in ways}
    best = min(ways, key=lambda way: seconds[way])
    return Run(plan=best, seconds=seconds[best])


def _staged(
    constants: Constants, costs: InferenceProfile, on: Cluster, length: int, decoder_length: int, *, is_equal: bool
) -> InferencePlan:
    """Return a pipeline through all devices: as many layers on each, or so that its slowest stage is as fast as can be.

    The latter is what EdgeShard's programme for throughput aims at; of equally good stages those on fast devices are filled first.
    """
    shares = list(proportional_parts(costs.num_layers, (1,) * on.world_size))
    if not is_equal:
        layer_s = [1 / capacity(costs, rank, stack_lengths(costs, length, decoder_length)) for rank in range(on.world_size)]
        slowest = sorted(count * seconds for seconds in layer_s for count in range(1, costs.num_layers + 1))
        rooms = ([int(limit / seconds + 1e-9) for seconds in layer_s] for limit in slowest)
        room = next(each for each in rooms if min(each) and sum(each) >= costs.num_layers)
        left, shares = costs.num_layers - on.world_size, [1] * on.world_size
        for rank in sorted(range(on.world_size), key=lambda each: layer_s[each]):
            more = min(left, room[rank] - 1)
            shares[rank] += more
            left -= more
    plan = InferencePlan(method="edgeshard", paradigm="pipeline", ranks=tuple(range(on.world_size)), layers=tuple(shares), length=length)
    check_inference(plan, costs, on, length=length, decoder_length=decoder_length, memory=constants.memory_rule)
    return plan
