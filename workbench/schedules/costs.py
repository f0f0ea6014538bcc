"""Costs of the schedules built from a plan: seconds and bytes by profile and cluster (PAC+, section
V-A, 'Profiling').
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts, opaque
from workbench.core.plan import DISK, Plan
from workbench.core.profile import LayerProfile, Profile, trainable_bytes
from workbench.core.schedule import NONE, STEP, Op, Value
from workbench.schedules.division import PARTS, Direction, Division
from workbench.schedules.pieces import StepLayout, boundary_of
from workbench.schedules.recomputation import AGAIN, INPUT, READ, Size, sizes_in_layers
from workbench.schedules.tensor import BEGIN, END

SIDE_KINDS = ("SF", "SB")
DIVIDED = frozenset({BEGIN, *PARTS, "JOIN", "MLP", END})
CROSSING_INSIDE = frozenset({"hidden", "heads", "mid", "cols", "ghidden", "gheads", "gpart", "gmid", "gcols"})
"""Values between the operations of a divided layer that are as large as the layer's output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The message per token at a stage boundary: a hidden state in `dtype`, and a side network's in float32 (width 0:
    none).

    num_encoder_layers, target_length: the shape of an encoder-decoder, which sends the encoder's output together with
    the decoder's states.
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


COMPUTED = ("F", "B", "SF", "SB", AGAIN, READ)
"""The passes whose seconds a profile has by layer; a layer that is recomputed takes as long as its forward pass, and
READ as long as the disk needs for the layer's activations."""


def context_bytes(layers: Sequence[LayerProfile], samples: int, length: int) -> int:
    """Return the bytes that layers' backward passes need of their forward passes, without the taps."""
    return sum(layer.context_bytes(samples, length) for layer in layers)


