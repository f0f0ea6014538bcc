"""Full fine-tuning on Table 4's phones as Table 6 has it: costs, partitions and memory (Confidant, sections 5.2.2 and
5.6).
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from workbench.core.catalogue import load_cluster
from workbench.core.plan import Plan
from workbench.core.summary import BATTERY_V
from workbench.planners.asynchronous import asynchronous_plan, partition_in_order, plan_asynchronous
from workbench.planners.equation3 import Equation3
from workbench_studies.papers.confidant.memory import GB, READINGS, frozen_embedding
from workbench_studies.papers.confidant.testbed import PAPER
from workbench_studies.papers.result import read_constants

MINI_BATCHES = 10
"""Number of mini-batches, as in section 5.2.2."""
BATCH_SIZES = {"BERT-Base": 8, "GPT2-Medium": 4}
"""The largest of Table 6 with which a phone holds the whole model.  The paper does not say which its speedups have."""
ALL_BATCH_SIZES = {"BERT-Base": (4, 8), "GPT2-Medium": (1, 2, 4, 8)}
"""Those of Table 6."""
LARGEST = "redmi-k50"
"""The phone that holds the whole of both models with BATCH_SIZES (Table 6)."""
READING = READINGS["AdamW"]
PROCESSORS = 2
"""A device's processors, equal, that share heads and columns at no cost: the bound for Confidant's scheduler."""


class Stage(NamedTuple):
    """Layers [start, stop) of a pipeline on a device with `behind` devices after it."""

    rank: int
    behind: int
    start: int
    stop: int
    num_stages: int


def stages_of(plan: Plan) -> list[Stage]:
    """Return a plan's stages, of one device each."""
    count = len(plan.stages)
    return [
        Stage(stage.ranks[0], count - 1 - index, stage.start, stage.stop, count)
        for index, stage in enumerate(plan.stages)
    ]


def need_bytes(costs: Equation3, stage: Stage) -> int:
    """Return the memory that a stage needs, with its versions and all mini-batches in flight."""
    rank, behind, start, stop, num_stages = stage
    return costs.need(rank, behind, start, stop, num_stages=num_stages).total_bytes


def mah(joules: float) -> float:
    """Return the charge of a phone's battery."""
    return joules / 3.6 / BATTERY_V


def num_tokens() -> int:
    """Return the sequence length, which is Table 6's."""
    return read_constants(PAPER, dict[str, int], "table6")[READING.tokens]


@cache
def full_costs(model: str, devices: int, batch: int) -> Equation3:
    """Return the costs of full fine-tuning on Table 4's devices as Table 6 has it: AdamW, the embedding frozen."""
    cluster = load_cluster(f"confidant-{devices}")
    return frozen_embedding(model, cluster, num_tokens(), batch, READING)


@cache
def both_plans(model: str, devices: int, batch: int) -> dict[str, Plan]:
    """Return the partitions of FTPipeHD, which does not look at memory, and of Eq. 3."""
    costs = full_costs(model, devices, batch)
    by_speed = partition_in_order(costs, range(devices), in_memory=False)
    return {
        "FTPipeHD": asynchronous_plan(costs, by_speed, method=PAPER, check_memory=False),
        "Confidant": plan_asynchronous(costs, searches=False, method=PAPER),
    }


class Fullest(NamedTuple):
    """GB of the device that a partition leaves the least room: what it needs, and what it has."""

    used_gb: float
    room_gb: float

    @property
    def fits(self) -> bool:
        """Return whether it has the memory, and so all others."""
        return self.used_gb <= self.room_gb


def fullest(costs: Equation3, *stages: Stage) -> Fullest:
    """Return the device with the least room."""
    each = [
        Fullest(need_bytes(costs, stage) / GB, costs.cluster.devices[stage.rank].memory_bytes / GB) for stage in stages
    ]
    return max(each, key=lambda device: device.used_gb / device.room_gb)


def largest_alone(costs: Equation3) -> Stage:
    """Return the whole model on LARGEST."""
    rank = [device.model for device in costs.cluster.devices].index(LARGEST)
    return Stage(rank, 0, 0, costs.profile.num_layers, 1)
