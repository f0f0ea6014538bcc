"""Slow a fast host down to an emulated device: deadline pacing of compute, and of messages where the kernel does not shape links."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.costs import broadcast_s, ring_s
from workbench.core.errors import ConfigError
from workbench.core.schedule import BROADCAST
from workbench.core.serial import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedLinks:
    """The links of one rank."""

    cluster: Cluster
    rank: int

    def transfer_s(self, destination: int, nbytes: int) -> float:
        """Return latency plus bytes over the link's rate, in seconds."""
        return self.cluster.link(self.rank, destination).transfer_s(nbytes)

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return the seconds of a collective on a tensor of so many bytes."""
        return broadcast_s(self.cluster, ranks, nbytes) if kind == BROADCAST else ring_s(self.cluster, kind, ranks, nbytes)


T = TypeVar("T")

# What an operation ends after its deadline, up to this (about one slice of the scheduler), the next operations make up for; more is a host
# that was too busy.
_GRAIN_S = 4e-3


LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
CALIBRATED_SHARE = 0.01
"""Of the devices' time that may be late at the dilation that is chosen: well below what makes a run invalid."""


class Paced(NamedTuple, Generic[T]):
    """What a paced call returned and when it ran, in seconds of the pacer's clock.

    late_s: how long after its deadline it ended, beyond what the next operations make up for.
    """

    result: T
    start_s: float
    end_s: float
    late_s: float


class Pacer:
    """Makes operations take as long as an emulated device would.

    An operation of c seconds ends no earlier than factor * c after it began: factor 1 on a healthy device, 4 on one that is four times
    slower than its program says, 0 to run as fast as the host can.  dilation: all emulated devices and links are so many times slower
    together, so that the host keeps pace (see RankContext).  Operations end a little after their deadlines: sleeps overshoot, and a short
    operation costs the host more than the device.  The next deadlines are so much earlier, so that it does not add up over thousands of
    operations.  Not for use by several threads at once: each compute stream has its own (`for_stream`), which add up to the device's.
    """

    def __init__(
        self,
        factor: float = 1.0,
        *,
        dilation: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= factor < float("inf"):
            raise ConfigError(f"A slow-down by {factor} was asked for.", "It must be 0 or more.", "Give a factor such as 4, or 1 for none.")
        self._factor, self._dilation = factor, dilation
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
        stream = Pacer(dilation=self._dilation, clock=self._clock, sleep=self._sleep)
        stream._device = self._device
        self._device._streams.append(stream)
        return stream

    def reset(self) -> None:
        """Forget all overruns."""
        self._behind_s = 0.0
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
        if not self.factor:
            return Paced(result, start_s, done_s, 0.0)
        duration_s *= self.factor * self._dilation
        deadline_s = start_s + duration_s - self._behind_s
        end_s = self.wait_until(deadline_s) if done_s < deadline_s else done_s
        overrun_s = end_s - deadline_s
        self._behind_s = min(overrun_s, _GRAIN_S)
        late_s = overrun_s - self._behind_s
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


def asked_dilation() -> float | None:
    """Return the dilation that the environment asks for (WORKBENCH_DILATION), None if it is to be found.  Raises ConfigError."""
    text = os.environ.get("WORKBENCH_DILATION")
    if not text:
        return None
    asked = f"The dilation WORKBENCH_DILATION = {shown(text)} was asked for."
    try:
        dilation = float(text)
    except ValueError:
        dilation = 0.0
    if not LADDER[0] <= dilation <= LADDER[-1]:
        raise ConfigError(asked, f"It is no number from {LADDER[0]:g} to {LADDER[-1]:g}.", "Change it, or unset it to have one measured.")
    return dilation


def find_dilation(late_share: Callable[[float], float], tolerated: float = CALIBRATED_SHARE) -> float:
    """Return the first dilation of LADDER at which no more than the tolerated share of the devices' time is late; its last if none is.

    late_share(dilation): measured.  A device whose time is late to one half needs to be at least twice as slow, so dilations between are
    left out.  One that the environment asks for is taken.
    """
    asked = asked_dilation()
    if asked is not None:
        late_share(asked)
        return asked
    dilation = LADDER[0]
    while (share := late_share(dilation)) > tolerated and dilation < LADDER[-1]:
        least = min(dilation / (1 - min(share, 0.9)), LADDER[-1])
        dilation = next(step for step in LADDER if step > dilation and step >= least)
    return dilation
