"""The models of Confidant's tables, and the only constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, one_device_stages
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.planners import Problem
from workbench.planners.equation3 import Equation3
from workbench.profiler.analytic import Technique, analytic_profile
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.schedules import backpropagation, insert_transfers, plan_costs
from workbench.simulator import makespan_s
from workbench.simulator.steps import SAMPLES, equal_blocks, mini_batches
from workbench_studies.papers.result import read_constants

PAPER = "confidant"
NAMES = {"LLaMA-7B": "Llama2-7B"}
"""Models with a different name in the paper but the same sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """constants.toml, which states the source of each value."""

    tokens: int
    batch: int


load_constants = partial(read_constants, PAPER, Constants, "table1")


def description(model: str) -> ModelDescription:
    """Return the sizes of one of the paper's models."""
    return describe(NAMES.get(model, model))


def profile_of(
    model: str, cluster: Cluster, *, batch: int, tokens: int, technique: Technique = "full", **settings: Any
) -> Profile:
    """Return the analytic profile of a model on a cluster.  settings: further ones of analytic_profile."""
    sizes: Any = {"batch_sizes": (batch,), "sequence_lengths": (tokens,)}
    return analytic_profile(description(model), cluster, technique=technique, **sizes, **settings)


def costs_of(model: str, cluster: Cluster, *, batch: int, tokens: int, **settings: Any) -> Equation3:
    """Return the costs of a model on a cluster (see profile_of)."""
    profile = profile_of(model, cluster, batch=batch, tokens=tokens, **settings)
    return Equation3(Problem(profile, cluster, batch_size=batch, sequence_length=tokens))


def stages_bytes(costs: Equation3, plan: Plan) -> list[int]:
    """Return the bytes that each stage of a plan needs."""
    count = len(plan.stages)
    return [
        costs.need(stage.ranks[0], count - 1 - index, stage.start, stage.stop, num_stages=count).total_bytes
        for index, stage in enumerate(plan.stages)
    ]


def mini_batches_s(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, count: int) -> float:
    """Return the seconds of some mini-batches through an empty asynchronous pipeline."""
    return mini_batches(profile, cluster, plan, tokens=tokens, count=count).makespan_s


def pace_s(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, first: int, count: int) -> float:
    """Return the seconds of a mini-batch, the mean of `count` after `first` through an empty pipeline."""
    begun_s, done = (
        mini_batches_s(profile, cluster, plan, tokens=tokens, count=number) for number in (first, first + count)
    )
    return (done - begun_s) / count


def relative_paces(num_stages: int) -> dict[bool, float]:
    """Return the time of a mini-batch, without drains as 1: with a drain after each (True), and without (False).

    Simulated on equal stages; a backward pass takes twice as long as a forward pass, and as many micro-batches as
    stages are a mini-batch.
    """
    profile, cluster = equal_blocks(num_stages, num_stages, backward=2.0)

    def plan(parts: int) -> Plan:
        samples = SAMPLES // parts
        stages = one_device_stages(range(num_stages), range(num_stages + 1), samples)
        return Plan(method=PAPER, stages=stages, micro_batch_size=samples, num_micro_batches=parts)

    single, cut = plan(1), plan(num_stages)
    sizes = (cut.micro_batch_size,) * num_stages
    costs = plan_costs(profile, cluster, cut, sizes=sizes, lengths=(1,) * num_stages)
    drained_s = makespan_s(Program.on(cluster, insert_transfers(backpropagation(cut, sizes)), costs))
    return {
        True: drained_s / pace_s(profile, cluster, single, tokens=1, first=num_stages, count=num_stages),
        False: 1.0,
    }
