"""Which samples each rank tapes in the first epoch, keeps, and trains on in the cached epochs (PAC+, section V-B)."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.plan import Plan, Stage
from workbench.methods.training.steps import PlannedStep
from workbench.tasks.batching import assign_shards, cached_epoch_batches


def taped_samples(plan: Plan, rank: int, steps: Sequence[PlannedStep]) -> tuple[int, ...]:
    """Return the samples whose activations the rank sees in the first epoch, in that order."""
    index = plan.stage_of(rank)
    if index is None:
        return ()
    stage = plan.stages[index]
    position = stage.ranks.index(rank)
    return tuple(sample for step in steps for micro in step.samples for sample in micro[slice(*stage.split(len(micro))[position])])


def shard_weights(stage: Stage, world_size: int) -> tuple[int, ...]:
    """Return each rank's samples of a whole mini-batch, 0 for a rank that takes no part."""
    weights = [0] * world_size
    for share in stage.shares:
        weights[share.rank] = share.samples
    return tuple(weights)


def shard_owners(stage: Stage, lengths: Sequence[int], world_size: int, seed: int) -> tuple[int, ...]:
    """Return which rank keeps each sample's activations."""
    return tuple(assign_shards(lengths, shard_weights(stage, world_size), seed))


def cached_steps(
    stage: Stage, owners: Sequence[int], lengths: Sequence[int], world_size: int, *, seed: int, epoch: int
) -> tuple[PlannedStep, ...]:
    """Return the steps of an epoch from the cache; part r of a mini-batch is rank r's."""
    batches = cached_epoch_batches(owners, lengths, shard_weights(stage, world_size), seed, epoch)
    return tuple(PlannedStep.of(per_rank, lengths) for per_rank in batches)
