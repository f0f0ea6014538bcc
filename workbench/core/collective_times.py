"""Seconds of collectives over a cluster's links: the same for planners, prices and paced links."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster


def ring_allreduce_s(cluster: Cluster, ranks: Sequence[int], nbytes: int) -> float:
    """Return 2(n-1) steps, each of nbytes/n over the slowest link of the ring, in seconds."""
    if len(ranks) < 2:
        return 0.0
    links = [cluster.link(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)]
    return 2 * (len(ranks) - 1) * max(link.transfer_s(-(-nbytes // len(ranks))) for link in links)


def broadcast_s(cluster: Cluster, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds of a broadcast from ranks[0] along a binomial tree."""
    if len(ranks) < 2:
        return 0.0
    return (len(ranks) - 1).bit_length() * max(cluster.link(ranks[0], rank).transfer_s(nbytes) for rank in ranks[1:])
