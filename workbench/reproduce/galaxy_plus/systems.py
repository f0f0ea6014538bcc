"""Every method of the evaluation in an environment: its plan, and the simulated seconds of one sequence (Galaxy+, section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass
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
    local,
    megatron_lm,
    sequence_parallel,
    stack_lengths,
)
from workbench.reproduce.galaxy_plus.latency import sequence_s
from workbench.reproduce.galaxy_plus.testbed import Constants, cluster, profile

OURS, GALAXY, MEGATRON, SEQUENCE, EDGESHARD, LOCAL = "Galaxy+", "Galaxy", "M-LM", "SP", "ES", "Local"
PLANNERS: dict[str, InferencePlanner] = {
    OURS: algorithm_1,
    GALAXY: galaxy,
    MEGATRON: megatron_lm,
    SEQUENCE: sequence_parallel,
    EDGESHARD: edgeshard,
    LOCAL: local,
}
BASELINES = (MEGATRON, SEQUENCE, EDGESHARD, GALAXY)
Reading = Literal["latency", "balanced", "equal"]
"""Of EdgeShard: its dynamic programme for latency; stages in proportion to speed; as many layers on every device."""
READINGS: tuple[Reading, ...] = ("latency", "balanced", "equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a method does.  plan, seconds: None where it runs out of memory, for the reason given."""

    plan: InferencePlan | None = None
    seconds: float | None = None
    reason: str = ""


@lru_cache(maxsize=8192)
def run_system(
    constants: Constants,
    model: str,
    environment: str,
    system: str,
    mbit_per_s: float | None = None,
    reading: Reading = "latency",
) -> Run:
    """Return a method's plan and simulated seconds for a model in an environment."""
    on = cluster(constants, environment, mbit_per_s, collectives=system in (MEGATRON, SEQUENCE))
    costs = profile(constants, model, environment)
    length, decoder_length = constants.length(model), constants.decoder_tokens
    try:
        plan = _plan(constants, system, costs, on, length, decoder_length, reading)
    except PlanError as error:
        return Run(reason=str(error))
    lengths = stack_lengths(costs, length, decoder_length)
    return Run(plan=plan, seconds=sequence_s(plan, costs, on, lengths, constants.message_s))


def _plan(
    constants: Constants,
    system: str,
    costs: InferenceProfile,
    on: Cluster,
    length: int,
    decoder_length: int,
    reading: Reading,
) -> InferencePlan:
    """Return a method's plan under the paper's memory accounting.  Raises PlanError where it runs out of memory."""
    rule = constants.memory_rule
    if system != EDGESHARD or reading == "latency":
        return PLANNERS[system](costs, on, length=length, decoder_length=decoder_length, memory=rule)
    speeds = [capacity(costs, rank, stack_lengths(costs, length, decoder_length)) for rank in range(on.world_size)]
    plan = InferencePlan(
        method="edgeshard",
        paradigm="pipeline",
        ranks=tuple(range(on.world_size)),
        layers=proportional_parts(costs.num_layers, speeds if reading == "balanced" else (1,) * on.world_size),
        length=length,
    )
    check_inference(plan, costs, on, length=length, decoder_length=decoder_length, memory=rule)
    return plan
