"""Network interfaces: full duplex, one transfer out and one in at a time, first ready first served; ties go by rank and list order."""

from __future__ import annotations

from heapq import heappop, heappush

_Waiting = tuple[float, int, int, int, int]  # (when it became ready, source, index of its SEND there, destination, transfer)


class Interfaces:
    """Every rank's egress and ingress, and the transfers that wait for them.

    A waiting transfer is kept at one interface that is busy, so that an interface that becomes free has only its own queue to look
    through, and each look starts a transfer or moves it to the interface that blocks it.
    """

    def __init__(self, world_size: int) -> None:
        self._busy = [False] * (2 * world_size)  # egress of rank r at 2r, ingress at 2r + 1
        self._queues: list[list[_Waiting]] = [[] for _ in range(2 * world_size)]
        self._candidates: list[_Waiting] = []
        self._freed: list[int] = []

    def ask(self, transfer: int, source: int, destination: int, *, ready_s: float, index: int) -> None:
        """Queue a transfer that is ready.  index: where its SEND stands in the source's list."""
        heappush(self._candidates, (ready_s, source, index, destination, transfer))

    def release(self, source: int, destination: int) -> None:
        """Free the two interfaces that a transfer had."""
        for interface in (2 * source, 2 * destination + 1):
            self._busy[interface] = False
            self._freed.append(interface)

    def grant(self) -> list[int]:
        """Return the transfers that start now, and occupy their interfaces."""
        granted: list[int] = []
        candidates, queues, busy = self._candidates, self._queues, self._busy
        # One candidate of each freed interface at a time: the rest of its queue stays put if that one starts.
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
            # It went to the queue of the interface that blocks it; the interface it came from may serve the next one.
            for interface in (egress, ingress):
                if queues[interface] and not busy[interface]:
                    heappush(candidates, heappop(queues[interface]))
        return granted
