"""When the messages over emulated links have come to a rank: together they take no more than its wire carries.

The kernel shares its links by itself, and these times say how late a message is.  Paced links have no other limit.
"""

from __future__ import annotations

import bisect
import copy
import math
import threading

from workbench.core.capacity import Ingress
from workbench.core.costs import MESSAGE_S
from workbench.runtime.pacing import wait_until

NUM_LATEST = 32
"""Number of messages whose shares are computed again when a receiver learns of another one."""


class Due:
    """When a message over an emulated link has come, as far as is known, in seconds of the monotonic clock."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s

    def late_s(self, came_s: float) -> float:
        """Return by how much later it came."""
        return max(0.0, came_s - self.end_s)


class _Message(Due):
    """A message that shares the ingress.  seconds: those that it takes alone."""

    def __init__(self, source: int, sent_s: float, seconds: float) -> None:
        super().__init__(sent_s + seconds)
        self.source, self.sent_s, self.seconds = source, sent_s, seconds


class SharedIngress:
    """The messages over emulated links to one rank, which share its ingress as in the simulator."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_messages = 0
        self._latest: list[tuple[int, _Message]] = []  # (number, message), by when they were sent
        self._earlier = Ingress()  # those that were sent before
        self._idle_from_s = 0.0  # when all messages so far have come

    def hold(self, source: int, sent_s: float, seconds: float) -> Due:
        """Wait until a message has had its share, and return when that is.

        This machine takes MESSAGE_S to wake up and pass the message on, so the wait ends earlier by as much.  The
        receiver learns of a message some time after it was sent, over the kernel's links not before it has come.  So
        the shares of the latest messages are computed again from when each was sent, also of those that have come
        already: they were due later than it seemed.
        """
        message = _Message(source, sent_s, seconds)
        with self._lock:
            bisect.insort(self._latest, (self._num_messages, message), key=lambda each: each[1].sent_s)
            self._num_messages += 1
            if sent_s >= self._idle_from_s:
                self._idle_from_s = message.end_s
            else:
                self._share()
            if len(self._latest) > NUM_LATEST:
                _start(self._earlier, *self._latest.pop(0))
        while wait_until(message.end_s - MESSAGE_S) < message.end_s - MESSAGE_S:
            pass  # another message has come meanwhile
        return message

    def _share(self) -> None:
        ingress, came_s = copy.deepcopy(self._earlier), dict[int, float]()
        for number, message in self._latest:
            came_s |= _start(ingress, number, message)
        came_s |= ingress.advance(math.inf)
        self._idle_from_s = max(came_s.values())
        for number, message in self._latest:
            message.end_s = came_s[number]


def _start(ingress: Ingress, number: int, message: _Message) -> dict[int, float]:
    """Let a message share an ingress.  Returns those that have come before it was sent, with their times."""
    came_s = ingress.advance(message.sent_s)
    ingress.start(number, message.source, message.seconds, max(message.sent_s, ingress.now_s))
    return came_s
