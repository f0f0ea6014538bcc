"""The models of Confidant's tables, and the only constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan, Share, Stage
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.schedules import insert_transfers, one_f_one_b, plan_costs
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


def mini_batches_s(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, count: int) -> float:
    """Return the seconds of some mini-batches through an empty asynchronous pipeline."""
    return mini_batches(profile, cluster, plan, tokens=tokens, count=count).makespan_s


def relative_paces(num_stages: int) -> dict[bool, float]:
    """Return the time of a mini-batch, without drains as 1: with a drain after each (True), and without (False).

    Simulated on equal stages; a backward pass takes twice as long as a forward pass, and as many micro-batches as
    stages are a mini-batch.
    """
    profile, cluster = equal_blocks(num_stages, num_stages, backward=2.0)

    def plan(parts: int) -> Plan:
        samples = SAMPLES // parts
        stages = tuple(
            Stage(start=index, stop=index + 1, shares=(Share(rank=index, samples=samples),))
            for index in range(num_stages)
        )
        return Plan(method=PAPER, stages=stages, micro_batch_size=samples, num_micro_batches=parts)

    single, cut = plan(1), plan(num_stages)
    sizes = (cut.micro_batch_size,) * num_stages
    costs = plan_costs(profile, cluster, cut, sizes=sizes, lengths=(1,) * num_stages)
    drained_s = makespan_s(Program.on(cluster, insert_transfers(one_f_one_b(cut, sizes)), costs))
    begun_s, done = (
        mini_batches_s(profile, cluster, single, tokens=1, count=count) for count in (num_stages, 2 * num_stages)
    )
    return {True: drained_s * num_stages / (done - begun_s), False: 1.0}
