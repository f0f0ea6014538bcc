"""The network interfaces of all ranks, each of which carries one transfer at a time."""

from __future__ import annotations

from heapq import heappop, heappush

from workbench.core.activities import Way

_Waiting = tuple[float, int, int, int, int]  # (when it became ready, *its Way, transfer)


class Interfaces:
    """Every rank's egress and ingress, and the transfers that wait for them.

    A waiting transfer is queued at one busy interface.  An interface that becomes free checks only its own queue.  Each
    check starts a transfer or moves it to the interface that blocks it.
    """

    def __init__(self, world_size: int) -> None:
        self._busy = [False] * (2 * world_size)  # egress of rank r at 2r, ingress at 2r + 1
        self._queues: list[list[_Waiting]] = [[] for _ in range(2 * world_size)]
        self._candidates: list[_Waiting] = []
        self._freed: list[int] = []

    def ask(self, transfer: int, way: Way, *, ready_s: float) -> None:
        """Queue a transfer that is ready."""
        heappush(self._candidates, (ready_s, *way, transfer))

    def release(self, source: int, destination: int) -> None:
        """Free the two interfaces of a transfer."""
        egress, ingress = 2 * source, 2 * destination + 1
        self._busy[egress] = self._busy[ingress] = False
        self._freed += (egress, ingress)

    def grant(self) -> list[int]:
        """Return the transfers that start now, and occupy their interfaces."""
        if not self._candidates and not self._freed:
            return []
        granted: list[int] = []
        candidates, queues, busy = self._candidates, self._queues, self._busy
        # Check one candidate of each freed interface at a time: if it starts, the rest of its queue stays in place.
        for interface in self._freed:
            if queues[interface] and not busy[interface]:
                heappush(candidates, heappop(queues[interface]))
        self._freed.clear()
        while candidates:
            waiting = heappop(candidates)
            _, source, _, destination, transfer = waiting
            egress, ingress = 2 * source, 2 * destination + 1
            if busy[egress]:
                heappush(queues[egress], waiting)
            elif busy[ingress]:
                heappush(queues[ingress], waiting)
            else:
                busy[egress] = busy[ingress] = True
                granted.append(transfer)
                continue
            # It moved to the queue of the interface that blocks it; the interface it left may serve the next one.
            for interface in (egress, ingress):
                if queues[interface] and not busy[interface]:
                    heappush(candidates, heappop(queues[interface]))
        return granted
