"""Prices of the schedules that are built from a plan: seconds and bytes by profile and cluster (PAC+, section V-A, 'Profiling')."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from workbench.core.cluster import Cluster
from workbench.core.collective_times import ring_allreduce_s
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.schedule import ALLREDUCE, MERGE, NONE, PULL, SEND, STEP, Op, Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules.hetpipe import PUSH
from workbench.schedules.pieces import Piece, boundary_pieces

SIDE_KINDS = ("SF", "SB")


class PlanCosts:
    """Costs of hybrid_1f1b, gpipe, one_f_one_b and others that `pipeline.assemble` makes: a core.costs.Costs.

    sizes[m], lengths[m]: samples and tokens of micro-batch m.  shared_bytes[p]: the gradient of parameter p that stages share
    (backpropagation.py).
    With a side network two messages cross a boundary: the side network's, as large as its gradient, and the backbone's, the rest.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        *,
        sizes: Sequence[int],
        lengths: Sequence[int],
        shared_bytes: Sequence[int] = (),
    ) -> None:
        self._shared_bytes = tuple(shared_bytes)
        self._profile, self._cluster, self._plan = profile, cluster, plan
        self._sizes, self._lengths = tuple(sizes), tuple(lengths)
        self._has_side = any(kind in layer.times for layer in profile.layers[0] for kind in SIDE_KINDS)
        self._pieces = lru_cache(maxsize=None)(self._cut)

    def layers(self, rank: int) -> tuple[LayerProfile, ...]:
        """Return the layers that a rank holds; none if the plan leaves it idle."""
        index = self._plan.stage_of(rank)
        if index is None:
            return ()
        stage = self._plan.stages[index]
        return self._profile.layers[rank][stage.start : stage.stop]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.nbytes(op.reads[0]))
        if op.kind == ALLREDUCE:
            return ring_allreduce_s(self._cluster, op.ranks, trainable_bytes(self.layers(rank)))
        if op.kind == STEP:
            return sum(layer.seconds(STEP, 1, 1) for layer in self.layers(rank))
        if op.microbatch == NONE:
            return 0.0  # hands on what is there
        samples, length = self._samples(rank, op.microbatch), self._lengths[op.microbatch]
        return sum(layer.seconds(op.kind, samples, length) for layer in self.layers(rank))

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        name, number = value.name, value.microbatch
        if name == "gsum":
            return trainable_bytes(self.layers(value.part))
        if name == "shared":
            return self._shared_bytes[value.part]
        if name in ("tap", "ctx"):
            samples, length = self._samples(value.part, number), self._lengths[number]
            kept = LayerProfile.tap_bytes if name == "tap" else LayerProfile.context_bytes
            return sum(kept(layer, samples, length) for layer in self.layers(value.part))
        if name in ("act", "side"):
            behind = value.stage
        elif name in ("grad", "sgrad"):
            behind = value.stage - 1
        else:
            return 0
        piece = self._pieces(behind, self._sizes[number])[value.part]
        layer = self._profile.layers[piece.source][self._plan.stages[behind].stop - 1]
        samples, length = piece.end - piece.first, self._lengths[number]
        gradient = layer.gradient_bytes(samples, length)
        if name == "act":
            return layer.output_bytes(samples, length) - (gradient if self._has_side else 0)
        return gradient

    def resident_bytes(self, rank: int) -> int:
        """Return weights, gradients and optimizer state in bytes."""
        return resident_bytes(self._profile, self.layers(rank))

    def _samples(self, rank: int, number: int) -> int:
        index = self._plan.stage_of(rank)
        assert index is not None, f"rank {rank} is idle in this plan"
        stage = self._plan.stages[index]
        first, end = stage.split(self._sizes[number])[stage.ranks.index(rank)]
        return end - first

    def _cut(self, behind: int, size: int) -> tuple[Piece, ...]:
        return boundary_pieces(self._plan.stages[behind], self._plan.stages[behind + 1], size)


def trainable_bytes(layers: Sequence[LayerProfile]) -> int:
    """Return the bytes of the trainable parameters, and of their gradients."""
    return sum(layer.trainable_bytes for layer in layers)


def resident_bytes(profile: Profile, layers: Sequence[LayerProfile]) -> int:
    """Return what some layers keep on a device throughout: parameters, gradients, optimizer state."""
    trainable = trainable_bytes(layers)
    frozen = sum(layer.frozen_bytes for layer in layers)
    return frozen + 2 * trainable + round(profile.optimizer_bytes_per_trainable_byte * trainable)


class VirtualWorkerCosts:
    """Costs of hetpipe: a core.costs.Costs.

    PULL and MERGE go over the parameters once, as the optimizer does, and cost as much; PUSH hands on what STEP has summed.
    Weights are values, because a stage keeps the versions that are in flight.
    """

    def __init__(self, profile: Profile, cluster: Cluster, workers: VirtualWorkers, *, sequence_length: int) -> None:
        self._profile, self._cluster, self._length = profile, cluster, sequence_length
        self._shards = workers.shards()
        self._stages = [(plan, stage) for plan in workers.pipelines for stage in plan.stages]
        self._number_of = {stage.ranks[0]: number for number, (_, stage) in enumerate(self._stages)}

    def layers(self, number: int) -> tuple[LayerProfile, ...]:
        """Return the layers of a stage, counted through all virtual workers."""
        stage = self._stages[number][1]
        return self._profile.layers[stage.ranks[0]][stage.start : stage.stop]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.nbytes(op.reads[0]))
        if op.kind == PUSH:
            return 0.0
        if op.kind in (STEP, PULL):
            return sum(layer.seconds(STEP, 1, 1) for layer in self.layers(op.stage))
        if op.kind == MERGE:
            return sum(layer.seconds(STEP, 1, 1) for layer in self._shard(op.stage))
        samples = self._stages[op.stage][0].micro_batch_size
        return sum(layer.seconds(op.kind, samples, self._length) for layer in self.layers(op.stage))

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a value (see Costs)."""
        if value.name in ("push", "global"):
            return trainable_bytes(self._shard(value.stage))
        if value.name == "weight":
            return trainable_bytes(self.layers(value.stage))
        if value.name not in ("act", "grad", "ctx"):
            return 0
        samples = self._stages[value.stage][0].micro_batch_size
        if value.name == "ctx":
            return sum(layer.context_bytes(samples, self._length) for layer in self.layers(value.stage))
        if value.name == "act":
            return self.layers(value.stage)[-1].output_bytes(samples, self._length)
        return self.layers(value.stage - 1)[-1].gradient_bytes(samples, self._length)

    def resident_bytes(self, rank: int) -> int:
        """Return frozen parameters, gradients and optimizer state in bytes; the weights come as values."""
        if rank not in self._number_of:
            return 0
        layers = self.layers(self._number_of[rank])
        return resident_bytes(self._profile, layers) - trainable_bytes(layers)

    def _shard(self, number: int) -> tuple[LayerProfile, ...]:
        shard = self._shards[number]
        return self._profile.layers[shard.server][shard.start : shard.stop]