def plan_costs(
    profile: Profile,
    cluster: Cluster,
    plan: Plan,
    *,
    sizes: Sequence[int],
    lengths: Sequence[int],
    shared_bytes: Sequence[int] = (),
    crossing: Crossing | None = None,
    stashes_weights: bool = False,
    divisions: Mapping[int, Division] | None = None,
) -> TableCosts:
    """Return the costs of asynchronous_1f1b, hybrid_1f1b, backpropagation and other schedules of
    `pipeline.assemble`.

    sizes[m], lengths[m]: samples and tokens of micro-batch m (in asynchronous_1f1b a mini-batch).  shared_bytes[p]: the
    float32 gradient of parameter p that stages share (see pipeline.backpropagation).  crossing: None if the model is
    only simulated; the message sizes then come from the profile.
    stashes_weights: whether weights are values, because a stage of asynchronous_1f1b keeps the versions in flight.
    divisions: by rank, the divisions of a pipeline by divide_layers, with one rank per stage.  A stage's contexts are
    counted at END, as those of an undivided stage are at F.
    With a side network two messages cross a boundary: the side network's, as large as its gradient, and the backbone's
    with the rest.
    """
    layout = StepLayout(plan=plan, sizes=tuple(sizes), lengths=tuple(lengths))
    stage_layers = {rank: (stage.start, stage.stop) for stage in plan.stages for rank in stage.ranks}
    layers = {rank: profile.layers[rank][start:stop] for rank, (start, stop) in stage_layers.items()}
    trained = {rank: trainable_bytes(rank_layers) for rank, rank_layers in layers.items()}
    on_disk = {number for number, stage in enumerate(plan.stages) if stage.activations == DISK}
    has_side = any(kind in layer.times for layer in profile.layers[0] for kind in SIDE_KINDS)

    def pass_s(rank: int, op: Op) -> float:
        first, end = layout.samples(rank, op.microbatch)
        start, stop = stage_layers[rank] if op.part == NONE else (op.part, op.part + 1)
        size, kind = (end - first, layout.lengths[op.microbatch]), "F" if op.kind == AGAIN else op.kind
        nbytes, device = 0, cluster.devices[rank]
        if op.kind in ("F", READ) and op.stage in on_disk:
            count = sum(value.name.startswith(INPUT) for value in (*op.reads, *op.writes))
            nbytes = context_bytes(profile.layers[rank][start : start + count], *size)
        if op.kind == READ:
            return device.loaded_s(nbytes)
        return device.stored_s(nbytes) + profile.seconds(rank, kind, *size, start, stop)

    def divided_s(rank: int, op: Op) -> float:
        division, kind = (divisions or {})[rank], op.kind.removesuffix("B")
        direction: Direction = "F" if kind == op.kind else "B"
        size = layout.sizes[op.microbatch], layout.lengths[op.microbatch]
        if kind in PARTS:
            return division.part_s(layers[rank][0], kind, direction, op.part, *size)
        # All layers are equal: extra seconds of the first and the last layer belong to the embedding and the head.
        rests = [division.rest_s(layer, direction, *size) for layer in layers[rank]]
        if kind in (BEGIN, END):
            return rests[0 if kind == BEGIN else -1] - min(rests)
        return min(rests) / (2 if division.columns else 1)

    def rank_of(value: Value) -> int:
        # With stashed weights the part is a version, or none.
        return plan.stages[value.stage].ranks[0] if stashes_weights else value.part

    def bytes_of(name: str, rank: int, value: Value, rank_layers: Sequence[LayerProfile]) -> Spec:
        first, end = layout.samples(rank, value.microbatch)
        size = end - first, layout.lengths[value.microbatch]
        return opaque(sum(getattr(layer, name)(*size) for layer in rank_layers))

    def in_layer(layer: int) -> tuple[Size, Size, Size]:
        """Return the sizes of a recomputed layer's input, context, and gradient of its input."""

        def sized(name: str, start: int) -> Size:
            """Return the bytes of the layer at `start`, or none before the first."""

            def spec(value: Value) -> Spec:
                rank = rank_of(value)
                return bytes_of(name, rank, value, profile.layers[rank][max(0, start) : start + 1])

            return spec

        return sized("output_bytes", layer - 1), sized("context_bytes", layer), sized("gradient_bytes", layer - 1)

    def crosses(value: Value) -> Spec:
        piece, length = layout.piece(value), layout.lengths[value.microbatch]
        samples, above = piece.end - piece.first, plan.stages[boundary_of(value)].stop
        if crossing is not None:
            shape = (samples, crossing.tokens(above, length))
            if value.name == "act":
                return Spec((*shape, crossing.hidden_size), crossing.dtype)
            return Spec((*shape, crossing.side_width or crossing.hidden_size))
        layer = profile.layers[piece.source][above - 1]
        gradient = layer.gradient_bytes(samples, length)
        if value.name == "act":
            return opaque(layer.output_bytes(samples, length) - (gradient if has_side else 0))
        return opaque(gradient)

    def inside(value: Value) -> Spec:
        return opaque(
            profile.layers[0][0].output_bytes(layout.sizes[value.microbatch], layout.lengths[value.microbatch])
        )

    in_parts = (
        dict.fromkeys((f"{kind}{back}" for kind in DIVIDED for back in ("", "B")), divided_s) if divisions else {}
    )
    stashed = trained if stashes_weights else {}
    return TableCosts(
        seconds_by_kind=dict.fromkeys(COMPUTED, pass_s)
        | {STEP: lambda rank, op: profile.seconds(rank, STEP, 1, 1, *stage_layers[rank])}
        | in_parts,
        bytes_by_name={
            "gsum": lambda value: opaque(trained[value.part]),
            "weight": lambda value: opaque(trained.get(rank_of(value), 0)),
            "shared": lambda value: Spec((shared_bytes[value.part] // 4,)),
            "tap": lambda value: bytes_of("tap_bytes", value.part, value, layers[value.part]),
            "ctx": lambda value: bytes_of("context_bytes", rank_of(value), value, layers[rank_of(value)]),
            **dict.fromkeys(("act", "side", "grad", "sgrad"), crosses),
            **(dict.fromkeys(CROSSING_INSIDE, inside) if divisions else {}),
            **sizes_in_layers(plan, in_layer),
        },
        resident_by_rank=lambda rank: profile.stored_bytes(layers.get(rank, ())) - stashed.get(rank, 0),
        cluster=cluster,
    )
