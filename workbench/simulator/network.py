"""The network of a simulation: which transfers wait for their senders, and when each one leaves and arrives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import cast

from workbench.core.activities import Activities, Way
from workbench.core.capacity import Capacity, Ingress
from workbench.core.costs import Costs, collective_air_s, num_senders, tensor_bytes
from workbench.core.medium import Air
from workbench.core.schedule import COLLECTIVES, SEND

_NONE, _SEVERAL = -1, -2
"""Stand where the number of a transfer may stand: there is none, or there are several."""


class Progress:
    """How far a simulation is: what the event loop and the network share.

    durations_s: each activity's seconds without other traffic.  times: the start and the end of each activity whose end
    is certain, as (activity, start_s, end_s).  events: a heap of (time, activity), and of (time, ~n) for the n-th
    capacity of the network.  ready: activities that wait for nothing any more and are not yet started.
    """

    def __init__(self, graph: Activities, durations_s: Sequence[float]) -> None:
        self.graph, self.durations_s = graph, durations_s
        self.times: list[tuple[int, float, float]] = []
        self.events: list[tuple[float, int]] = []
        self.ready = [activity for activity, count in enumerate(graph.num_waits) if count == 0]
        self._num_waits = list(graph.num_waits)

    def release(self, activities: Iterable[int]) -> None:
        """Let each of these wait for one thing less."""
        num_waits = self._num_waits
        for activity in activities:
            num_waits[activity] = left = num_waits[activity] - 1
            if not left:
                self.ready.append(activity)


class Network(ABC):
    """Senders, whose transfers leave one after another.  Each has a heap of those that wait.

    free: the senders that may have a transfer to start.
    """

    def __init__(self, progress: Progress, world_size: int) -> None:
        self.free: list[int] = []
        self._graph, self._durations_s = progress.graph, progress.durations_s
        self._times, self._events, self._release = progress.times, progress.events, progress.release
        self._ways = cast("tuple[Way, ...]", progress.graph.ways)  # only transfers are looked up
        self._waiting: list[list[tuple[float, int, int, Way]]] = [[] for _ in range(world_size)]
        self._sending = [_NONE] * world_size  # by sender: the transfer that leaves it
        self._started_s = [0.0] * len(progress.durations_s)

    def enqueue(self, transfer: int, way: Way, now_s: float) -> None:
        """Let a transfer that is ready wait for its sender's egress."""
        heappush(self._waiting[way.source], (now_s, way.place, transfer, way))
        self.free.append(way.source)

    def start_next(self, now_s: float) -> None:
        """Let each sender that sends nothing start the transfer that was ready first."""
        waiting, sending = self._waiting, self._sending
        for sender in self.free:
            if waiting[sender] and sending[sender] == _NONE:
                _, _, transfer, way = heappop(waiting[sender])
                sending[sender] = transfer
                self._start(transfer, way, now_s)
        self.free.clear()

    @abstractmethod
    def _start(self, transfer: int, way: Way, now_s: float) -> None:
        """Let a transfer begin to leave its sender."""

    @abstractmethod
    def handle_transfer(self, transfer: int, way: Way, now_s: float) -> bool:
        """Handle the event of a transfer; return whether the caller must release all that waits for it."""

    @abstractmethod
    def handle_capacity(self, number: int, now_s: float) -> None:
        """Handle the event of a capacity: the transfers go on that have had their share of it."""

    def _leave(self, transfer: int, way: Way) -> None:
        """Let the next transfer of its sender start.  That of its channel is ready now: messages arrive in order."""
        if self._sending[way.source] == transfer:
            self._sending[way.source] = _NONE
            self.free.append(way.source)
            self._release_some(transfer, channel=True)

    def _release_some(self, transfer: int, *, channel: bool) -> None:
        """Release the next transfer of its channel, or else all others that wait for it."""
        ops, ranks = self._graph.ops, self._graph.ops[transfer].ranks
        for activity in self._graph.successors(transfer):
            if (ops[activity].kind == SEND and ops[activity].ranks == ranks) == channel:
                self._release((activity,))


