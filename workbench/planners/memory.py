"""Predict the bytes that a rank needs (m_d of PAC+ Table II and section V-A, 'peak memory footprint')."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import PlanError
from workbench.core.plan import Plan, Stage
from workbench.core.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The predicted peak bytes of a rank, by purpose.

    context_bytes: what the backward passes in flight need, taps included.  workspace_bytes: scratch of one forward pass.
    boundary_bytes: one message in and one out, each way.
    """

    weights_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    context_bytes: int = 0
    workspace_bytes: int = 0
    boundary_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum of the parts."""
        return (
            self.weights_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.context_bytes
            + self.workspace_bytes
            + self.boundary_bytes
        )


def in_flight(stage: int, num_stages: int, num_micro_batches: int) -> int:
    """Return the micro-batches whose contexts live at once on a stage (counted from 0) under 1F1B: min(p - stage, M)."""
    return min(num_stages - stage, num_micro_batches)


def rank_need(profile: Profile, rank: int, start: int, stop: int, *, samples: int, sequence_length: int, in_flight: int) -> Need:
    """Return what layers [start, stop) need on a rank that takes `samples` of each micro-batch."""
    layers = profile.layers[rank][start:stop]
    tokens = samples * sequence_length
    trainable = sum(layer.trainable_bytes for layer in layers)
    return Need(
        weights_bytes=sum(layer.frozen_bytes for layer in layers) + trainable,
        gradient_bytes=trainable,
        optimizer_bytes=round(trainable * profile.optimizer_bytes_per_trainable_byte),
        context_bytes=in_flight * tokens * sum(layer.context_bytes_per_token + layer.tap_bytes_per_token for layer in layers),
        workspace_bytes=tokens * max(layer.workspace_bytes_per_token for layer in layers),
        boundary_bytes=tokens * boundary_bytes_per_token(profile, rank, start, stop),
    )


def boundary_bytes_per_token(profile: Profile, rank: int, start: int, stop: int) -> int:
    """Return the bytes per token that cross both ends of layers [start, stop), activations and gradients."""
    layers = profile.layers[rank]
    ends = [layers[start - 1]] if start > 0 else []
    ends += [layers[stop - 1]] if stop < profile.num_layers else []
    return sum(layer.output_bytes_per_token + layer.gradient_bytes_per_token for layer in ends)


def plan_needs(profile: Profile, plan: Plan, *, sequence_length: int) -> dict[int, Need]:
    """Return the predicted need of every rank that the plan uses, in the epochs that run the backbone."""
    needs = {}
    for index, stage in enumerate(plan.stages):
        live = in_flight(index, len(plan.stages), plan.num_micro_batches)
        for share, (first, end) in zip(stage.shares, stage.split(plan.micro_batch_size), strict=True):
            needs[share.rank] = rank_need(
                profile,
                share.rank,
                stage.start,
                stage.stop,
                samples=end - first,
                sequence_length=sequence_length,
                in_flight=live,
            )
    return needs


def cached_need(profile: Profile, rank: int, *, samples: int, sequence_length: int) -> Need:
    """Return what a cached epoch needs on a rank: the adapters of all layers, the backbone's memory released (PAC+, section IV-B)."""
    layers = profile.layers[rank]
    tokens = samples * sequence_length
    trainable = sum(layer.trainable_bytes for layer in layers)
    return Need(
        weights_bytes=trainable,
        gradient_bytes=trainable,
        optimizer_bytes=round(trainable * profile.optimizer_bytes_per_trainable_byte),
        context_bytes=tokens * sum(layer.context_bytes_per_token + layer.tap_bytes_per_token for layer in layers),
    )


def cached_needs(profile: Profile, stage: Stage, *, sequence_length: int) -> dict[int, Need]:
    """Return the predicted need of every rank of the cached epochs."""
    return {share.rank: cached_need(profile, share.rank, samples=share.samples, sequence_length=sequence_length) for share in stage.shares}


def check(profile: Profile, cluster: Cluster, plan: Plan, *, sequence_length: int) -> None:
    """Raise PlanError, naming device, stage and bytes, if a rank of the plan needs more than its device's budget."""
    needs = plan_needs(profile, plan, sequence_length=sequence_length)
    for index, stage in enumerate(plan.stages):
        over = [rank for rank in stage.ranks if needs[rank].total_bytes > cluster.devices[rank].memory_bytes]
        if over:
            worst = max(over, key=lambda rank: needs[rank].total_bytes - cluster.devices[rank].memory_bytes)
            raise too_small(cluster, worst, index, stage, needs[worst])


def too_small(cluster: Cluster, rank: int, index: int, stage: Stage, need: Need, *, why: str = "") -> PlanError:
    """Return the error of a device that cannot hold its stage (the stage counted from 0, layers named first to last)."""
    device = cluster.devices[rank]
    layers = f"layer {stage.start}" if stage.num_layers == 1 else f"layers {stage.start}-{stage.stop - 1}"
    return PlanError(
        f"Device '{device.name}' has {readable(device.memory_bytes)};",
        f"stage {index} ({layers}) needs {readable(need.total_bytes)}"
        f" (weights {readable(need.weights_bytes)}, gradients and optimizer {readable(need.gradient_bytes + need.optimizer_bytes)},"
        f" activations {readable(need.context_bytes + need.workspace_bytes + need.boundary_bytes)}).{why}",
        "Add a device, raise its memory, lower the micro-batch size, or quantize the backbone.",
    )


def readable(nbytes: int) -> str:
    """Return bytes as people write them: 1.4 GB, 350 MB, 12 kB (powers of 1000)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}" if nbytes < 100 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes} bytes"
