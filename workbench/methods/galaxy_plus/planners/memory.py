"""The memory of a single-shot inference plan on each device, and the check that it fits (Galaxy+, section III-C, Eq. 8-9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.core.ranges import Fraction, require_ranges
from workbench.methods.galaxy_plus.planners.pricing import stack_lengths
from workbench.planners.memory import readable


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRule:
    """The rule that decides what counts towards a device's memory.

    embedding: embedding and head are on the 'first' position, on 'each', or do not count ('none'); embedding_share: the share of their
    bytes that counts.  layers: count the part of a layer on every device (norms, output biases).  working: count activations.
    strict: the need must be below the budget (Eq. 9 as printed), not at most the budget.
    full_everywhere: every device has the whole feed-forward network of a scheme-2 layer (Eq. 8 as printed), not only devices with tokens.
    """

    embedding: Literal["first", "each", "none"] = "first"
    embedding_share: Fraction = 1.0
    layers: bool = True
    working: bool = True
    strict: bool = False
    full_everywhere: bool = False

    def __post_init__(self) -> None:
        require_ranges(self, "A rule of memory")

    def ends_bytes(self, profile: InferenceProfile, position: int) -> int:
        """Return the counted bytes of embedding and head at a position."""
        if self.embedding == "none" or (self.embedding == "first" and position > 0):
            return 0
        return round(self.embedding_share * (profile.first_bytes + profile.last_bytes))

    def budget_bytes(self, cluster: Cluster, rank: int) -> int:
        """Return the most bytes that a device may use."""
        return cluster.devices[rank].memory_bytes - (1 if self.strict else 0)


HELD = MemoryRule()
"""The runtime's memory: weights, embedding and head at position 0, activations."""
PAPER = MemoryRule(embedding="none", layers=False, working=False, strict=True, full_everywhere=True)
"""Eq. 8-9 as printed: only the weights of attention and feed-forward networks, and less than the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceNeed:
    """The bytes of a device under a plan, by purpose.  ends_bytes: embedding and head."""

    attention_bytes: int = 0
    feed_forward_bytes: int = 0
    layer_bytes: int = 0
    ends_bytes: int = 0
    working_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Return the sum of the parts."""
        return self.attention_bytes + self.feed_forward_bytes + self.layer_bytes + self.ends_bytes + self.working_bytes


