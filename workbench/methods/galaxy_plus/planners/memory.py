"""Memory as a constraint of planning: what a plan's devices need, what they have room for, and the refusal of a plan
that does not fit (Galaxy+, section III-C, Eq. 8-9).
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.errors import PlanError
from workbench.core.inference import InferencePlan
from workbench.core.units import size_words
from workbench.methods.galaxy_plus.memory import InferenceNeed, device_needs
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.planners.terms import stack_lengths
from workbench.planners.memory import Demand, require_room
from workbench.planners.problem import Problem


def part_bytes(problem: Problem[InferenceProfile], second: Sequence[int]) -> tuple[float, float, float]:
    """Return the bytes of a unit in all layers with its keys and values, of a column in scheme-1 layers, and of a
    column in scheme-2 layers.

    second: the layers of scheme 2 in each stack.  Units and columns are the first stack's; a second stack is split in
    proportion.
    """
    full_need, stacks = _full_need(problem), problem.profile.stacks
    first, pairs = stacks[0], list(zip(stacks, second, strict=True))
    return (
        (full_need.attention_bytes + full_need.cache_bytes) / first.num_units,
        sum((shape.num_layers - q) * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
        sum(q * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
    )


def needs(problem: Problem[InferenceProfile], plan: InferencePlan) -> dict[int, InferenceNeed]:
    """Return the need of every rank in a plan, for the longest sequence (Eq. 8 for 'hybrid')."""
    return device_needs(
        problem.profile,
        plan,
        stack_lengths(problem.profile, problem.longest, problem.decoder_length),
        kept_tokens=problem.kept_tokens,
        memory_tokens=problem.kept_texts * problem.longest,
    )


def layer_needs(problem: Problem[InferenceProfile], counts: Sequence[int]) -> list[InferenceNeed]:
    """Return the needs of devices with so many layers each, one after the other: of a pipeline."""
    ranks, layers = tuple(range(len(counts))), tuple(counts)
    plan = InferencePlan(method="local", paradigm="pipeline", ranks=ranks, layers=layers)
    return list(needs(problem, plan).values())


def _full_need(problem: Problem[InferenceProfile]) -> InferenceNeed:
    return layer_needs(problem, [problem.profile.num_layers])[0]


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
    full_need = _full_need(problem)
    rooms = [
        problem.cluster.devices[rank].memory_bytes - full_need.working_bytes - full_need.layer_bytes for rank in ranks
    ]
    if has_ends:
        rooms[0] -= full_need.ends_bytes
    return rooms


def least_missing(problem: Problem[InferenceProfile], *, schemes: int | None = None) -> PlanError:
    """Return the error for the case that no partition over these devices fits: the need, each device's room, and the
    missing bytes in total.

    schemes: 2 if every layer had to use scheme 2.
    """
    members, full_need = problem.members, _full_need(problem)
    feed_forward, cache_bytes, ends = full_need.feed_forward_bytes, full_need.cache_bytes, full_need.ends_bytes
    need = full_need.attention_bytes + feed_forward
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
        f"A plan of '{problem.profile.model}' for {problem.longest} tokens on {len(room)} devices was asked for.",
        f"Its layers need {size_words(need)}, {cache}embedding and head "
        f"{size_words(ends)}; the devices have room for {listed}: {why}.",
        f"Add a device, raise memory, or take a smaller model{' or shorter texts' if cache_bytes else ''}.",
    )
