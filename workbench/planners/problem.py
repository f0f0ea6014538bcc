"""A planning problem, one for all methods.  The cost of a plan is the time that `simulate` returns for its
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Protocol, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, PlanError
from workbench.core.profile import Profile

T = TypeVar("T")


class Costs(Protocol):
    """The costs of a model on some devices, of whatever parts of it a planner divides."""

    @property
    def model(self) -> str:
        """Return the model's name."""

    @property
    def world_size(self) -> int:
        """Return the number of devices."""


P = TypeVar("P", bound=Costs)


@dataclass(frozen=True, slots=True)
class Problem(Generic[P]):
    """The costs on every device, the devices with their memory, and the size of one step.

    profile: costs of whole layers, or of the operations inside them for plans that split a single sequence.
    sequence_length: tokens of a typical sample, for timing.  memory_length: tokens of the longest sample, which must
    fit (default: the same).
    decoder_length: tokens in a second stack (default: sequence_length).
    kept_tokens: tokens whose keys and values stay in memory while texts are written, over all texts; 0: none.
    kept_texts: number of these texts; a decoder keeps the keys and values of an encoder's output for each of them.
    batch_size, micro_batches: samples of a step, and the number of parts in which they pass through a pipeline.
    queries: number of queries of a forward-only step; each of them sees all samples.  estimator: the computation for
    each (P-RGE).
    execution: how a device must run their forward passes; 'auto': whichever way is the fastest.
    ranks: the devices that may take part (default: all).
    """

    profile: P
    cluster: Cluster
    _: KW_ONLY
    sequence_length: int
    memory_length: int | None = None
    decoder_length: int | None = None
    kept_tokens: int = 0
    kept_texts: int = 1
    batch_size: int = 1
    micro_batches: int = 1
    queries: int = 1
    estimator: str = "two_point"
    execution: str = "auto"
    ranks: Sequence[int] | None = None

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return max(self.sequence_length, self.memory_length or 0)

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks that may take part.  Raises ConfigError for a repeated or unknown rank, and for another
        cluster's profile.
        """
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

    def alone(self, plan: Callable[[int], T]) -> list[T]:
        """Return the plan of each single device on which the model fits.

        plan: plans for one rank.  Raises the PlanError of the largest device if it fits on none.
        """
        plans, refusals = list[T](), list[tuple[int, PlanError]]()
        for rank in self.members:
            try:
                plans.append(plan(rank))
            except PlanError as error:
                refusals.append((self.cluster.devices[rank].memory_bytes, error))
        if not plans:
            raise max(refusals, key=lambda refusal: refusal[0])[1]
        return plans

    @property
    def micro_batch_size(self) -> int:
        """Return B of PAC+ Table II.  Raises ConfigError if profile, cluster and numbers do not fit together."""
        batch_size, micro_batches = self.batch_size, self.micro_batches
        _ = self.members  # refuses another cluster's profile
        if min(batch_size, micro_batches, self.sequence_length) < 1:
            raise ConfigError(
                f"A plan for batch_size {batch_size}, micro_batches {micro_batches}, sequence_length "
                f"{self.sequence_length} was asked for.",
                "Each must be at least 1.",
                "Raise it.",
            )
        if batch_size % micro_batches:
            raise ConfigError(
                f"A batch_size of {batch_size} in {micro_batches} micro_batches was asked for.",
                f"{batch_size} is not a multiple of {micro_batches}.",
                "Change one of them.",
            )
        return batch_size // micro_batches


TrainingProblem = Problem[Profile]
"""The problem of dividing whole layers and the samples of a step among devices."""
