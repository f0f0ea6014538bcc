"""Predict the bytes that a rank needs (m_d of PAC+ Table II and section V-A, 'peak memory footprint')."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from workbench.core.cluster import Cluster, Device
from workbench.core.errors import PlanError
from workbench.core.plan import KEEP, Activations, Plan, Stage
from workbench.core.profile import Bytes, Grid, LayerProfile, Layers, Profile
from workbench.core.units import size_words
from workbench.core.virtual_workers import VersionRule, delay_of

ASYNCHRONOUS = "asynchronous_1f1b"
_PARTS = ("HF", "HB", "CF", "CB")
"""The passes of a layer's parts, which several processors share (Confidant, section 3.3)."""
_BACKWARD = ("B", "A")
"""The backward passes through a layer; A: of the lowest layer that RingAda trains."""


class Needed(ABC):
    """The predicted bytes of a rank, for whatever they are."""

    __slots__ = ()

    @property
    @abstractmethod
    def purposes(self) -> dict[str, int]:
        """Return the bytes by purpose, in words."""

    @property
    def total_bytes(self) -> int:
        """Return the sum of the parts."""
        return sum(self.purposes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Need(Needed):
    """The predicted peak bytes of a rank in training, by purpose.

    context_bytes: for the backward passes in flight, taps included.  workspace_bytes: temporary memory of one forward
    pass.
    boundary_bytes: one message received and one sent, forward and backward.
    """

    weights_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    context_bytes: int = 0
    workspace_bytes: int = 0
    boundary_bytes: int = 0

    @property
    def purposes(self) -> dict[str, int]:
        """Return the bytes by purpose, in words."""
        return {
            "weights": self.weights_bytes,
            "gradients and optimizer": self.gradient_bytes + self.optimizer_bytes,
            "activations": self.context_bytes + self.workspace_bytes + self.boundary_bytes,
        }


def in_flight(stage: int, num_stages: int, num_micro_batches: int, *, order: str = "1f1b") -> int:
    """Return how many micro-batches have a live context on a stage (counted from 0) at the same time.

    Under 1F1B min(p - stage, M), all under GPipe; under asynchronous 1F1B p - stage whole mini-batches.
    """
    if order == ASYNCHRONOUS:
        return num_stages - stage
    return num_micro_batches if order == "gpipe" else min(num_stages - stage, num_micro_batches)


def rank_need(
    profile: Profile,
    rank: int,
    start: int,
    stop: int,
    *,
    samples: int,
    sequence_length: int,
    in_flight: int,
    copies: int = 0,
    activations: Activations = "memory",
) -> Need:
    """Return the memory need of layers [start, stop) on a rank that computes `samples` of each micro-batch.

    copies: copies of the trainable parameters in addition to themselves, such as the versions that asynchronous
    pipelines stash.  activations: what happens to them between the forward and the backward pass.
    """
    rank_layers = profile.layers[rank]
    layers = (rank_layers if activations == KEEP else recomputing_layers(rank_layers))[start:stop]
    trainable = sum(layer.trainable_bytes for layer in layers)
    activation_bytes = sum(_activation_bytes(layer, samples, sequence_length) for layer in layers)
    return Need(
        weights_bytes=sum(layer.frozen_bytes for layer in layers) + (1 + copies) * trainable,
        gradient_bytes=trainable,
        optimizer_bytes=profile.optimizer_bytes(trainable),
        context_bytes=in_flight * activation_bytes,
        workspace_bytes=max(layer.workspace_bytes(samples, sequence_length) for layer in layers),
        boundary_bytes=boundary_bytes(profile, rank, start, stop, samples=samples, sequence_length=sequence_length),
    )


def recomputing_layers(layers: Layers, disk: Device | None = None) -> Layers:
    """Return the layers as a stage that recomputes has them, or one that writes its activations to this device's disk
    and reads them.

    For each micro-batch in flight a layer keeps only its input.  Its activations count as temporary memory, because
    those of one layer are in memory at a time.  One processor recomputes whole layers.
    """
    recomputed = []
    for index, layer in enumerate(layers):
        below = layers[index - 1] if index else None
        times = {kind: grid for kind, grid in layer.times.items() if kind.partition("@")[0] not in _PARTS}
        if "F" in times:
            again = times["F"] if disk is None else _transfers(layer, disk.loaded_s)
            times |= {kind: times[kind].plus(again) for kind in _BACKWARD if kind in times}
            if disk is not None:
                times["F"] = times["F"].plus(_transfers(layer, disk.stored_s))
        recomputed.append(
            replace(
                layer,
                times=times,
                context_bytes=Bytes() if below is None else below.output_bytes,
                workspace_bytes=layer.workspace_bytes + layer.context_bytes,
            )
        )
    return tuple(recomputed)


def _transfers(layer: LayerProfile, seconds: Callable[[float], float]) -> Grid:
    """Return the seconds of a layer's activations, from those of so many bytes."""
    sizes = layer.times["F"]
    return Grid.of(sizes.batch_sizes, sizes.sequence_lengths, lambda *size: seconds(layer.context_bytes(*size)))


def boundary_bytes(profile: Profile, rank: int, start: int, stop: int, *, samples: int, sequence_length: int) -> int:
    """Return the bytes of activations and gradients that cross both ends of layers [start, stop)."""
    layers = profile.layers[rank]
    ends = [layers[start - 1]] if start > 0 else []
    ends += [layers[stop - 1]] if stop < profile.num_layers else []
    return sum(_message_bytes(layer, samples, sequence_length) for layer in ends)


def _activation_bytes(layer: LayerProfile, samples: int, sequence_length: int) -> int:
    """Return the bytes that a layer keeps of a micro-batch in flight."""
    return layer.context_bytes(samples, sequence_length) + layer.tap_bytes(samples, sequence_length)


def _message_bytes(layer: LayerProfile, samples: int, sequence_length: int) -> int:
    """Return the bytes of the messages after a layer, forward and backward."""
    return layer.output_bytes(samples, sequence_length) + layer.gradient_bytes(samples, sequence_length)


def optimizer_bytes(profile: Profile, trainable: np.ndarray) -> np.ndarray:
    """Return Profile.optimizer_bytes of the trained parameters of many ranges of layers, in the same shape."""
    sizes, places = np.unique(trainable, return_inverse=True)  # of equal layers few differ
    return np.array([profile.optimizer_bytes(size) for size in sizes.tolist()])[places].reshape(trainable.shape)


class FootprintTable:
    """rank_need of one rank for many ranges of layers at once: a fixed part and a part per sample.

    starts, stops: (ranges,) layers [x, y).  copies[i]: see rank_need, with i + 1 micro-batches in flight; the first
    axis of the arrays.
    """

    def __init__(
        self,
        profile: Profile,
        rank: int,
        starts: np.ndarray,
        stops: np.ndarray,
        *,
        sequence_length: int,
        copies: Sequence[int],
    ) -> None:
        layers = profile.layers[rank]

        def summed(values: list[int]) -> np.ndarray:
            total = np.concatenate([[0], np.cumsum(values)])
            return total[stops] - total[starts]

        self._trainable = summed([layer.trainable_bytes for layer in layers])
        frozen = summed([layer.frozen_bytes for layer in layers])
        self._once = frozen + 2 * self._trainable + optimizer_bytes(profile, self._trainable)
        self._fixed = self._once + np.array(copies)[:, None] * self._trainable
        activations = summed([_activation_bytes(layer, 1, sequence_length) for layer in layers])
        highest = np.zeros((len(layers), len(layers)), int)
        scratch = np.array([layer.workspace_bytes(1, sequence_length) for layer in layers])
        for start in range(len(layers)):
            highest[start, start:] = np.maximum.accumulate(scratch[start:])
        message = [_message_bytes(layer, 1, sequence_length) for layer in layers]
        # No message crosses before the first layer, nor after the last.
        crossing = np.array([0, *message[:-1], 0])
        need_bytes = highest[starts, stops - 1] + crossing[starts] + crossing[stops]
        self._sample_bytes = np.arange(1, len(copies) + 1)[:, None] * activations + need_bytes

    def most_samples(self, budget_bytes: int, micro_batch_size: int) -> np.ndarray:
        """Return (in flight, ranges): the most samples, up to a micro-batch, whose need is within the budget."""
        free_bytes = budget_bytes - self._fixed
        return np.where(
            free_bytes < 0, 0, np.minimum(free_bytes // np.maximum(self._sample_bytes, 1), micro_batch_size)
        )

    def nbytes(self, samples: np.ndarray, live: np.ndarray, ranges: np.ndarray) -> np.ndarray:
        """Return the need of `samples` (rows, 1) with live + 1 micro-batches in flight in these `ranges` (both
        (columns,)).
        """
        return self._fixed[live, ranges] + samples * self._sample_bytes[live, ranges]

    def with_copies(self, samples: int, live: int, copies: int) -> np.ndarray:
        """Return the need of all ranges with live + 1 micro-batches in flight and so many copies of the trainable
        parameters.
        """
        return self._once + copies * self._trainable + samples * self._sample_bytes[live]


def plan_needs(
    profile: Profile, plan: Plan, *, sequence_length: int, order: str = "1f1b", versions: VersionRule = "stashing"
) -> dict[int, Need]:
    """Return the predicted need of every rank in the plan, in the epochs that run the backbone.

    order: see in_flight.  versions: which weight versions an asynchronous pipeline keeps, see delay_of.
    """
    needs: dict[int, Need] = {}
    for index, stage in enumerate(plan.stages):
        live = in_flight(index, len(plan.stages), plan.num_micro_batches, order=order)
        copies = delay_of(versions, live - 1, len(plan.stages)) if order == ASYNCHRONOUS else 0
        needs |= stage_needs(
            profile, stage, plan.micro_batch_size, sequence_length=sequence_length, in_flight=live, copies=copies
        )
    return needs


def stage_needs(
    profile: Profile, stage: Stage, samples: int, *, sequence_length: int, in_flight: int, copies: int = 0
) -> dict[int, Need]:
    """Return the predicted need of every rank of a stage that divides so many samples.  in_flight, copies: see
    rank_need.
    """
    return {
        share.rank: rank_need(
            profile,
            share.rank,
            stage.start,
            stage.stop,
            samples=end - first,
            sequence_length=sequence_length,
            in_flight=in_flight,
            copies=copies,
            activations=stage.activations,
        )
        for share, (first, end) in zip(stage.shares, stage.split(samples), strict=True)
    }


def cached_need(profile: Profile, rank: int, *, samples: int, sequence_length: int) -> Need:
    """Return a rank's need in a cached epoch: the adapters of all layers, without the released backbone (PAC+, section
    IV-B).
    """
    need = rank_need(
        profile, rank, 0, profile.num_layers, samples=samples, sequence_length=sequence_length, in_flight=1
    )
    return replace(need, weights_bytes=need.gradient_bytes, workspace_bytes=0)


def cached_needs(profile: Profile, stage: Stage, *, sequence_length: int) -> dict[int, Need]:
    """Return the predicted need of every rank of the cached epochs."""
    return {
        share.rank: cached_need(profile, share.rank, samples=share.samples, sequence_length=sequence_length)
        for share in stage.shares
    }


class Demand(NamedTuple):
    """The memory that a part of a plan needs on a rank.  part: its name.  purposes: its bytes by purpose, if known."""

    rank: int
    part: str
    nbytes: int
    purposes: Mapping[str, int] = MappingProxyType({})


def stage_demand(rank: int, name: str, stage: Stage, need: Need) -> Demand:
    """Return what a rank needs for a stage."""
    return Demand(rank, f"{name} ({stage.layers_in_words})", need.total_bytes, need.purposes)


def too_small(cluster: Cluster, demand: Demand, why: str = "") -> PlanError:
    """Return the error of a device whose memory is too small for its part of a plan."""
    device = cluster.devices[demand.rank]
    words = ", ".join(f"{purpose} {size_words(nbytes)}" for purpose, nbytes in demand.purposes.items())
    purposes = f" ({words})" if words else ""
    missing = size_words(demand.nbytes - device.memory_bytes)
    return PlanError(
        f"Device '{device.name}' has {size_words(device.memory_bytes)};",
        f"{demand.part} needs {size_words(demand.nbytes)}{purposes}: {missing} are missing.{why}",
        "Add a device, raise its memory, lower batch_size or max_length, or train fewer weights or store them in fewer "
        "bits.",
    )


def by_purpose(needs: Mapping[int, Needed]) -> dict[int, dict[str, int]]:
    """Return each rank's bytes by purpose, as plots.needs shows them."""
    return {rank: need.purposes for rank, need in needs.items()}


def fits(cluster: Cluster, needs: Mapping[int, Needed]) -> bool:
    """Return whether each device has room for its need."""
    return all(need.total_bytes <= cluster.devices[rank].memory_bytes for rank, need in needs.items())


def require_room(cluster: Cluster, demands: Iterable[Demand], why: str = "") -> None:
    """Raise PlanError, naming device, part and bytes, if a device lacks memory: the one that lacks most."""
    worst = max(demands, key=lambda demand: demand.nbytes - cluster.devices[demand.rank].memory_bytes)
    if worst.nbytes > cluster.devices[worst.rank].memory_bytes:
        raise too_small(cluster, worst, why)


def check(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    *,
    sequence_length: int,
    order: str = "1f1b",
    versions: VersionRule = "stashing",
) -> None:
    """Raise PlanError if a rank needs more than its device's budget, also in cached epochs (see require_room).

    order: see in_flight.
    """
    needs = plan_needs(profile, plan, sequence_length=sequence_length, order=order, versions=versions)
    demands = [
        stage_demand(rank, f"stage {index}", stage, needs[rank])
        for index, stage in enumerate(plan.stages)
        for rank in stage.ranks
    ]
    if plan.cached is not None:
        cached = cached_needs(profile, plan.cached, sequence_length=sequence_length)
        demands += [stage_demand(rank, "a cached epoch", plan.cached, need) for rank, need in cached.items()]
    require_room(cluster, demands, _WHY.get(order, ""))


_WHY = {
    "gpipe": " GPipe keeps the activations of all micro-batches.",
    ASYNCHRONOUS: " The stage keeps a version of its trained weights for each mini-batch in flight.",
}
