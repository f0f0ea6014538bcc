"""After the first epoch: every device gets the whole adapter and the activations of its own shard (section V-B).

A sample's record is sent in parts, named by sample and taps: a tape has the taps of a stage, a finished shard has all of them.
Records are sent as the bytes on the disk, whatever their storage dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from torch import Tensor

from workbench.core.costs import Spec
from workbench.core.plan import Plan, Stage
from workbench.methods.pac_plus.prepare import StageTaps
from workbench.methods.training.handlers import PlannedStep
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.parallel_adapter import ParallelAdapterStage
from workbench.runtime.activation_cache import ActivationCache
from workbench.runtime.flat_optimizer import STATE_KINDS
from workbench.runtime.state import spec_of
from workbench.tasks.batching import assign_shards, cached_epoch_batches


def taped_samples(plan: Plan, rank: int, steps: Sequence[PlannedStep]) -> tuple[int, ...]:
    """Return the samples whose activations the rank computes in the first epoch, in that order."""
    index = plan.stage_of(rank)
    if index is None:
        return ()
    stage = plan.stages[index]
    position = stage.ranks.index(rank)
    return tuple(sample for step in steps for micro in step.samples for sample in micro[slice(*stage.split(len(micro))[position])])


def shard_weights(stage: Stage, world_size: int) -> tuple[int, ...]:
    """Return each rank's samples of a whole mini-batch, 0 for an idle rank."""
    weights = [0] * world_size
    for share in stage.shares:
        weights[share.rank] = share.samples
    return tuple(weights)


def shard_owners(stage: Stage, lengths: Sequence[int], world_size: int, seed: int) -> tuple[int, ...]:
    """Return the rank that keeps each sample's activations."""
    return tuple(assign_shards(lengths, shard_weights(stage, world_size), seed))


def cached_steps(
    stage: Stage, owners: Sequence[int], lengths: Sequence[int], world_size: int, *, seed: int, epoch: int
) -> tuple[PlannedStep, ...]:
    """Return the steps of an epoch from the cache; part r of a mini-batch is rank r's."""
    batches = cached_epoch_batches(owners, lengths, shard_weights(stage, world_size), seed, epoch)
    return tuple(PlannedStep.of(per_rank, lengths) for per_rank in batches)


@cache
def adapter_state(config: ParallelAdapterConfig) -> tuple[dict[str, Spec], dict[str, tuple[int, ...]]]:
    """Return the whole adapter's parameters and moments by name, and the layer of each."""
    specs: dict[str, Spec] = {}
    layers: dict[str, tuple[int, ...]] = {}
    for layer in range(config.num_layers):
        for name, parameter in ParallelAdapterStage(config, layer, layer + 1).named_parameters():
            for kind in STATE_KINDS:
                specs[f"{kind}/{name}"], layers[f"{kind}/{name}"] = spec_of(parameter), (layer,)
    return specs, layers


def part_name(sample: int, taps: StageTaps) -> str:
    """Return the name of some taps of a sample's record."""
    return f"sample.{sample}.taps.{taps.first}+{taps.total}"


def taped(tape: ActivationCache | None, taps: StageTaps | None) -> dict[str, Tensor]:
    """Return the parts in a cache of whole records, by name."""
    return {} if tape is None or taps is None else {part_name(sample, taps): tape.raw(sample) for sample in tape.samples}


def parts_of(shard: ActivationCache, taps: Iterable[StageTaps]) -> dict[str, Tensor]:
    """Return the location of a shard's record parts, by name.  taps: those in the parts."""
    return {part_name(sample, run): shard.raw_taps(sample, run.first, run.total) for sample in shard.samples for run in set(taps)}
