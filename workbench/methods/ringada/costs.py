"""Costs of RingAda's round: seconds and bytes of each operation and value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts, opaque
from workbench.core.plan import DISK, KEEP, RECOMPUTE, Plan
from workbench.core.profile import Profile
from workbench.core.schedule import NONE, STEP, Op, Value
from workbench.methods.ringada.schedule import (
    BACKWARD,
    EMBED,
    FORWARD,
    HEAD,
    HEAD_STEP,
    LOAD,
    LOWEST,
    MEAN,
    PREFIX,
    TAKE,
    Iteration,
)
from workbench.schedules.costs import Crossing, context_bytes
from workbench.schedules.recomputation import AGAIN, CONTEXT, INPUT, READ, Size, sizes_in_layers


@dataclass(frozen=True)
class RingLayout:
    """A round under a plan.  sizes[m], lengths[m]: samples and tokens of micro-batch m of the round."""

    plan: Plan
    iterations: Sequence[Iteration]
    sizes: Sequence[int]
    lengths: Sequence[int]

    @cached_property
    def iteration_of(self) -> list[int]:
        """Return each micro-batch's mini-batch."""
        return [number for number, iteration in enumerate(self.iterations) for _ in range(iteration.num_micro_batches)]

    def layers(self, op: Op) -> range:
        """Return the layers that P, F, R, READ, B or STEP is about."""
        number = op.microbatch if op.kind == STEP else self.iteration_of[op.microbatch]
        return layers_of(self.plan, op, self.iterations[number].first_unfrozen)

    def first_unfrozen(self, m: int) -> int:
        """Return the lowest layer that micro-batch m trains."""
        return self.iterations[self.iteration_of[m]].first_unfrozen


