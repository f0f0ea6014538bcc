"""The costs of a Program: seconds of operations and collectives, and shapes of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from workbench.core.cluster import Cluster
from workbench.core.medium import Air
from workbench.core.schedule import ALLGATHER, ALLREDUCE, BROADCAST, COLLECTIVES, REDUCESCATTER, SEND, Op, Ranks, Value

ITEM_BYTES = {
    "bytes": 1,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float32": 4,
    "int32": 4,
}
ITEM_BYTES |= {"int64": 8, "float64": 8}


class Spec(NamedTuple):
    """The shape and dtype of a value.  dtype: torch's name, or 'bytes' (shape (n,)) if the value is not one tensor,
    such as a context.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Return the size of the value in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


def opaque(nbytes: int) -> Spec:
    """Return the spec of a value if only its size in bytes is known."""
    return Spec((nbytes,), "bytes")


TOKEN = opaque(0)
"""The spec of a value without content, which only orders operations."""


class Costs(Protocol):
    """The costs of one schedule's operations and the specs of its values.  Equal operations of a rank cost the same."""

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds of a compute operation on a rank, of a transfer (given its SEND), or of a collective."""

    def spec(self, value: Value) -> Spec:
        """Return the shape and dtype of a value; TOKEN if the value only orders operations."""

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes that stay in memory throughout: weights, gradients, optimizer state."""


