"""The memory of a single-shot inference plan on each device, and the check that it fits (Galaxy+, section III-C, Eq.
8-9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan, InferenceProfile, StackShape
from workbench.core.units import size_words
from workbench.methods.galaxy_plus.planners.terms import stack_lengths
from workbench.planners.memory import Demand, Needed, require_room
from workbench.planners.problem import Problem


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


def part_bytes(problem: Problem[InferenceProfile], second: Sequence[int]) -> tuple[float, float, float]:
    """Return the bytes of a unit in all layers with its keys and values, of a column in scheme-1 layers, and of a
    column in scheme-2 layers.

    second: the layers of scheme 2 in each stack.  Units and columns are the first stack's; a second stack is split in
    proportion.
    """
    profile = problem.profile
    first, pairs = profile.stacks[0], list(zip(profile.stacks, second, strict=True))
    cache_bytes = sum(shape.num_layers * shape.num_units * kept_unit_bytes(problem, shape) for shape in profile.stacks)
    return (
        (sum(shape.num_layers * shape.attention_bytes for shape in profile.stacks) + cache_bytes) / first.num_units,
        sum((shape.num_layers - q) * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
        sum(q * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
    )


def kept_unit_bytes(problem: Problem[InferenceProfile], shape: StackShape) -> int:
    """Return the bytes of keys and values that one unit of a layer keeps; 0 for an encoder's layer."""
    is_kept = problem.kept_tokens and shape is problem.profile.stacks[-1]
    return shape.kept_bytes(problem.kept_tokens, problem.longest) if is_kept else 0


def activation_bytes(problem: Problem[InferenceProfile]) -> int:
    """Return the bytes of activations on a device that computes the longest sequence."""
    longest = stack_lengths(problem.profile, problem.longest, problem.decoder_length)
    return problem.profile.working_bytes_per_token * max(longest)


def needs(problem: Problem[InferenceProfile], plan: InferencePlan) -> dict[int, InferenceNeed]:
    """Return the need of every rank in a plan (Eq. 8 for 'hybrid')."""
    profile = problem.profile
    working = activation_bytes(problem)
    attention, feed_forward, layer, caches = ([0] * plan.num_positions for _ in range(4))
    for shape, count, units, columns in plan.parts(profile.stacks, full_everywhere=profile.full_everywhere):
        for i, (own_units, own_columns) in enumerate(zip(units, columns, strict=True)):
            attention[i] += count * own_units * (shape.unit_bytes + shape.cross_unit_bytes)
            feed_forward[i] += count * own_columns * shape.column_bytes
            caches[i] += count * own_units * kept_unit_bytes(problem, shape)
            if plan.paradigm != "pipeline" or own_units or own_columns:
                layer[i] += count * shape.layer_bytes
    return {
        rank: InferenceNeed(
            attention_bytes=attention[i],
            feed_forward_bytes=feed_forward[i],
            layer_bytes=layer[i],
            ends_bytes=0 if i else profile.ends_bytes,
            working_bytes=working,
            cache_bytes=caches[i],
        )
        for i, rank in enumerate(plan.ranks)
    }


def check(problem: Problem[InferenceProfile], plan: InferencePlan) -> None:
    """Raise PlanError if a plan does not fit (see require_room)."""
    part = f"its part of the {plan.method} plan of '{problem.profile.model}'"
    demands = [Demand(rank, part, need.total_bytes, need.purposes) for rank, need in needs(problem, plan).items()]
    require_room(problem.cluster, demands)


def room_bytes(problem: Problem[InferenceProfile], ranks: Sequence[int], *, has_ends: bool = True) -> list[int]:
    """Return the bytes on each rank for attention, feed-forward network, keys and values, after subtracting its fixed
    memory.

    has_ends: whether the first of the ranks has embedding and head.
    """
    profile = problem.profile
    anyway = activation_bytes(problem) + sum(shape.num_layers * shape.layer_bytes for shape in profile.stacks)
    rooms = [problem.cluster.devices[rank].memory_bytes - anyway for rank in ranks]
    if has_ends:
        rooms[0] -= profile.ends_bytes
    return rooms


def least_missing(problem: Problem[InferenceProfile], *, schemes: int | None = None) -> PlanError:
    """Return the error for the case that no partition over these devices fits: the need, each device's room, and the
    missing bytes in total.

    schemes: 2 if every layer had to use scheme 2.
    """
    profile, members, ends = problem.profile, problem.members, problem.profile.ends_bytes
    feed_forward = sum(shape.num_layers * shape.feed_forward_bytes for shape in profile.stacks)
    need = feed_forward + sum(shape.num_layers * shape.attention_bytes for shape in profile.stacks)
    cache_bytes = sum(shape.num_layers * shape.num_units * kept_unit_bytes(problem, shape) for shape in profile.stacks)
    # Without embedding and head, which one device has in addition to its part.
    room = [max(0, nbytes) for nbytes in room_bytes(problem, members, has_ends=False)]
    most, biggest = sum(room), max(room)
    listed = ", ".join(
        f"'{problem.cluster.devices[rank].name}' {size_words(nbytes)}"
        for rank, nbytes in zip(members, room, strict=True)
    )
    if need + cache_bytes + ends > most:
        why = f"{size_words(need + cache_bytes + ends - most)} are missing in all"
    elif ends > biggest:
        why = f"embedding and head must stand on one device, where {size_words(ends - biggest)} are missing"
    elif schemes == 2:
        why = f"with scheme 2 in every layer each device needs all feed-forward networks, {size_words(feed_forward)}"
    else:
        why = "no cut into whole heads and columns fits each device"
    cache = f"keys and values {size_words(cache_bytes)}, " if cache_bytes else ""
    return PlanError(
        f"A plan of '{profile.model}' for {problem.longest} tokens on {len(room)} devices was asked for.",
        f"Its layers need {size_words(need)}, {cache}embedding and head "
        f"{size_words(ends)}; the devices have room for {listed}: {why}.",
        f"Add a device, raise memory, or take a smaller model{' or shorter texts' if cache_bytes else ''}.",
    )
