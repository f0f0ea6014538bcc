"""A planning problem: layers, devices, and the mini-batch to divide (PAC+, section V-A, Table II)."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.profile import Profile


@dataclass(frozen=True, slots=True)
class Problem:
    """Every layer's cost on every device, the devices, and how a mini-batch is split.

    sequence_length: tokens of a typical sample, for timing.  memory_length: of the longest, which must fit (default: the same).
    """

    profile: Profile
    cluster: Cluster
    _: KW_ONLY
    batch_size: int
    micro_batches: int = 1
    sequence_length: int
    memory_length: int | None = None

    @property
    def longest(self) -> int:
        """Return the tokens of the longest sample."""
        return self.memory_length or self.sequence_length

    @property
    def micro_batch_size(self) -> int:
        """Return B of Table II.  Raises ConfigError if profile, cluster and numbers do not fit together."""
        profile, cluster, batch_size, micro_batches = self.profile, self.cluster, self.batch_size, self.micro_batches
        if profile.world_size != cluster.world_size:
            raise ConfigError(
                f"A plan for cluster '{cluster.name}' of {cluster.world_size} devices was asked for.",
                f"The profile of '{profile.model}' covers {profile.world_size}.",
                "Profile this cluster.",
            )
        if min(batch_size, micro_batches, self.sequence_length) < 1:
            raise ConfigError(
                f"A plan for batch_size {batch_size}, micro_batches {micro_batches}, sequence_length {self.sequence_length} was asked for.",
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