def part_bytes(profile: InferenceProfile, second: Sequence[int]) -> tuple[float, float, float]:
    """Return the bytes of a unit in all layers, of a column in scheme-1 layers, and of a column in scheme-2 layers.

    second: the layers of scheme 2 in each stack.  Units and columns are the first stack's; a second is split in proportion.
    """
    first, pairs = profile.stacks[0], list(zip(profile.stacks, second, strict=True))
    return (
        sum(shape.num_layers * shape.attention_bytes for shape in profile.stacks) / first.num_units,
        sum((shape.num_layers - q) * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
        sum(q * shape.feed_forward_bytes for shape, q in pairs) / first.columns,
    )


@dataclass(frozen=True, slots=True)
class SequenceProblem:
    """Every operation's cost on every device, the devices, and a sequence of `length` tokens (`decoder_length` in a second stack).

    memory_length: tokens that must fit (default: length).  ranks: the devices that may take part (default: all).
    """

    profile: InferenceProfile
    cluster: Cluster
    _: KW_ONLY
    length: int
    decoder_length: int | None = None
    memory_length: int | None = None
    ranks: Sequence[int] | None = None
    memory: MemoryRule = HELD

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the tokens of each stack, for timing.  Raises ConfigError for less than one token."""
        return stack_lengths(self.profile, self.length, self.decoder_length)

    @property
    def longest(self) -> tuple[int, ...]:
        """Return the tokens of each stack that must fit in memory."""
        return stack_lengths(self.profile, max(self.length, self.memory_length or 0), self.decoder_length)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks that may take part.  Raises ConfigError for a repeated or unknown rank, and for another cluster's profile."""
        profile, cluster = self.profile, self.cluster
        if profile.world_size != cluster.world_size:
            raise ConfigError(
                f"A plan of '{profile.model}' for cluster '{cluster.name}' was asked for.",
                f"The profile has {profile.world_size} devices, the cluster {cluster.world_size}.",
                "Profile the model on this cluster.",
            )
        chosen = tuple(range(cluster.world_size)) if self.ranks is None else tuple(self.ranks)
        if not chosen or len(set(chosen)) != len(chosen) or not all(0 <= rank < cluster.world_size for rank in chosen):
            raise ConfigError(
                f"A plan on the ranks {list(chosen)} was asked for.",
                f"Cluster '{cluster.name}' has ranks 0 to {cluster.world_size - 1}.",
                "Name at least one of them, each once.",
            )
        return chosen

    def needs(self, plan: InferencePlan) -> dict[int, InferenceNeed]:
        """Return the need of every rank in a plan (Eq. 8 for 'hybrid')."""
        profile, memory = self.profile, self.memory
        working = profile.working_bytes_per_token * max(self.longest) if memory.working else 0
        attention, feed_forward, layer = ([0] * plan.num_positions for _ in range(3))
        for shape, count, units, columns in plan.parts(profile.stacks, full_everywhere=memory.full_everywhere):
            for i, (own_units, own_columns) in enumerate(zip(units, columns, strict=True)):
                attention[i] += count * own_units * (shape.unit_bytes + shape.cross_unit_bytes)
                feed_forward[i] += count * own_columns * shape.column_bytes
                if plan.paradigm != "pipeline" or own_units or own_columns:
                    layer[i] += count * shape.layer_bytes
        return {
            rank: InferenceNeed(
                attention_bytes=attention[i],
                feed_forward_bytes=feed_forward[i],
                layer_bytes=layer[i] if memory.layers else 0,
                ends_bytes=memory.ends_bytes(profile, i),
                working_bytes=working,
            )
            for i, rank in enumerate(plan.ranks)
        }

    def check(self, plan: InferencePlan) -> None:
        """Raise PlanError if a plan does not fit, naming the device, its need, its memory, and the missing bytes there and in total."""
        needs = self.needs(plan)
        missing = {rank: need.total_bytes - self.memory.budget_bytes(self.cluster, rank) for rank, need in needs.items()}
        short = {rank: nbytes for rank, nbytes in missing.items() if nbytes > 0}
        if not short:
            return
        worst = max(short, key=lambda rank: short[rank])
        need, device = needs[worst], self.cluster.devices[worst]
        whole = ""
        if len(short) > 1:
            named = ", ".join(f"'{self.cluster.devices[rank].name}' {readable(nbytes)}" for rank, nbytes in short.items())
            whole = f" In all {readable(sum(short.values()))} are missing: {named}."
        raise PlanError(
            f"Device '{device.name}' has {readable(device.memory_bytes)};",
            f"its part of the {plan.method} plan of '{self.profile.model}' needs {readable(need.total_bytes)}"
            f" (attention {readable(need.attention_bytes)}, feed-forward {readable(need.feed_forward_bytes)},"
            f" norms and biases {readable(need.layer_bytes)},"
            f" embedding and head {readable(need.ends_bytes)}, activations {readable(need.working_bytes)}):"
            f" {readable(short[worst])} are missing.{whole}",
            "Add a device, raise its memory, use scheme 1 in more layers, or a smaller model.",
        )

    def room_bytes(self, ranks: Sequence[int], *, position: int | None = None) -> list[int]:
        """Return the bytes on each rank for attention and feed-forward weights, after subtracting its fixed memory.

        position: of every rank (default: each its place in `ranks`); the first may have embedding and head.
        """
        profile, memory = self.profile, self.memory
        anyway = profile.working_bytes_per_token * max(self.longest) if memory.working else 0
        anyway += sum(shape.num_layers * shape.layer_bytes for shape in profile.stacks) if memory.layers else 0
        places = range(len(ranks)) if position is None else [position] * len(ranks)
        return [
            memory.budget_bytes(self.cluster, rank) - anyway - memory.ends_bytes(profile, place)
            for rank, place in zip(ranks, places, strict=True)
        ]

    def least_missing(self, *, schemes: int | None = None) -> PlanError:
        """Return the error if no partition over these devices fits: the need, each device's room, and the missing bytes in total.

        schemes: 2 if every layer had to be of scheme 2.
        """
        profile, memory, members = self.profile, self.memory, self.members
        feed_forward = sum(shape.num_layers * shape.feed_forward_bytes for shape in profile.stacks)
        need = feed_forward + sum(shape.num_layers * shape.attention_bytes for shape in profile.stacks)
        # Without embedding and head, which one device has in addition to its part.
        room = [max(0, nbytes) for nbytes in self.room_bytes(members, position=1)]
        ends = memory.ends_bytes(profile, 0) if memory.embedding == "first" else 0
        most, biggest = sum(room), max(room)
        listed = ", ".join(f"'{self.cluster.devices[rank].name}' {readable(nbytes)}" for rank, nbytes in zip(members, room, strict=True))
        if need + ends > most:
            why = f"{readable(need + ends - most)} are missing in all"
        elif ends > biggest:
            why = f"embedding and head must stand on one device, where {readable(ends - biggest)} are missing"
        elif schemes == 2:
            why = f"with scheme 2 in every layer each device needs all feed-forward networks, {readable(feed_forward)}"
        else:
            why = "no cut into whole heads and columns fits each device"
        return PlanError(
            f"A plan of '{profile.model}' for {self.longest[0]} tokens on {len(room)} devices was asked for.",
            f"Its layers need {readable(need)}, embedding and head {readable(ends)}; the devices have room for {listed}: {why}.",
            "Add a device, raise memory, or take a smaller model.",
        )
