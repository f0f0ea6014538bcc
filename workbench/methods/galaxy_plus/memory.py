"""The bytes that each device of a single-shot inference plan holds: the planners' checks and refusals, the schedules'
costs and the explorer count them here (Galaxy+, section III-C, Eq. 8).

Eq. 8 counts the weights of attention and feed-forward networks.  In addition a device has norms and biases, the first
one embedding and head, each that computes activations, and of a text that goes on keys and values.  What a schedule
stores while it runs, such as the tiles of the hidden state, the simulator counts by the lifetimes of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import mul
from typing import NamedTuple

from workbench.core.inference import InferencePlan, LayerWeights, StackShape
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.planners.memory import Needed


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceNeed(Needed):
    """The bytes of a device under a plan, by purpose.  ends_bytes: embedding and head.  cache_bytes: keys and values of
    its own units, for a text that goes on.
    """

    attention_bytes: int = 0
    feed_forward_bytes: int = 0
    layer_bytes: int = 0
    ends_bytes: int = 0
    working_bytes: int = 0
    cache_bytes: int = 0

    @property
    def purposes(self) -> dict[str, int]:
        """Return the parts by purpose, in words."""
        return {
            "attention": self.attention_bytes,
            "feed-forward": self.feed_forward_bytes,
            "norms and biases": self.layer_bytes,
            "embedding and head": self.ends_bytes,
            "activations": self.working_bytes,
            "keys and values": self.cache_bytes,
        }


class EqualLayers(NamedTuple):
    """Layers that follow each other and are equal: their shape, their number, and each position's units and
    weights of one of them.
    """

    shape: StackShape
    num_layers: int
    units: tuple[int, ...]
    weights: tuple[LayerWeights, ...]


def equal_layers(
    plan: InferencePlan, stacks: Sequence[StackShape], *, full_everywhere: bool = False
) -> Iterator[EqualLayers]:
    """Yield the equal layers that follow each other, in order, with the weights that each position has (Galaxy+ Eq. 8).

    A position without tokens has only its own columns of a scheme-2 layer, unless full_everywhere.  Norms and
    output biases of all layers are on each position that takes part, in a pipeline on those with the layer.
    """
    first, everywhere = 0, range(plan.num_positions)
    is_pipeline, is_cut = plan.paradigm == "pipeline", plan.paradigm in ("hybrid", "tensor")
    kinds = (
        [position for position, count in enumerate(plan.layers) for _ in range(count)] if is_pipeline else plan.schemes
    )
    for shape in stacks:
        last = first + shape.num_layers
        cut = plan.cut(shape) if is_cut else ((shape.num_units,) * len(everywhere), (shape.columns,) * len(everywhere))
        for kind, run in groupby(kinds[first:last] if kinds else (1,) * shape.num_layers):
            units, columns = cut
            if is_pipeline:
                has = [position == kind for position in everywhere]
                units, columns = (tuple(map(mul, has, parts)) for parts in cut)
            else:
                has = [plan.takes_part(position) for position in everywhere]
                if kind == 2:
                    is_full = [full_everywhere or share > 0 for share in plan.shares]
                    columns = tuple(
                        shape.columns if full else part for full, part in zip(is_full, columns, strict=True)
                    )
            yield EqualLayers(shape, len(list(run)), units, tuple(map(shape.weights, units, columns, has)))
        first = last


def device_needs(
    profile: InferenceProfile,
    plan: InferencePlan,
    lengths: Sequence[int],
    *,
    kept_tokens: int = 0,
    memory_tokens: int = 0,
) -> dict[int, InferenceNeed]:
    """Return the need of every rank in a plan.

    lengths: tokens of each stack that are computed at once.  kept_tokens: those for whose keys and values the last
    stack has room, 0 if no text goes on.  memory_tokens: tokens of an encoder's output whose keys and values are then
    kept, too.  Both are over all texts.
    """
    attention, feed_forward, undivided, caches = ([0] * plan.num_positions for _ in range(4))
    for shape, count, units, weights in equal_layers(plan, profile.stacks, full_everywhere=profile.full_everywhere):
        goes_on = kept_tokens and shape is profile.stacks[-1]
        unit_cache_bytes = shape.kept_bytes(kept_tokens, memory_tokens) if goes_on else 0
        for i, layer in enumerate(weights):
            attention[i] += count * layer.attention
            feed_forward[i] += count * layer.feed_forward
            undivided[i] += count * layer.undivided
            caches[i] += count * units[i] * unit_cache_bytes
    return {
        rank: InferenceNeed(
            attention_bytes=attention[i],
            feed_forward_bytes=feed_forward[i],
            layer_bytes=undivided[i],
            ends_bytes=0 if i else profile.ends_bytes,
            working_bytes=profile.working_bytes(lengths) if plan.takes_part(i) else 0,
            cache_bytes=caches[i],
        )
        for i, rank in enumerate(plan.ranks)
    }
