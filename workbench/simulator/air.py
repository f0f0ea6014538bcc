"""Share the air of a Wi-Fi network among the transfers in flight, as flow-level simulators do.

All senders get the same share of the time on air (airtime fairness, see core/medium.py).  At each start and end of a
transfer the shares change.  The clock of a share runs at 1 / (number of senders), so a transfer leaves when this clock
has advanced by its time on air (generalized processor sharing; Parekh and Gallager, IEEE/ACM ToN 1993).
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

_NOISE = 1e-12
"""Relative difference between times that are the same but for rounding."""


class SharedAir:
    """The transfers on air.  Times must not decrease from call to call."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._share_s = 0.0  # time on air that one sender got since the air was last idle
        self._senders = 0.0
        self._ends: list[tuple[float, int, float]] = []  # heap of (its _share_s at the end, activity, its senders)

    def start(self, activity: int, air_s: float, now_s: float, senders: float = 1.0) -> None:
        """Put an activity on air.  air_s: seconds that it would take alone.  senders: how many senders it counts as."""
        self._advance(now_s)
        heappush(self._ends, (self._share_s + air_s / senders, activity, senders))
        self._senders += senders

    @property
    def next_s(self) -> float:
        """Return when the next activity leaves the air, if no other starts before; infinity without one."""
        if not self._ends:
            return math.inf
        return self._now_s + max(0.0, self._ends[0][0] - self._share_s) * self._senders

    def leave(self) -> list[int]:
        """Return the activities that leave the air at `next_s`."""
        end_s = self._ends[0][0]
        self._now_s, self._share_s = self.next_s, end_s
        left: list[int] = []
        while self._ends and self._ends[0][0] <= end_s * (1 + _NOISE):
            _, activity, senders = heappop(self._ends)
            self._senders -= senders
            left.append(activity)
        if not self._ends:
            self._share_s = self._senders = 0.0
        return left

    def _advance(self, now_s: float) -> None:
        if self._ends:
            self._share_s += (now_s - self._now_s) / self._senders
        self._now_s = now_s