@dataclass(frozen=True, kw_only=True)
class TableCosts:
    """Costs by operation kind and value name, which the builder of a schedule computes from a profile.

    seconds_by_kind: kind -> seconds, or a function of (rank, op).  bytes_by_name: value name -> bytes, spec, or a
    function of the value.  resident_by_rank: rank -> bytes, or a function of the rank.
    cluster: transfers and collectives that the table leaves out take the time of its links.  message_s: overhead of
    each of their messages, in addition to the link's time.
    """

    seconds_by_kind: Mapping[str, float | Callable[[int, Op], float]]
    bytes_by_name: Mapping[str, int | Spec | Callable[[Value], Spec]] = field(default_factory=dict)
    resident_by_rank: Mapping[int, int] | Callable[[int], int] = field(default_factory=dict)
    cluster: Cluster | None = None
    message_s: float = 0.0

    def seconds(self, rank: int, op: Op) -> float:
        """Return the table's entry for the kind, or else the time on the cluster's links; 0 for other kinds."""
        entry = self.seconds_by_kind.get(op.kind)
        if entry is not None:
            return entry(rank, op) if callable(entry) else entry
        return 0.0 if self.cluster is None else self._links_s(self.cluster, op)

    def _links_s(self, cluster: Cluster, op: Op) -> float:
        if op.kind == SEND:
            key = (op.ranks, self.spec(op.reads[0]))
            seconds = self._transfers.get(key)
            if seconds is None:
                seconds = cluster.link(*op.ranks).transfer_s(key[1].nbytes) + self.message_s
                self._transfers[key] = seconds
            return seconds
        if op.kind not in COLLECTIVES:
            return 0.0
        wire_s = collective_s(cluster, op.kind, op.ranks, self.spec(op.writes[0]).nbytes)
        return wire_s + num_rounds(op.kind, len(op.ranks)) * self.message_s

    def spec(self, value: Value) -> Spec:
        """Return the table's bytes or spec for the name, 0 bytes if it is missing."""
        spec = self._specs.get(value)
        if spec is None:
            entry = self.bytes_by_name.get(value.name, TOKEN)
            if callable(entry):
                entry = entry(value)
            spec = self._specs[value] = entry if isinstance(entry, Spec) else opaque(entry)
        return spec

    @cached_property
    def _specs(self) -> dict[Value, Spec]:
        return {}  # a value is looked up where it is written, sent and read

    @cached_property
    def _transfers(self) -> dict[tuple[Ranks, Spec], float]:
        return {}  # most messages between two ranks have one size

    def resident_bytes(self, rank: int) -> int:
        """Return the table's entry for the rank, 0 if it is missing."""
        by_rank = self.resident_by_rank
        return by_rank(rank) if callable(by_rank) else by_rank.get(rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCosts:
    """Costs that are stated for each operation and value, as in a program's text or in several joined programs."""

    seconds_of: Mapping[tuple[int, Op], float] = field(repr=False)
    specs: Mapping[Value, Spec] = field(repr=False)
    resident: tuple[int, ...]

    def seconds(self, rank: int, op: Op) -> float:
        """Return the seconds written for the operation, 0 if there are none."""
        return self.seconds_of.get((rank, op), 0.0)

    def spec(self, value: Value) -> Spec:
        """Return the value's spec, TOKEN if it has none."""
        return self.specs.get(value, TOKEN)

    def resident_bytes(self, rank: int) -> int:
        """Return the bytes stated for the rank's device."""
        return self.resident[rank]


MESSAGE_S = 1e-4
"""Overhead of a message on its device, in addition to latency and transfer time: about 0.1 ms with gloo on Linux,
measured."""


def ring_steps(kind: str, size: int) -> int:
    """Return how many times each rank sends 1/size of the tensor in a ring algorithm (Patarasuk and Yuan, 2009)."""
    return {ALLREDUCE: 2 * (size - 1), ALLGATHER: size - 1, REDUCESCATTER: size - 1}[kind]


def num_rounds(kind: str, size: int) -> int:
    """Return how many messages follow each other in a collective: in a ring, or from a broadcast's root along a
    binomial tree.
    """
    return (size - 1).bit_length() if kind == BROADCAST else ring_steps(kind, size)


def tensor_bytes(costs: Costs, rank: int, op: Op) -> int:
    """Return the size of a collective's whole tensor.

    It is the operation's output (for a REDUCESCATTER and for a BROADCAST's root: its input).
    """
    transferred = op.reads if op.kind == REDUCESCATTER or (op.kind == BROADCAST and rank == op.ranks[0]) else op.writes
    return sum(costs.spec(value).nbytes for value in transferred)


def sent_bytes(kind: str, size: int, nbytes: int, *, is_root: bool = False) -> int:
    """Return the bytes that one of `size` ranks sends.

    nbytes: size of the whole tensor.  is_root: whether the rank is a broadcast's root.
    """
    if kind == BROADCAST:
        return (size - 1) * nbytes if is_root else 0
    return ring_steps(kind, size) * nbytes // size


def collective_s(cluster: Cluster, kind: str, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds of a collective on a tensor of `nbytes`; 0 for one rank, and for a ring without bytes.

    Each step of a ring sends nbytes/n over its slowest link.  A broadcast goes from ranks[0] along a binomial tree.  On
    shared air the times of all its messages add up.
    """
    if len(ranks) < 2 or not (nbytes or kind == BROADCAST):
        return 0.0
    if (air := cluster.air) is not None:
        return collective_latency_s(cluster, kind, ranks) + collective_air_s(air, kind, ranks, nbytes)
    pairs, size = _messages(kind, ranks, nbytes)
    return num_rounds(kind, len(ranks)) * max(cluster.link(*pair).transfer_s(size) for pair in pairs)


def _messages(kind: str, ranks: Sequence[int], nbytes: int) -> tuple[list[tuple[int, int]], int]:
    """Return the sender and the receiver of each message of a round, and its bytes.

    A broadcast's root sends the tensor to all others; a ring's members send a part of it to their neighbours.
    """
    if kind == BROADCAST:
        return [(ranks[0], rank) for rank in ranks[1:]], nbytes
    return list(zip(ranks, (*ranks[1:], ranks[0]), strict=True)), -(-nbytes // len(ranks))


def collective_latency_s(cluster: Cluster, kind: str, ranks: Sequence[int]) -> float:
    """Return the part of `collective_s` that is latency and not bytes / rate."""
    if len(ranks) < 2:
        return 0.0
    pairs, _ = _messages(kind, ranks, 0)
    return num_rounds(kind, len(ranks)) * max(cluster.link(*pair).latency_s for pair in pairs)


def collective_air_s(air: Air, kind: str, ranks: Sequence[int], nbytes: int) -> float:
    """Return the seconds on air of all messages of a collective on a tensor of `nbytes`, those of its members together.

    Those of a broadcast count as messages from its root.
    """
    pairs, size = _messages(kind, ranks, nbytes)
    count = 1 if kind == BROADCAST else ring_steps(kind, len(ranks))
    return count * sum(air.transfer_s(*pair, size) for pair in pairs)


def num_senders(kind: str, size: int) -> float:
    """Return how many members of a collective send at once: all in a ring, the mean of the rounds in a broadcast."""
    return (size - 1) / num_rounds(kind, size) if kind == BROADCAST else size


def on_air_s(cluster: Cluster, transfers: Iterable[tuple[int, int, float]]) -> float:
    """Return the seconds for which messages (source, destination, bytes) occupy the air that all devices share, one
    after another; 0 on a switch.

    A closed form that prices each message alone adds this bound: no two messages pass the air at once.
    """
    if cluster.medium == "switch":
        return 0.0
    return sum(nbytes / cluster.link(source, destination).bytes_per_s for source, destination, nbytes in transfers)


def busiest_s(cluster: Cluster, transfers: Iterable[tuple[int, int, float]]) -> float:
    """Return the seconds of simultaneous transfers (source, destination, bytes): those of the busiest end of a link,
    plus the longest latency.

    Devices send and receive in parallel; a device's own messages share its link.  On shared air all add up.
    The simulator takes longer if a receiver idles: if all send to the same receiver first, as they do not know of each
    other.
    """
    busy: dict[tuple[str, int], float] = {}
    latency = 0.0
    for source, destination, nbytes in transfers:
        link = cluster.link(source, destination)
        latency = max(latency, link.latency_s)
        ends = (("out", source), ("in", destination)) if cluster.medium == "switch" else (("air", 0),)
        for end in ends:
            busy[end] = busy.get(end, 0.0) + nbytes / link.bytes_per_s
    return latency + max(busy.values(), default=0.0)