class Wires(Network):
    """Each rank has a wire to a switch.  The transfers in flight to it share its ingress: capacity n is that of rank n.

    A transfer's event is when it has left its sender.  It has arrived then if no other was in flight to its receiver
    meanwhile, and is part of no capacity.
    """

    def __init__(self, progress: Progress, world_size: int) -> None:
        super().__init__(progress, world_size)
        self._incoming = [_NONE] * world_size  # by receiver: the transfer in flight to it, _NONE, or _SEVERAL
        self._ingresses: defaultdict[int, Ingress] = defaultdict(Ingress)  # by receiver, once it had several

    def _start(self, transfer: int, way: Way, now_s: float) -> None:
        self._started_s[transfer] = now_s
        heappush(self._events, (now_s + self._durations_s[transfer], transfer))
        receiver = way.destination
        other = self._incoming[receiver]
        if other == _NONE:
            self._incoming[receiver] = transfer
            return
        if other != _SEVERAL:
            self._join(other, receiver, self._started_s[other] + self._durations_s[other] - now_s, now_s)
            self._incoming[receiver] = _SEVERAL
        self._join(transfer, receiver, self._durations_s[transfer], now_s)

    def _join(self, transfer: int, receiver: int, left_s: float, now_s: float) -> None:
        """Let a transfer share its receiver's ingress."""
        ingress = self._ingresses[receiver]
        ingress.start(transfer, self._ways[transfer].source, left_s, now_s)
        heappush(self._events, (ingress.next_s, ~receiver))

    def handle_transfer(self, transfer: int, way: Way, now_s: float) -> bool:
        """Let a transfer leave its sender, and arrive if it shares no ingress."""
        if self._incoming[way.destination] != transfer:
            self._leave(transfer, way)
            return False
        self._incoming[way.destination] = self._sending[way.source] = _NONE
        self.free.append(way.source)
        self._times.append((transfer, self._started_s[transfer], now_s))
        return True

    def handle_capacity(self, number: int, now_s: float) -> None:
        """Let the transfers arrive that have had their share of a receiver's ingress."""
        ingress = self._ingresses[number]
        if ingress.next_s != now_s:
            return  # a transfer that started later has changed it
        for transfer in ingress.leave():
            way = self._ways[transfer]
            self._leave(transfer, way)
            self._times.append((transfer, self._started_s[transfer], now_s))
            self._release_some(transfer, channel=False)
        if ingress.next_s < math.inf:
            heappush(self._events, (ingress.next_s, ~number))
        else:
            self._incoming[number] = _NONE


class Wifi(Network):
    """All transfers and collectives share the air, the only capacity.

    The event of either is its end, a while after it has left the air.
    """

    def __init__(self, progress: Progress, world_size: int, *, air: Air, costs: Costs) -> None:
        super().__init__(progress, world_size)
        self._air, self._costs, self._capacity = air, costs, Capacity()
        self._rests_s: dict[int, float] = {}  # by transfer on air: the seconds from leaving the air to its end
        self._num_sent: dict[tuple[int, ...], int] = {}  # by channel
        self._arrived_s: dict[tuple[int, ...], float] = {}  # by channel: when its last message arrives

    def _start(self, transfer: int, way: Way, now_s: float) -> None:
        op, duration_s = self._graph.ops[transfer], self._durations_s[transfer]
        number = self._num_sent[op.ranks] = self._num_sent.get(op.ranks, -1) + 1
        air_s = min(duration_s, self._air.transfer_s(way.source, way.destination, self._costs.spec(op.reads[0]).nbytes))
        rest_s = max(0.0, duration_s - air_s - self._air.jitter_s) + self._air.delay_s(
            way.source, way.destination, number
        )
        self._share(transfer, air_s, rest_s, now_s)

    def start_collective(self, activity: int, now_s: float) -> bool:
        """Let a collective begin; return False for an activity that takes no time on air."""
        op, duration_s = self._graph.ops[activity], self._durations_s[activity]
        if op.kind not in COLLECTIVES or len(op.ranks) < 2:
            return False
        nbytes = tensor_bytes(self._costs, self._graph.priced_on[activity], op)
        air_s = min(duration_s, collective_air_s(self._air, op.kind, op.ranks, nbytes))
        self._share(activity, air_s, duration_s - air_s, now_s, senders=num_senders(op.kind, len(op.ranks)))
        return True

    def _share(self, activity: int, air_s: float, rest_s: float, now_s: float, senders: float = 1.0) -> None:
        self._started_s[activity], self._rests_s[activity] = now_s, rest_s
        self._capacity.start(activity, air_s, now_s, senders)
        heappush(self._events, (self._capacity.next_s, ~0))

    def handle_transfer(self, transfer: int, way: Way, now_s: float) -> bool:
        """Let a transfer arrive."""
        self._release_some(transfer, channel=False)
        return False

    def handle_capacity(self, number: int, now_s: float) -> None:
        """Let leave the air what has had its share of it."""
        if self._capacity.next_s != now_s:
            return  # what started later has changed it
        for activity in self._capacity.leave():
            way, end_s = self._graph.ways[activity], now_s + self._rests_s[activity]
            if way is not None:
                self._leave(activity, way)
                ranks = way.source, way.destination
                end_s = self._arrived_s[ranks] = max(end_s, self._arrived_s.get(ranks, 0.0))
            self._times.append((activity, self._started_s[activity], end_s))
            heappush(self._events, (end_s, activity))
        if self._capacity.next_s < math.inf:
            heappush(self._events, (self._capacity.next_s, ~0))
