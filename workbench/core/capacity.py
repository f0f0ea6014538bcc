"""Share a capacity equally among the transfers in flight, as flow-level simulators do.

Such simulators know no packets: a transfer is a flow, whose rate changes only when another one starts or ends, and of
which only the end counts (SimGrid: Casanova et al., JPDC 74(10), 2014; how far TCP agrees: Velho et al., ACM TOMACS
23(4), 2013).  Here flows share a single capacity: the air of a Wi-Fi network (airtime fairness, see core/medium.py), or
what a device receives over its wire.  The clock of a share runs at 1 / (number of flows), so a transfer leaves
when this clock has advanced by the seconds that it takes alone (generalized processor sharing; Parekh and Gallager,
IEEE/ACM ToN 1993).
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from heapq import heappop, heappush

_NOISE = 1e-12
"""Relative difference between times that are the same but for rounding."""


class Capacity:
    """The transfers that share it, by numbers.  Times must not decrease from call to call."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._share_s = 0.0  # seconds of the capacity that one flow got since it was last idle
        self._flows = 0.0
        self._ends: list[tuple[float, int, float]] = []  # heap of (its _share_s at the end, transfer, its flows)

    def start(self, transfer: int, alone_s: float, now_s: float, flows: float = 1.0) -> None:
        """Add a transfer.  alone_s: seconds that it would take alone.  flows: how many flows it counts as."""
        if self._ends:
            self._share_s += (now_s - self._now_s) / self._flows
        self._now_s = now_s
        heappush(self._ends, (self._share_s + alone_s / flows, transfer, flows))
        self._flows += flows

    @property
    def now_s(self) -> float:
        """Return the time of the latest start or end."""
        return self._now_s

    @property
    def next_s(self) -> float:
        """Return when the next transfer leaves, if no other starts before; infinity without one."""
        if not self._ends:
            return math.inf
        return self._now_s + max(0.0, self._ends[0][0] - self._share_s) * self._flows

    def leave(self) -> list[int]:
        """Return the transfers that leave at `next_s`."""
        end_s = self._ends[0][0]
        self._now_s, self._share_s = self.next_s, end_s
        left: list[int] = []
        while self._ends and self._ends[0][0] <= end_s * (1 + _NOISE):
            _, transfer, flows = heappop(self._ends)
            self._flows -= flows
            left.append(transfer)
        if not self._ends:
            self._share_s = self._flows = 0.0
        return left


class Ingress:
    """The receiving side of a device's wire: the messages of several senders share it, and the messages of one sender
    follow each other.
    """

    def __init__(self) -> None:
        self._capacity = Capacity()
        self._channels: defaultdict[int, deque[tuple[int, float]]] = defaultdict(deque)  # (message, its seconds)
        self._senders: dict[int, int] = {}  # by message

    def start(self, message: int, sender: int, alone_s: float, now_s: float) -> None:
        """Add a message.  alone_s: seconds that it would take alone."""
        channel = self._channels[sender]
        channel.append((message, alone_s))
        self._senders[message] = sender
        if len(channel) == 1:
            self._capacity.start(message, alone_s, now_s)

    @property
    def now_s(self) -> float:
        """Return the time of the latest start or end."""
        return self._capacity.now_s

    @property
    def next_s(self) -> float:
        """Return when the next message has come, if no other starts before; infinity without one."""
        return self._capacity.next_s

    def leave(self) -> list[int]:
        """Return the messages that have come at `next_s`."""
        now_s, messages = self.next_s, self._capacity.leave()
        for message in messages:
            channel = self._channels[self._senders.pop(message)]
            channel.popleft()
            if channel:
                self._capacity.start(*channel[0], now_s)
        return messages

    def advance(self, until_s: float) -> dict[int, float]:
        """Return the messages that come until then if no other starts, with their times."""
        came_s: dict[int, float] = {}
        while (end_s := self.next_s) <= until_s and end_s < math.inf:
            came_s |= dict.fromkeys(self.leave(), end_s)
        return came_s
