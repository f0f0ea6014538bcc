"""The models of Confidant's tables, and the only constants."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.program import Program
from workbench.core.serial import read_toml
from workbench.profiler.descriptions import ModelDescription, describe
from workbench.reproduce.result import paper_folder
from workbench.schedules import PlanCosts, asynchronous_1f1b, insert_transfers
from workbench.schedules.plan_costs import StashingCosts
from workbench.simulator import simulate

PAPER = "confidant"
NAMES = {"LLaMA-7B": "Llama2-7B"}
"""Models with a different name in the paper but the same sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """data/papers/confidant/constants.toml, which states the source of each value."""

    tokens: int
    batch: int


def load_constants() -> Constants:
    """Return the constants."""
    return Constants(**read_toml(paper_folder(PAPER) / "constants.toml")["table1"])


def description(model: str) -> ModelDescription:
    """Return the sizes of one of the paper's models."""
    return describe(NAMES.get(model, model))


def mini_batches_s(profile: Profile, cluster: Cluster, plan: Plan, *, tokens: int, count: int) -> float:
    """Return the seconds of some mini-batches through an empty asynchronous pipeline."""
    costs = StashingCosts(PlanCosts(profile, cluster, plan, sizes=(plan.micro_batch_size,) * count, lengths=(tokens,) * count))
    schedule = insert_transfers(asynchronous_1f1b(plan, count, world_size=cluster.world_size))
    return simulate(Program.on(cluster, schedule, costs), memory=False).makespan_s
