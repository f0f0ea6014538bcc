"""Several pipelines that train the same model, each on separate devices (HetPipe; Park et al., USENIX ATC 2020)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from workbench.core.errors import ConfigError
from workbench.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Layers [start, stop) that are on one rank in every virtual worker.

    owners[v]: virtual worker v's rank.  server: the owner that keeps the global weights.
    """

    start: int
    stop: int
    owners: tuple[int, ...]
    server: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualWorkers:
    """pipelines[v]: the plan of virtual worker v; its stages have one rank each, and its micro-batches are the worker's
    mini-batches.

    in_flight: N_m, the number of mini-batches in a wave, and the most that a virtual worker has in its pipeline; it
    pushes once per wave.
    HetPipe's clock distance D, the most waves that the fastest worker may be ahead of the slowest, is 0.
    predicted_s: named parts of the predicted seconds of a wave of all virtual workers.
    """

    pipelines: tuple[Plan, ...]
    in_flight: int
    predicted_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = f"{len(self.pipelines)} virtual workers with {self.in_flight} mini-batches in flight were asked for."
        if not self.pipelines or self.in_flight < 1:
            raise ConfigError(request, "There must be at least one of each.", "Raise them.")
        if len({plan.num_layers for plan in self.pipelines}) > 1:
            problem = f"Their models have {[plan.num_layers for plan in self.pipelines]} layers."
            raise ConfigError(request, problem, "Let each hold the whole model.")
        for plan in self.pipelines:
            for stage in plan.stages:
                if len(stage.shares) > 1:
                    raise ConfigError(request, f"A stage has the ranks {stage.ranks}.", "Give each stage one.")
        for rank in self.ranks:
            if self.ranks.count(rank) > 1:
                raise ConfigError(request, f"Rank {rank} has more than one stage.", "Give it one.")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return all ranks, by virtual worker and stage."""
        return tuple(rank for plan in self.pipelines for stage in plan.stages for rank in stage.ranks)

    @property
    def wave_samples(self) -> int:
        """Return the samples of a wave of all virtual workers together."""
        return self.in_flight * sum(plan.micro_batch_size for plan in self.pipelines)

    def waves_needed(self, mini_batch: int) -> int:
        """Return how many waves of every virtual worker must be in the weights with which a worker's mini-batch (from
        0) begins.

        These are all earlier mini-batches except the last s_global = 2 N_m - 2, the most of another virtual worker that
        a worker may not have seen yet, rounded up to whole waves.
        """
        return max(0, -(-(mini_batch - 2 * self.in_flight + 2) // self.in_flight))

    def grouping(self) -> str:
        """Return the virtual workers' sizes: [2+2]."""
        return "[" + "+".join(str(len(plan.stages)) for plan in self.pipelines) + "]"

    def shards(self) -> tuple[Shard, ...]:
        """Return the layers between the cuts of all pipelines, in order; the virtual workers serve them in turn."""
        cuts = sorted({0} | {stage.stop for plan in self.pipelines for stage in plan.stages})
        shards = []
        for number, (start, stop) in enumerate(pairwise(cuts)):
            owners = tuple(
                next(stage.ranks[0] for stage in plan.stages if stage.start <= start and stop <= stage.stop)
                for plan in self.pipelines
            )
            shards.append(Shard(start=start, stop=stop, owners=owners, server=owners[number % len(owners)]))
        return tuple(shards)


VersionRule = Literal["stashing", "vertical_sync", "two"]
"""With which version of its weights a stage computes a mini-batch: weight stashing and vertical sync (PipeDream), or
two versions (2BW)."""


def delay_of(rule: VersionRule, behind: int, num_stages: int) -> int:
    """Return the number of updates between the weights with which a stage computes a mini-batch and those that its
    gradient updates.

    It is also the number of versions that the stage keeps besides the newest.  behind: number of stages after it.
    Stashing: the newest version at the time of the forward pass.  Vertical sync: the first stage's version on all
    stages.  Two: the version before the newest, with a mini-batch split into as many micro-batches as there are stages
    (Narayanan et al., ICML 2021).
    """
    return {"stashing": behind, "vertical_sync": num_stages - 1, "two": 1}[rule]
