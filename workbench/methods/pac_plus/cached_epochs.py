"""The later epochs: data parallel over the activation cache, the backbone neither run nor held (sections IV-B and V-B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.core.plan import Stage
from workbench.methods.common.session import RankSession, StepTrace, trace_of
from workbench.methods.common.steps import PAD_TO_MULTIPLE
from workbench.methods.pac_plus.cached_batches import READ_AHEAD, CachedBatches, TapSource
from workbench.methods.pac_plus.compute import StageCompute
from workbench.methods.pac_plus.handlers import CachedHandlers
from workbench.methods.pac_plus.programs import CachedStep
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.tasks.batching import assign_shards, cached_epoch_batches
from workbench.tasks.tokenize import collate, padded_length


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
) -> list[tuple[CachedStep, list[list[int]]]]:
    """Return the epoch's steps and, for each, every rank's samples."""
    steps = []
    for per_rank in cached_epoch_batches(owners, lengths, shard_weights(stage, world_size), seed, epoch):
        sizes = tuple(len(samples) for samples in per_rank)
        padded = tuple(padded_length([lengths[sample] for sample in samples], PAD_TO_MULTIPLE) if samples else 0 for samples in per_rank)
        steps.append((CachedStep(stage=stage, sizes=sizes, lengths=padded), [list(samples) for samples in per_rank]))
    return steps


def train_cached_epoch(
    session: RankSession,
    stage: Stage,
    owners: Sequence[int],
    compute: StageCompute,
    optimizer: FlatAdamW,
    cache: TapSource,
    *,
    epoch: int,
    begin: int = 0,
    note: Callable[[StepTrace], None] | None = None,
) -> list[StepTrace]:
    """Train one epoch on this rank and return its steps; a rank without a share returns at once.

    begin: the first step to do.  note: is called after every step that this rank has completed.
    """
    if session.rank not in stage.ranks:
        return []
    rank_job, rank = session.rank_job, session.rank
    programs = rank_job.programs()
    steps = cached_steps(stage, owners, session.split.lengths, session.context.world_size, seed=rank_job.job.seed, epoch=epoch)
    own = [(per_rank[rank], step.lengths[rank]) for step, per_rank in steps[begin:] if per_rank[rank]]
    traces = []
    # An emulated device has one slowed core: nothing of it is free to read ahead, and its LOAD has its own price.
    with CachedBatches(cache, own, depth=0 if session.slows_down else READ_AHEAD, packs=compute.packs) as batches:
        for number, (step, per_rank) in list(enumerate(steps))[begin:]:
            samples = per_rank[rank]
            handlers = CachedHandlers(
                rank=rank,
                step=step,
                batch=collate(session.split, samples, PAD_TO_MULTIPLE) if samples else None,
                samples=samples,
                compute=compute,
                optimizer=optimizer,
                cache=batches,
                epoch=epoch,
                layers=rank_job.layers,
            )
            done = session.run(programs.cached(step), handlers.table())
            trace = trace_of(session, done, epoch, number, len(steps), step.num_samples)
            session.progress.step(trace, len(steps), cached=True)
            traces.append(trace)
            if note is not None:
                note(trace)
    return traces