def ring_costs(
    profile: Profile, cluster: Cluster, layout: RingLayout, *, crossing: Crossing, head_values: int, beside_bytes: int
) -> TableCosts:
    """Return the costs of ring_round and federated_round.

    crossing: the hidden state at a stage boundary.  head_values: float32 numbers of the head and its moments.
    beside_bytes: bytes of embedding and head, of which each device has a copy.
    Each layer of the profile has times for LOAD, P, F, B, A (see LOWEST) and STEP; the first also for E, the last also
    for H and HSTEP.
    """
    plan, sizes, lengths = layout.plan, layout.sizes, layout.lengths
    side_width, width = crossing.side_width, crossing.hidden_size

    def layers_s(rank: int, op: Op, kind: str, layers: range) -> float:
        return profile.seconds(rank, kind, sizes[op.microbatch], lengths[op.microbatch], layers.start, layers.stop)

    def end_s(rank: int, op: Op) -> float:
        layer = 0 if op.kind == EMBED else profile.num_layers - 1
        return layers_s(rank, op, op.kind, range(layer, layer + 1))

    def head_step_s(rank: int, op: Op) -> float:
        return profile.layers[rank][-1].seconds(HEAD_STEP, 1, 1)

    def step_s(rank: int, op: Op) -> float:
        layers = layout.layers(op)
        return profile.seconds(rank, STEP, 1, 1, layers.start, layers.stop)

    def mean_s(rank: int, op: Op) -> float:
        all_layers = profile.seconds(rank, STEP, 1, 1, 0, profile.num_layers)
        return all_layers + head_step_s(rank, op)  # like TAKE: it moves about as many bytes as an update

    def load_s(rank: int, op: Op) -> float:
        is_side = side_width and op.stage != NONE
        first = layout.first_unfrozen(op.microbatch)
        return layers_s(rank, op, LOAD, layout.layers(op) if is_side else range(first, first + 1))

    def frozen_s(rank: int, op: Op) -> float:
        if not side_width:
            return layers_s(rank, op, PREFIX, layout.layers(op))
        stage = plan.stages[op.stage]
        return layers_s(rank, op, PREFIX, range(stage.start, stage.stop)) + layers_s(
            rank, op, FORWARD, layout.layers(op)
        )

    def nbytes(rank: int, op: Op, layers: range) -> int:
        m = op.microbatch
        return context_bytes(profile.layers[rank][layers.start : layers.stop], sizes[m], lengths[m])

    def forward_s(rank: int, op: Op) -> float:
        layers, written = layout.layers(op), 0
        if plan.stages[op.stage].activations == DISK:
            written = nbytes(rank, op, layers[: sum(value.name.startswith(INPUT) for value in op.writes)])
        return cluster.devices[rank].stored_s(written) + layers_s(rank, op, FORWARD, layers)

    def read_s(rank: int, op: Op) -> float:
        return cluster.devices[rank].loaded_s(nbytes(rank, op, layout.layers(op)))

    again = {KEEP: lambda rank, op: 0.0, DISK: read_s, RECOMPUTE: forward_s}

    def backward_s(rank: int, op: Op) -> float:
        lowest, layers = layout.first_unfrozen(op.microbatch), layout.layers(op)
        # Before R and READ are separate operations, B contains them.
        again_s = again[plan.stages[op.stage].activations](rank, op) if op.part == NONE else 0.0
        if layers.start > lowest:
            return again_s + layers_s(rank, op, BACKWARD, layers)
        of_lowest, above = layers[:1], layers[1:]
        return again_s + layers_s(rank, op, LOWEST, of_lowest) + layers_s(rank, op, BACKWARD, above)

    def context(value: Value) -> Spec:
        stage, m = plan.stages[value.stage], value.microbatch
        trained = profile.layers[stage.ranks[0]][max(layout.first_unfrozen(m), stage.start) : stage.stop]
        return opaque(sum(layer.context_bytes(sizes[m], lengths[m]) for layer in trained))

    def in_layer(layer: int) -> tuple[Size, Size, Size]:
        """Return the sizes of a recomputed layer's input, context, and gradient of its input."""

        def spec_of_context(value: Value) -> Spec:
            layer_bytes, m = profile.layers[plan.stages[value.stage].ranks[0]][layer], value.microbatch
            return opaque(layer_bytes.context_bytes(sizes[m], lengths[m]))

        def state(value: Value) -> Spec:
            return Spec((sizes[value.microbatch], crossing.tokens(layer, lengths[value.microbatch]), width))

        return state, spec_of_context, state

    def states(value: Value) -> Spec:
        name, m = value.name, value.microbatch
        first = layout.first_unfrozen(m)
        done = {"act": value.stage + 1, "side": value.stage + 1, "grad": value.stage}.get(name, 0)
        layers = first if name == "mid" else plan.stages[done - 1].stop if done else 0
        tokens = crossing.tokens(layers, lengths[m])
        if side_width and name == "mid":
            stage = plan.stages[value.stage]
            num_taps = stage.stop - max(first, stage.start)
            return opaque(4 * sizes[m] * tokens * (num_taps * width + side_width))
        if side_width and name in ("side", "grad"):
            return Spec((sizes[m], tokens, side_width))
        if done == len(plan.stages) and tokens != lengths[m]:
            tokens = crossing.target_length  # the head reads only the decoder's states
        return Spec((sizes[m], tokens, width + side_width * (name == "act" and layers <= first)))

    def resident(rank: int) -> int:
        """Return the bytes of weights, gradients, optimizer state and the copies of embedding and head."""
        number = plan.stage_of(rank)
        if number is None:
            return 0
        stage = plan.stages[number]
        return profile.stored_bytes(profile.layers[rank][stage.start : stage.stop]) + beside_bytes

    return TableCosts(
        seconds_by_kind={
            **dict.fromkeys((EMBED, HEAD), end_s),
            **dict.fromkeys((HEAD_STEP, TAKE), head_step_s),
            STEP: step_s,
            MEAN: mean_s,
            LOAD: load_s,
            PREFIX: frozen_s,
            **dict.fromkeys((FORWARD, AGAIN), forward_s),
            READ: read_s,
            BACKWARD: backward_s,
        },
        bytes_by_name={
            **dict.fromkeys(("emb", "act", "mid", "grad", "side"), states),
            CONTEXT: context,
            **sizes_in_layers(plan, in_layer),
            "head": Spec((head_values,)),
            "mean": Spec((head_values + 3 * sum(layer.trainable_bytes // 4 for layer in profile.layers[0]),)),
            "told": Spec((2,)),
            "free": Spec((1,), "uint8"),  # it crosses to the next initiator
        },
        resident_by_rank=resident,
        cluster=cluster,
    )


def layers_of(plan: Plan, op: Op, first_unfrozen: int) -> range:
    """Return the layers that P, F, R, READ, B, STEP or LOAD is about in a mini-batch that trains the layers from
    `first_unfrozen` on.
    """
    if op.part != NONE:  # a layer of a stage that recomputes
        return range(op.part, op.part + 1)
    stage = plan.stages[op.stage]
    if op.kind == PREFIX:
        return range(stage.start, min(stage.stop, first_unfrozen))
    return range(max(stage.start, first_unfrozen), stage.stop)
