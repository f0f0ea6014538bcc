"""Seconds and bytes of collectives over a cluster's links: the same for planners, costs and paced links."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.core.cluster import Cluster
from workbench.core.schedule import ALLGATHER, ALLREDUCE, BROADCAST, REDUCESCATTER


def ring_steps(kind: str, size: int) -> int:
    """Return how many times each rank sends 1/size of the tensor in a ring algorithm (Patarasuk and Yuan, 2009)."""
    return {ALLREDUCE: 2 * (size - 1), ALLGATHER: size - 1, REDUCESCATTER: size - 1}[kind]


def sent_bytes(kind: str, size: int, nbytes: int, *, is_root: bool = False) -> int:
    """Return the bytes that leave one of `size` ranks.  nbytes: of the whole tensor.  is_root: of a broadcast, which sends straight."""
    if kind == BROADCAST:
        return (size - 1) * nbytes if is_root else 0
    return ring_steps(kind, size) * nbytes // size


def ring_s(cluster: Cluster, kind: str, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds of a ring's steps, each of nbytes/n over the slowest link of the ring."""
    if len(ranks) < 2:
        return 0.0
    links = [cluster.link(rank, ranks[(index + 1) % len(ranks)]) for index, rank in enumerate(ranks)]
    return ring_steps(kind, len(ranks)) * max(link.transfer_s(-(-nbytes // len(ranks))) for link in links)


def ring_allreduce_s(cluster: Cluster, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds of a ring all-reduce: 2(n-1) steps."""
    return ring_s(cluster, ALLREDUCE, ranks, nbytes)


def broadcast_s(cluster: Cluster, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds of a broadcast from ranks[0] along a binomial tree."""
    if len(ranks) < 2:
        return 0.0
    return (len(ranks) - 1).bit_length() * max(cluster.link(ranks[0], rank).transfer_s(nbytes) for rank in ranks[1:])
