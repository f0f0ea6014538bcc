"""Move training state between devices by programs of SENDs and RECVs, from ranks that have a tensor to ranks that need
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.costs import Spec, TableCosts
from workbench.core.errors import ConfigError
from workbench.core.plan import Homes, require_holders
from workbench.core.program import Program
from workbench.core.schedule import NONE, RankList, Schedule, Value, recv, send

CHUNK_BYTES = 1 << 20
"""The maximum bytes of a message: small tensors are packed together, and larger ones are split."""
ROUND_BYTES = 1 << 24
"""The approximate bytes of messages on a rank at a time."""


class Piece(NamedTuple):
    """Bytes [start, stop) of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One round of a move.  chunks[i]: the pieces that make up the value state:_.i, which is sent as bytes."""

    program: Program
    chunks: tuple[tuple[Piece, ...], ...]


def moves(
    targets: Homes,
    homes: Homes,
    specs: Mapping[str, Spec],
    cluster: Cluster,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    round_bytes: int = ROUND_BYTES,
) -> tuple[Move, ...]:
    """Return the rounds that bring each tensor to all ranks that need it.  Empty if every rank already has its tensors.

    targets, homes: the ranks that hold each tensor after the move, and now.  specs: shape and dtype of every tensor in
    `targets`.  If several ranks have a chunk, including ranks that received it earlier, the one that delivers first
    sends it (greedy, by the links of the cluster).  So no link is busy with a transfer that an idle link could do.
    Raises StateError if no rank has a tensor, ConfigError for a rank outside the cluster.
    """
    require_holders(homes, targets)
    # There may be a tensor for each of 300,000 samples, but few pairs of homes.
    names_by_homes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name, ranks in targets.items():
        names_by_homes.setdefault((tuple(homes[name]), tuple(ranks)), []).append(name)
    bundles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for (holding, wanting), names in names_by_homes.items():
        outside = [rank for rank in (*holding, *wanting) if not 0 <= rank < cluster.world_size]
        if outside:
            request, problem = (
                f"Moving '{names[0]}' to or from rank {outside[0]} was asked for.",
                f"The cluster has {cluster.in_words}.",
            )
            raise ConfigError(request, problem, "Number the devices of this cluster.")
        receivers = tuple(sorted(set(wanting).difference(holding)))
        if receivers:
            bundles.setdefault((tuple(sorted(holding)), receivers), []).extend(names)
    chunks = []
    for (holders, receivers), names in bundles.items():
        pieces_of_chunks = tuple(_cut(names, specs, chunk_bytes))
        # Bundles progress in proportion, so that all links are busy until the end.
        chunks += [
            (
                (number + 1) / len(pieces_of_chunks),
                _Chunk(pieces, sum(piece.stop - piece.start for piece in pieces), holders, receivers),
            )
            for number, pieces in enumerate(pieces_of_chunks)
        ]
    chunks.sort(key=lambda pair: pair[0])
    return tuple(_round(turn, cluster) for turn in _rounds([chunk for _, chunk in chunks], round_bytes))


class _Chunk(NamedTuple):
    pieces: tuple[Piece, ...]
    nbytes: int
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def _cut(names: Sequence[str], specs: Mapping[str, Spec], chunk_bytes: int) -> Iterator[tuple[Piece, ...]]:
    """Pack tensors into chunks of at most chunk_bytes."""
    pieces: list[Piece] = []
    free = chunk_bytes
    for name in names:
        begin, end = 0, specs[name].nbytes
        while begin < end:
            stop = min(end, begin + free)
            pieces.append(Piece(name, begin, stop))
            begin, free = stop, free - (stop - begin)
            if not free:
                yield tuple(pieces)
                pieces, free = [], chunk_bytes
    if pieces:
        yield tuple(pieces)


def _rounds(chunks: Sequence[_Chunk], round_bytes: int) -> Iterator[list[_Chunk]]:
    """Distribute chunks to rounds in which no rank has much more than round_bytes."""
    turn: list[_Chunk] = []
    load: dict[int, float] = {}
    for chunk in chunks:
        for ranks, nbytes in ((chunk.holders, chunk.nbytes / len(chunk.holders)), (chunk.receivers, chunk.nbytes)):
            for rank in ranks:
                load[rank] = load.get(rank, 0.0) + nbytes
        turn.append(chunk)
        if max(load.values()) >= round_bytes:
            yield turn
            turn, load = [], {}
    if turn:
        yield turn


def _round(chunks: Sequence[_Chunk], cluster: Cluster) -> Move:
    lists = [RankList() for _ in cluster.devices]
    for number, source, destination in _transfers(chunks, cluster):
        value = Value("state", NONE, number)
        lists[source].ops.append(send(value, source, destination))
        lists[destination].ops.append(recv(value, source, destination))
        lists[destination].outputs.append(value)
        if source in chunks[number].holders and value not in lists[source].inputs:
            lists[source].inputs.append(value)
    sizes = [chunk.nbytes for chunk in chunks]
    costs = TableCosts(
        seconds_by_kind={},
        bytes_by_name={"state": lambda value: Spec((sizes[value.microbatch],), "uint8")},
        cluster=cluster,
    )
    return Move(program=Program.on(cluster, Schedule.of(lists), costs), chunks=tuple(chunk.pieces for chunk in chunks))


def _transfers(chunks: Sequence[_Chunk], cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Return (chunk, source, destination) in start order: first the transfer that can start first, on a tie the rarest
    chunk.  A transfer starts when both ends are free: messages that share a receiver's ingress would come later.
    """
    egress_s, ingress_s = [0.0] * cluster.world_size, [0.0] * cluster.world_size
    present_s = [dict.fromkeys(chunk.holders, 0.0) for chunk in chunks]

    def offer(number: int, source: int, destination: int) -> tuple[float, int, float, int, int, int]:
        there_s = present_s[number]
        start_s = max(egress_s[source], ingress_s[destination], there_s[source])
        end_s = start_s + cluster.link(source, destination).transfer_s(chunks[number].nbytes)
        return start_s, len(there_s), end_s, number, source, destination

    offers = [
        offer(number, source, destination)
        for number, chunk in enumerate(chunks)
        for source in chunk.holders
        for destination in chunk.receivers
    ]
    heapify(offers)
    while offers:
        first = heappop(offers)
        _, _, end_s, number, source, destination = first
        if destination in present_s[number]:
            continue
        if (now := offer(number, source, destination)) > first:  # meanwhile others were sent, so it comes later
            heappush(offers, now)
            continue
        egress_s[source] = ingress_s[destination] = present_s[number][destination] = end_s
        for other in chunks[number].receivers:
            if other not in present_s[number]:
                heappush(offers, offer(number, destination, other))
        yield number, source, destination
