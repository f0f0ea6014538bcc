"""Slow a fast host down to an emulated device: deadline pacing of compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from workbench.core.errors import ConfigError

T = TypeVar("T")

# A sleep that overshoots its deadline by less than this (about one slice of the scheduler) is carried into the next deadline;
# more is a host that was too busy to wake us, which no credit can hide.
_GRAIN_S = 4e-3


class Paced(NamedTuple, Generic[T]):
    """What a paced call returned and when it ran, in seconds of the pacer's clock.  late_s: how long after its deadline it ended."""

    result: T
    start_s: float
    end_s: float
    late_s: float


class Pacer:
    """Makes operations take as long as an emulated device would.

    An operation of c seconds ends no earlier than factor * c after it began: factor 1 on a healthy device, 4 on one that is four times
    slower than its program says, 0 to run as fast as the host can.  Sleeps end a little after their deadline; that overshoot is credit for
    the next deadline, so that it does not add up over thousands of operations.
    Not for use by several threads at once: each compute stream has its own (`for_stream`), which add up to the device's.
    """

    def __init__(
        self, factor: float = 1.0, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if not 0 <= factor < float("inf"):
            raise ConfigError(f"A slow-down by {factor} was asked for.", "It must be 0 or more.", "Give a factor such as 4, or 1 for none.")
        self._factor = factor
        self._clock = clock
        self._sleep = sleep
        self._device = self
        self._streams: list[Pacer] = []
        self.reset()

    @property
    def factor(self) -> float:
        """Return the device's factor, the same for all of its streams."""
        return self._device._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._device._factor = factor

    def for_stream(self, name: str) -> Pacer:
        """Return the pacer of a further compute stream of the device."""
        stream = Pacer(clock=self._clock, sleep=self._sleep)
        stream._device = self._device
        self._device._streams.append(stream)
        return stream

    def reset(self) -> None:
        """Forget all overruns and credit."""
        self._credit_s = 0.0
        self._late_s = 0.0
        self._paced_s = 0.0
        for stream in self._streams:
            stream.reset()

    def run(self, function: Callable[[], T], duration_s: float, begin_s: float | None = None) -> Paced[T]:
        """Call `function`, which takes the device `duration_s` at factor 1; return at its deadline, or when it ends, if later.

        begin_s: when the emulated device could have begun (its inputs were there and it was free). What the host spent
        since then on bookkeeping is hidden in the operation's time, as the device would not have spent it.
        """
        now_s = self._clock()
        start_s = now_s if begin_s is None else min(begin_s, now_s)
        result = function()
        done_s = self._clock()
        duration_s *= self.factor
        deadline_s = start_s + duration_s - self._credit_s
        if done_s < deadline_s:
            end_s = self.wait_until(deadline_s)
            overshoot_s = end_s - deadline_s
            late_s = 0.0 if overshoot_s <= _GRAIN_S else overshoot_s
            self._credit_s = min(overshoot_s, _GRAIN_S)
        else:
            end_s = done_s
            late_s = max(0.0, done_s - (start_s + duration_s))
            # Part of the credit was spent by ending after the shortened but before the whole deadline.
            self._credit_s = max(0.0, self._credit_s - max(0.0, start_s + duration_s - done_s))
        self._late_s += late_s
        self._paced_s += max(duration_s, end_s - start_s)
        return Paced(result, start_s, end_s, late_s)

    def wait_until(self, deadline_s: float) -> float:
        """Sleep until `deadline_s` of the clock and return the time then (a little later than asked)."""
        now_s = self._clock()
        while now_s < deadline_s:
            self._sleep(deadline_s - now_s)
            now_s = self._clock()
        return now_s

    @property
    def late_s(self) -> float:
        """Return the seconds by which operations ended after their deadlines, on all streams."""
        return self._late_s + sum(stream.late_s for stream in self._streams)

    @property
    def paced_s(self) -> float:
        """Return the seconds of all paced operations together, on all streams."""
        return self._paced_s + sum(stream.paced_s for stream in self._streams)

    @property
    def overrun_share(self) -> float:
        """Return late_s as a share of paced_s: near 0 on a host that carries the emulation."""
        return self.late_s / self.paced_s if self.paced_s else 0.0
