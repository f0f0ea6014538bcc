"""A planning problem of single-shot inference: a model's operations, devices, and one sequence to split (Galaxy+, section III-C)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.planners.galaxy_plus.memory import HELD, InferenceNeed, MemoryRule, check_inference, inference_needs
from workbench.planners.galaxy_plus.times import stack_lengths
from workbench.planners.memory import readable


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
        """Return the need of every rank in a plan."""
        return inference_needs(plan, self.profile, length=self.longest[0], decoder_length=self.decoder_length, memory=self.memory)

    def check(self, plan: InferencePlan) -> None:
        """Raise PlanError if a plan does not fit (see check_inference)."""
        length, decoder_length = self.longest[0], self.decoder_length
        check_inference(plan, self.profile, self.cluster, length=length, decoder_length=decoder_length, memory=self.memory)

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
