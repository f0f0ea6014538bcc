"""Make messages take as long as the cluster's links would: for fidelity 'paced', where the kernel does not shape them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.core.cluster import Cluster
from workbench.core.collective_times import broadcast_s, ring_s
from workbench.core.schedule import BROADCAST


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedLinks:
    """The links of one rank."""

    cluster: Cluster
    rank: int

    def transfer_s(self, destination: int, nbytes: int) -> float:
        """Return latency plus bytes over the link's rate, in seconds."""
        return self.cluster.link(self.rank, destination).transfer_s(nbytes)

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return the seconds of a collective on a tensor of so many bytes."""
        return broadcast_s(self.cluster, ranks, nbytes) if kind == BROADCAST else ring_s(self.cluster, kind, ranks, nbytes)
