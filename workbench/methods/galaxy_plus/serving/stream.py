"""When requests arrive: a seeded Poisson process, or back to back."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

from workbench.core.serving import StreamSettings


class Waiting(NamedTuple):
    """A request that has arrived and was not answered yet."""

    number: int
    arrival_s: float


def arrival_times(settings: StreamSettings) -> tuple[float, ...]:
    """Return the arrivals of a Poisson process in seconds, the first after one interval; empty for requests back to back."""
    if settings.rate_per_s == 0:
        return ()
    draws = random.Random(settings.seed)
    times, now_s = [], 0.0
    for _ in range(settings.num_requests):
        now_s += draws.expovariate(settings.rate_per_s)
        times.append(now_s)
    return tuple(times)


class RequestQueue:
    """The portal's queue: first come, first served.  Back to back, a request arrives at the moment the last one was answered."""

    def __init__(self, settings: StreamSettings) -> None:
        self._num_requests = settings.num_requests
        self._times = arrival_times(settings)
        self._repeated: deque[Waiting] = deque()
        self._next = 0
        self._free_s = 0.0

    @property
    def num_left(self) -> int:
        """Return the requests that were not taken yet."""
        return self._num_requests - self._next + len(self._repeated)

    def next_arrival_s(self) -> float | None:
        """Return when the next request can be taken, None after the last."""
        if self._repeated:
            return self._repeated[0].arrival_s
        if self._next >= self._num_requests:
            return None
        return self._times[self._next] if self._times else self._free_s

    def take(self, now_s: float) -> Waiting | None:
        """Return the request that waits longest, None if none has arrived."""
        arrival_s = self.next_arrival_s()
        if arrival_s is None or arrival_s > now_s:
            return None
        if self._repeated:
            return self._repeated.popleft()
        self._next += 1
        return Waiting(self._next - 1, arrival_s)

    def put_back(self, request: Waiting) -> None:
        """Put a request whose service failed at the head of the queue."""
        self._repeated.appendleft(request)

    def answered(self, now_s: float) -> None:
        """Tell that a request was answered: back to back, the next arrives now."""
        self._free_s = now_s
