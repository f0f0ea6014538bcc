"""Slow a fast host down to an emulated device: its compute, and the part of its links that the kernel does
not emulate.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.costs import MESSAGE_S, collective_latency_s, collective_s, num_rounds
from workbench.core.errors import ConfigError
from workbench.core.heat import Heat
from workbench.core.medium import Air
from workbench.core.serial import shown
from workbench.core.timeline import BUSY_OVERRUN_SHARE

FRAME_BYTES = 4096
"""Size of a frame on emulated air."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLinks:
    """The links of one rank, and the part of their time that our transport adds.  All times are this machine's.

    fidelity: 'kernel': the kernel limits the rates, and the transport adds the latency.  'paced': the transport adds
    both. 'real': it adds nothing.  dilation: how many times slower than described the links are (see RankContext).
    """

    cluster: Cluster
    rank: int
    fidelity: Literal["kernel", "paced", "real"]
    dilation: float = 1.0
    _air: Air | None = field(default=None, init=False, compare=False, repr=False)
    _frame_s: float = field(default=0.0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        air = self.cluster.air
        object.__setattr__(self, "_air", air)
        object.__setattr__(self, "_frame_s", FRAME_BYTES / air.most_bytes_per_s if air is not None else 0.0)

    def transfer_s(self, source: int, destination: int, nbytes: int) -> float:
        """Return the seconds of a transfer: latency plus bytes divided by the link's rate."""
        return self.dilation * self.cluster.link(source, destination).transfer_s(nbytes)

    def occupied_s(self, source: int, destination: int, nbytes: int) -> float:
        """Return the seconds for which a message occupies the sender's end of the link, and as many of which it needs
        at the receiver's: those of its transfer, and MESSAGE_S.
        """
        return self.transfer_s(source, destination, nbytes) + self.dilation * MESSAGE_S

    @property
    def is_shared(self) -> bool:
        """Return whether the emulated devices share the air: only the kernel then knows when a message has passed."""
        return self.cluster.medium == "wifi" and self.fidelity != "real"

    def added_s(self, source: int, destination: int, nbytes: int) -> float:
        """Return the seconds of a message that the transport must add: those that neither the kernel, a real link nor
        gloo (MESSAGE_S) takes.
        """
        if self.fidelity == "real":
            return 0.0
        link = self.cluster.link(source, destination)
        seconds = link.latency_s if self.fidelity == "kernel" else link.transfer_s(nbytes)
        return self.dilation * seconds + (self.dilation - 1) * MESSAGE_S

    def delay_s(self, source: int, destination: int, nbytes: int, number: int) -> float:
        """Return for how long a message that has passed the shared air is held back.

        These are latency, jitter, the overhead that gloo does not have, and the time of its last frame: the kernel lets
        a frame pass, behind its copies (see radio.py), when its own time on air begins.  number: the message's number
        in its channel.
        """
        assert self._air is not None
        jitter_s = self._air.delay_s(source, destination, number) - self.cluster.jitter_s
        frame_s = self._frame_s * min(1.0, nbytes / FRAME_BYTES)
        return self.added_s(source, destination, 0) + self.dilation * (jitter_s + frame_s)

    def slower_s(self, factors: Mapping[str, float], destination: int, nbytes: int) -> float:
        """Return the additional seconds of a slowed transfer.

        factors: how many times slower it is, by the destination's name.
        """
        return (factors.get(self.cluster.devices[destination].name, 1.0) - 1) * self.transfer_s(
            self.rank, destination, nbytes
        )

    def collective_s(self, kind: str, ranks: Sequence[int], nbytes: int) -> float:
        """Return the seconds of a collective on a tensor of this many bytes: those of its messages, and MESSAGE_S in
        each round.
        """
        rounds_s = MESSAGE_S * num_rounds(kind, len(ranks))
        return self.dilation * (collective_s(self.cluster, kind, ranks, nbytes) + rounds_s)

    def collective_delay_s(self, kind: str, ranks: Sequence[int]) -> float:
        """Return for how long a collective that has passed the shared air is held back: its latency, and the overhead
        that gloo does not have.
        """
        overhead_s = (self.dilation - 1) * MESSAGE_S * num_rounds(kind, len(ranks))
        return self.dilation * collective_latency_s(self.cluster, kind, ranks) + overhead_s


T = TypeVar("T")

GRAIN_S = 4e-3
"""By up to so much (about one scheduler slice) this machine may be behind the emulated device: whatever follows, on
whichever device, makes up for it.  If it is further behind, it was too busy."""


LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
CALIBRATED_SHARE = 0.02
"""Share of the time by which the devices may be late when a dilation is chosen: below the share that makes a run
invalid."""
_LEAST_FALL = 0.8
"""A larger dilation helps if it lowers the late share to this part or less.  Where operations are late by seconds that
do not depend on the dilation, 1.33 times the dilation lowers it to 0.75."""

_OPEN_WAITS = 100
"""Number of a stream's latest waits of which it is not yet certain how late their messages were."""


def behind(ready_s: float, now_s: float) -> float:
    """Return by how much this machine, which begins something now, is behind the emulated device, which could have
    begun it earlier: as far as the machine makes up for it.
    """
    return min(max(0.0, now_s - ready_s), GRAIN_S)


class Paced(NamedTuple, Generic[T]):
    """The result of a paced call and its time span on the emulated device, in seconds of the pacer's clock.

    Here the call may have ended up to GRAIN_S later.  late_s: how long after its deadline it ended, without that.
    """

    result: T
    start_s: float
    end_s: float
    late_s: float


class Pace(NamedTuple):
    """How well the host kept pace with an emulated device: its late and its paced seconds (see Pacer)."""

    late_s: float
    paced_s: float


class Pacer:
    """Makes operations take as long as they would on an emulated device.

    An operation of c seconds ends no earlier than factor * c after its start.  factor: 1 on a healthy device, 4 on one
    that is four times slower than its program says, 0 to run as fast as the host can.  dilation: all emulated devices
    and links run this many times slower, so that the host can keep up (see RankContext).  Operations end slightly after
    their deadlines, because sleeps overshoot and because a short operation takes the host longer than the device.  The
    next ones begin, on the emulated device, when they could have begun without that, so that delays do not add up over
    thousands of operations.  Not thread safe: each compute stream has its own pacer (`for_stream`); their totals are
    the device's.

    heat: the device's, by its own undilated clock; operations heat it, and take longer while it is hot.
    """

    def __init__(
        self,
        factor: float = 1.0,
        *,
        dilation: float = 1.0,
        heat: Heat | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 <= factor < float("inf"):
            raise ConfigError(
                f"A slow-down by {factor} was asked for.",
                "It must be 0 or more.",
                "Give a factor such as 4, or 1 for none.",
            )
        self._factor = self._own_factor = factor
        self._dilation = dilation
        self._heat, self._heating = heat, threading.Lock()
        self._clock = clock
        self._sleep = sleep
        self._device = self
        self._streams: list[Pacer] = []
        self._behind_s = self._late_s = self._paced_s = 0.0
        self._waits: list[tuple[float, Callable[[], float]]] = []
        self._lapped = Pace(0.0, 0.0)

    @property
    def factor(self) -> float:
        """Return the device's factor, which is the same for all its streams."""
        return self._device._factor

    @factor.setter
    def factor(self, factor: float) -> None:
        self._device._factor = factor

    def slow_down(self, factor: float) -> None:
        """Run this many times slower than the program states.  With 1 the pacer runs as before; a real device then runs
        at full speed.
        """
        self.factor = factor if factor > 1 else self._device._own_factor

    def for_stream(self) -> Pacer:
        """Return a pacer for another compute stream of the device."""
        stream = Pacer(dilation=self._dilation, clock=self._clock, sleep=self._sleep)
        stream._device = self._device
        self._device._streams.append(stream)
        return stream

    def reset(self) -> None:
        """Reset all overruns, and let the device be cold: what it has done so far only warmed its process up."""
        if self._heat is not None:
            self._heat.cool()
        self._behind_s = self._late_s = self._paced_s = 0.0
        self._waits.clear()
        self._lapped = Pace(0.0, 0.0)
        for stream in self._streams:
            stream.reset()

    def run(self, function: Callable[[], T], duration_s: float, begin_s: float | None = None) -> Paced[T]:
        """Call `function`, which takes the device `duration_s` at factor 1.  Returns at the deadline, or at the end of
        the call if later.

        begin_s: when the emulated device could have started (inputs present, device idle); None: when the last call
        ended.  The host's bookkeeping since then is hidden in the operation's time, because the device would not need
        it.
        """
        now_s = self._clock()
        start_s = now_s - self._behind_s if begin_s is None else min(begin_s, now_s)
        result = function()
        done_s = self._clock()
        if not self.factor:
            return self.noted(function, Paced(result, start_s, done_s, 0.0))
        duration_s = self._device._heated_s(start_s, duration_s * self.factor * self._dilation)
        deadline_s = start_s + duration_s
        end_s = wait_until(deadline_s, self._clock, self._sleep) if done_s < deadline_s else done_s
        self._behind_s = min(end_s - deadline_s, GRAIN_S)
        late_s = end_s - deadline_s - self._behind_s
        self._late_s += late_s
        self._paced_s += duration_s + late_s
        return self.noted(function, Paced(result, start_s, deadline_s + late_s, late_s))

    def noted(self, function: Callable[[], T], paced: Paced[T]) -> Paced[T]:
        """Return a call's result; a subclass notes its time."""
        return paced

    def wait(self, seconds: float, late_s: Callable[[], float]) -> None:
        """Record that the device waited for a message before its next operation, or in a collective.

        late_s(): by how much the message came, or the collective ended, after it was due.  By so much, at most, a busy
        host made the wait longer.  The answer is certain some messages later.
        """
        self._paced_s += seconds
        self._waits.append((seconds, late_s))
        if len(self._waits) == 2 * _OPEN_WAITS:
            self._late_s += _late_s(self._waits[:_OPEN_WAITS])
            del self._waits[:_OPEN_WAITS]

    def _heated_s(self, begin_s: float, duration_s: float) -> float:
        """Return the seconds of an operation at the device's present heat, to which it adds."""
        if self._heat is None:
            return duration_s
        with self._heating:  # streams share the heat
            self._heat.advance(begin_s / self._dilation)
            duration_s /= self._heat.speed
            self._heat.advance((begin_s + duration_s) / self._dilation, duration_s / self._dilation)
        return duration_s

    @property
    def late_s(self) -> float:
        """Return the seconds for which the host held the device up, summed over all streams: operations ended after
        their deadlines, and it waited for messages that were late.
        """
        return self._late_s + _late_s(list(self._waits)) + sum(stream.late_s for stream in self._streams)

    @property
    def paced_s(self) -> float:
        """Return the total seconds of all paced operations on all streams, and of the waits between them."""
        return self._paced_s + sum(stream.paced_s for stream in self._streams)

    def lap(self) -> Pace:
        """Return the pace since the last call, or since the beginning."""
        before, self._lapped = self._lapped, Pace(self.late_s, self.paced_s)
        return Pace(*(now - then for now, then in zip(self._lapped, before, strict=True)))

    @property
    def overrun_share(self) -> float:
        """Return late_s as a share of paced_s.  It is near 0 on a host that keeps up with the emulation."""
        return self.late_s / self.paced_s if self.paced_s else 0.0


def _late_s(waits: Iterable[tuple[float, Callable[[], float]]]) -> float:
    return sum(min(seconds, late_s()) for seconds, late_s in waits)


def wait_until(
    time_s: float, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> float:
    """Sleep until a time of the clock; return the time then, which is later if it had passed already."""
    while (left_s := time_s - (now_s := clock())) > 0:
        sleep(left_s)
    return now_s


def asked_dilation() -> float | None:
    """Return the dilation that the environment sets (WORKBENCH_DILATION).  None: find it by calibration.  Raises
    ConfigError.
    """
    text = os.environ.get("WORKBENCH_DILATION")
    if not text:
        return None
    request = f"The dilation WORKBENCH_DILATION = {shown(text)} was asked for."
    try:
        dilation = float(text)
    except ValueError:
        dilation = 0.0
    if not LADDER[0] <= dilation <= LADDER[-1]:
        raise ConfigError(
            request,
            f"It is not a number from {LADDER[0]:g} to {LADDER[-1]:g}.",
            "Change it, or unset it to have one measured.",
        )
    return dilation


def find_dilation(
    late_share: Callable[[float], float],
    tolerated: float = CALIBRATED_SHARE,
    *,
    first: float = LADDER[0],
    most_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Return the first dilation of LADDER at which the devices are late by at most the tolerated share of the time,
    else the last one.

    late_share(dilation): a measurement, which lasts about as many times longer as the devices are slower.  If they are
    late by half of the time, they must run at least twice as slowly, so the dilations in between are skipped.  Devices
    also wait for other processes of this machine, however slow they are.  So the search ends, too, where a larger
    dilation hardly lowers a share that is valid (see BUSY_OVERRUN_SHARE); of the two, the one with the smaller share is
    returned.
    first: the dilation to begin with, such as one that this machine is known to need.  most_s: measurements that would
    end later than so many seconds after the beginning are left out; the dilation that the last one suggests is then
    returned, unless its share is valid.  A dilation set by the environment is used without calibration.
    """
    requested = asked_dilation()
    if requested is not None:
        late_share(requested)
        return requested
    began_s, dilation = clock(), first
    share, measured_s = late_share(dilation), clock() - began_s
    while share > tolerated and dilation < LADDER[-1]:
        least = min(dilation / (1 - min(share, 0.9)), LADDER[-1])
        larger = next(step for step in LADDER if step > dilation and step >= least)
        now_s = clock()
        if now_s - began_s + measured_s * larger / dilation > most_s:
            return dilation if share <= BUSY_OVERRUN_SHARE else larger
        larger_share = late_share(larger)
        if _LEAST_FALL * share < larger_share <= BUSY_OVERRUN_SHARE:
            return larger if larger_share < share else dilation
        dilation, share, measured_s = larger, larger_share, clock() - now_s
    return dilation
