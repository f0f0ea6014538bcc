"""Costs of the schedules built from a plan: seconds and bytes by profile and cluster (PAC+, section V-A, 'Profiling')."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.costs import TOKEN, Spec, opaque, ring_allreduce_s
from workbench.core.division import PARTS, Direction, Division
from workbench.core.plan import Plan
from workbench.core.profile import LayerProfile, Profile
from workbench.core.schedule import ALLREDUCE, MERGE, NONE, PULL, SEND, STEP, Op, Value
from workbench.core.virtual_workers import VirtualWorkers
from workbench.schedules.hetpipe import PUSH
from workbench.schedules.pieces import StepLayout, boundary_of
from workbench.schedules.tensor import BEGIN, CONTEXTS_INSIDE, END

SIDE_KINDS = ("SF", "SB")
DIVIDED = frozenset({BEGIN, *PARTS, "JOIN", "MLP", END})
CROSSING_INSIDE = frozenset({"hidden", "heads", "mid", "cols", "ghidden", "gheads", "gpart", "gmid", "gcols"})
"""Values between the operations of a divided layer that are as large as the layer's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The message per token at a stage boundary: a hidden state in `dtype`, and a side network's in float32 (width 0: none).

    num_encoder_layers, target_length: of an encoder-decoder, which sends the encoder's output together with the decoder's states.
    """

    hidden_size: int
    dtype: str = "float32"
    side_width: int = 0
    num_encoder_layers: int | None = None
    target_length: int = 0

    def tokens(self, layers: int, length: int) -> int:
        """Return the number of tokens of a hidden state after `layers` layers."""
        in_decoder = self.num_encoder_layers is not None and layers > self.num_encoder_layers
        return length + self.target_length * in_decoder


class PlanCosts:
    """Costs of asynchronous_1f1b, hybrid_1f1b, gpipe, one_f_one_b and other schedules of `pipeline.assemble`: a core.costs.Costs.

    sizes[m], lengths[m]: samples and tokens of micro-batch m (in asynchronous_1f1b a mini-batch).  shared_bytes[p]: the float32 gradient of
    parameter p that stages share (backpropagation.py).  crossing: None if the model is only simulated; the message sizes then come from
    the profile.
    stashes_weights: weights are values, because a stage of asynchronous_1f1b keeps the versions that are in flight.
    With a side network two messages cross a boundary: the side network's, as large as its gradient, and the backbone's with the rest.
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
        crossing: Crossing | None = None,
        stashes_weights: bool = False,
    ) -> None:
        self._shared_bytes, self._crossing, self._stashes_weights = tuple(shared_bytes), crossing, stashes_weights
        self._profile, self._cluster, self._plan = profile, cluster, plan
        self.layout = StepLayout(plan=plan, sizes=tuple(sizes), lengths=tuple(lengths))
        self._has_side = any(kind in layer.times for layer in profile.layers[0] for kind in SIDE_KINDS)

    def layers(self, rank: int) -> tuple[LayerProfile, ...]:
        """Return the layers on a rank; none if the plan does not use it."""
        index = self._plan.stage_of(rank)
        if index is None:
            return ()
        stage = self._plan.stages[index]
        return self._profile.layers[rank][stage.start : stage.stop]

    def hidden_bytes(self, microbatch: int) -> int:
        """Return the bytes of a micro-batch's activation between two layers."""
        return self._profile.layers[0][0].output_bytes(self.layout.sizes[microbatch], self.layout.lengths[microbatch])

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.spec(op.reads[0]).nbytes)
        if op.kind == ALLREDUCE:
            return ring_allreduce_s(self._cluster, op.ranks, trainable_bytes(self.layers(rank)))
        if op.kind == STEP:
            return sum(layer.seconds(STEP, 1, 1) for layer in self.layers(rank))
        if op.microbatch == NONE:
            return 0.0  # only a copy
        first, end = self.layout.samples(rank, op.microbatch)
        length = self.layout.lengths[op.microbatch]
        return sum(layer.seconds(op.kind, end - first, length) for layer in self.layers(rank))

    def spec(self, value: Value) -> Spec:
        """Return a value's shape and dtype (see Costs)."""
        name, number = value.name, value.microbatch
        if name in ("weight", "ctx") and self._stashes_weights:  # their part is a version or none, not a rank
            [rank] = self._plan.stages[value.stage].ranks
            value = value._replace(part=rank)
        if name in ("gsum", "weight"):
            return opaque(trainable_bytes(self.layers(value.part)))
        if name == "shared":
            return Spec((self._shared_bytes[value.part] // 4,))
        if name in ("tap", "ctx"):
            first, end = self.layout.samples(value.part, number)
            kept = LayerProfile.tap_bytes if name == "tap" else LayerProfile.context_bytes
            return opaque(sum(kept(layer, end - first, self.layout.lengths[number]) for layer in self.layers(value.part)))
        if name not in ("act", "side", "grad", "sgrad"):
            return TOKEN
        piece, length = self.layout.piece(value), self.layout.lengths[number]
        samples, layers = piece.end - piece.first, self._plan.stages[boundary_of(value)].stop
        if self._crossing is not None:
            crossing = self._crossing
            shape = (samples, crossing.tokens(layers, length))
            if name == "act":
                return Spec((*shape, crossing.hidden_size), crossing.dtype)
            return Spec((*shape, crossing.side_width or crossing.hidden_size))
        layer = self._profile.layers[piece.source][layers - 1]
        gradient = layer.gradient_bytes(samples, length)
        if name == "act":
            return opaque(layer.output_bytes(samples, length) - (gradient if self._has_side else 0))
        return opaque(gradient)

    def resident_bytes(self, rank: int) -> int:
        """Return weights (unless they are values), gradients and optimizer state in bytes."""
        layers = self.layers(rank)
        return resident_bytes(self._profile, layers) - (trainable_bytes(layers) if self._stashes_weights else 0)


def trainable_bytes(layers: Sequence[LayerProfile]) -> int:
    """Return the bytes of the trainable parameters, and of their gradients."""
    return sum(layer.trainable_bytes for layer in layers)


def resident_bytes(profile: Profile, layers: Sequence[LayerProfile]) -> int:
    """Return the bytes that layers need on a device throughout: parameters, gradients, optimizer state."""
    trainable = trainable_bytes(layers)
    frozen = sum(layer.frozen_bytes for layer in layers)
    return frozen + 2 * trainable + round(profile.optimizer_bytes_per_trainable_byte * trainable)


class DividedCosts:
    """Costs of a pipeline by divide_layers, with one rank per stage: a core.costs.Costs.

    whole: of the schedule before the division.  divisions: by rank.
    A stage's contexts are counted at END, as those of an undivided stage are at F.
    """

    def __init__(self, whole: PlanCosts, divisions: Mapping[int, Division]) -> None:
        self._whole, self._divisions = whole, divisions

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        kind = op.kind.removesuffix("B")
        if kind not in DIVIDED or rank not in self._divisions:
            return self._whole.seconds(rank, op)
        division, layers, layout = self._divisions[rank], self._whole.layers(rank), self._whole.layout
        direction: Direction = "F" if kind == op.kind else "B"
        size = layout.sizes[op.microbatch], layout.lengths[op.microbatch]
        if kind in PARTS:
            return division.part_s(layers[0], kind, direction, op.part, *size)
        # All layers are equal: extra seconds of the first and the last layer belong to the embedding and the head.
        rests = [division.rest_s(layer, direction, *size) for layer in layers]
        if kind in (BEGIN, END):
            return rests[0 if kind == BEGIN else -1] - min(rests)
        return min(rests) / (2 if division.columns else 1)

    def spec(self, value: Value) -> Spec:
        """Return a value's bytes (see Costs)."""
        if value.name in CROSSING_INSIDE:
            return opaque(self._whole.hidden_bytes(value.microbatch))
        return TOKEN if value.name in CONTEXTS_INSIDE else self._whole.spec(value)

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that the undivided schedule's ranks need throughout."""
        return self._whole.resident_bytes(rank)


class VirtualWorkerCosts:
    """Costs of hetpipe: a core.costs.Costs.  Each pipeline costs what it would alone with weight stashing.

    PULL and MERGE read the parameters once, like the optimizer, and cost the same.  PUSH sends the sum that STEP has made.
    """

    def __init__(self, profile: Profile, cluster: Cluster, workers: VirtualWorkers, *, sequence_length: int) -> None:
        self._profile, self._cluster, self._shards = profile, cluster, workers.shards()
        self._of: list[tuple[int, PlanCosts]] = []  # of a stage, numbered through all pipelines: its number in its own
        self._of_rank: dict[int, PlanCosts] = {}
        for plan in workers.pipelines:
            sizes, lengths = (plan.micro_batch_size,), (sequence_length,)
            alone = PlanCosts(profile, cluster, plan, sizes=sizes, lengths=lengths, stashes_weights=True)
            self._of += [(number, alone) for number in range(len(plan.stages))]
            self._of_rank |= {stage.ranks[0]: alone for stage in plan.stages}

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of an operation (see Costs)."""
        if op.kind == SEND:
            return self._cluster.link(*op.ranks).transfer_s(self.spec(op.reads[0]).nbytes)
        if op.kind == PUSH:
            return 0.0
        if op.kind == MERGE:
            return sum(layer.seconds(STEP, 1, 1) for layer in self._shard(op.stage))
        return self._of_rank[rank].seconds(rank, op._replace(kind=STEP if op.kind == PULL else op.kind, microbatch=0))

    def spec(self, value: Value) -> Spec:
        """Return a value's bytes (see Costs); a profile has no shapes."""
        if value.name in ("push", "global"):
            return opaque(trainable_bytes(self._shard(value.stage)))
        if value.stage == NONE:
            return TOKEN
        number, alone = self._of[value.stage]
        return alone.spec(value._replace(stage=number, microbatch=0))

    def resident_bytes(self, rank: int) -> int:
        """Return frozen parameters, gradients and optimizer state in bytes; the weights are counted as values."""
        return self._of_rank[rank].resident_bytes(rank) if rank in self._of_rank else 0

    def _shard(self, number: int) -> tuple[LayerProfile, ...]:
        shard = self._shards[number]
        return self._profile.layers[shard.server][shard.start : shard.stop]
