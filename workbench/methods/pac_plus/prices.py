"""Costs of PAC+ steps: from a profile and a cluster to the simulator's and the pacer's seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.collective_times import broadcast_s, ring_allreduce_s
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.schedule import ALLREDUCE, BROADCAST, RECV, SEND, Op, Value
from workbench.methods.common.layers import layers_seconds
from workbench.methods.pac_plus.layout import CachedStep, HybridStep


def _trainable_bytes(layers: tuple[LayerProfile, ...]) -> int:
    return sum(layer.trainable_bytes for layer in layers)


def _kept_bytes(layers: tuple[LayerProfile, ...], value: Value, samples: int, length: int) -> int:
    """Return the bytes of the activations that the side network reads (tap), or of what its backward pass needs besides (ctx)."""
    return sum(layer.tap_bytes(samples, length) if value.name == "tap" else layer.context_bytes(samples, length) for layer in layers)


def _resident_bytes(profile: Profile, layers: tuple[LayerProfile, ...], *, backbone: bool) -> int:
    trainable = _trainable_bytes(layers)
    frozen = sum(layer.frozen_bytes for layer in layers) if backbone else 0
    return frozen + trainable + trainable + round(profile.optimizer_bytes_per_trainable_byte * trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridCosts:
    """Prices of a HybridStep: a `Costs`."""

    profile: Profile
    cluster: Cluster
    step: HybridStep

    def layers(self, rank: int) -> tuple[LayerProfile, ...]:
        """Return the layers that the rank holds."""
        index = self.step.plan.stage_of(rank)
        if index is None:
            return ()
        stage = self.step.plan.stages[index]
        return self.profile.layers[rank][stage.start : stage.stop]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind in (SEND, RECV):
            return self.cluster.link(*op.ranks).transfer_s(self.nbytes((op.reads or op.writes)[0]))
        if op.kind == ALLREDUCE:
            return ring_allreduce_s(self.cluster, op.ranks, _trainable_bytes(self.layers(rank)))
        if op.kind == "STEP":
            return layers_seconds(self.layers(rank), "STEP", 1, 1)
        first, end = self.step.samples(rank, op.microbatch)
        return layers_seconds(self.layers(rank), op.kind, end - first, self.step.shape.lengths[op.microbatch])

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        if value.name == "gsum":
            return _trainable_bytes(self.layers(value.part))
        if value.name not in ("act", "side", "sgrad", "tap", "ctx"):
            return 0
        samples, length = self.step.num_samples(value), self.step.shape.lengths[value.microbatch]
        if value.name in ("tap", "ctx"):
            return _kept_bytes(self.layers(value.part), value, samples, length)
        layer = self.profile.layers[0][self.step.plan.stages[self.step.boundary(value)].stop - 1]
        side = layer.gradient_bytes(samples, length)
        return layer.output_bytes(samples, length) - side if value.name == "act" else side

    def resident_bytes(self, rank: int) -> int:
        """Return weights, gradients and optimizer state in bytes."""
        return _resident_bytes(self.profile, self.layers(rank), backbone=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedCosts:
    """Prices of a CachedStep: a `Costs`."""

    profile: Profile
    cluster: Cluster
    step: CachedStep

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        layers = self.profile.layers[rank]
        if op.kind == ALLREDUCE:
            return ring_allreduce_s(self.cluster, op.ranks, _trainable_bytes(layers))
        if op.kind == "STEP":
            return layers_seconds(layers, "STEP", 1, 1)
        return layers_seconds(layers, op.kind, self.step.sizes[rank], self.step.lengths[rank])

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        if value.name == "gsum":
            return _trainable_bytes(self.profile.layers[value.part])
        if value.name not in ("tap", "ctx"):
            return 0
        return _kept_bytes(self.profile.layers[value.part], value, self.step.sizes[value.part], self.step.lengths[value.part])

    def resident_bytes(self, rank: int) -> int:
        """Return the adapter, its gradients and its optimizer state in bytes; the backbone is released."""
        return _resident_bytes(self.profile, self.profile.layers[rank], backbone=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionCosts:
    """Prices of moving adapters and cached activations after the first epoch (section V-B).

    chunk_bytes: of every cache value, by its number.  adapter_bytes[stage]: weights and optimizer state.
    """

    cluster: Cluster
    chunk_bytes: tuple[int, ...]
    adapter_bytes: tuple[int, ...]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind in (SEND, RECV):
            return self.cluster.link(*op.ranks).transfer_s(self.nbytes((op.reads or op.writes)[0]))
        if op.kind == BROADCAST:
            return broadcast_s(self.cluster, op.ranks, self.adapter_bytes[op.stage])
        return 0.0

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        if value.name == "cache":
            return self.chunk_bytes[value.microbatch]
        return self.adapter_bytes[value.stage] if value.name == "adapter" else 0

    def resident_bytes(self, rank: int) -> int:
        """Return 0: what stays is not counted here."""
        return 0


def resident_bytes(profile: Profile, plan: Plan, rank: int, *, cached: bool) -> int:
    """Return the bytes that stay on a rank: in the first epoch its stage, later the adapter alone."""
    if cached:
        return _resident_bytes(profile, profile.layers[rank], backbone=False)
    index = plan.stage_of(rank)
    if index is None:
        return 0
    stage = plan.stages[index]
    return _resident_bytes(profile, profile.layers[rank][stage.start : stage.stop], backbone=True)
