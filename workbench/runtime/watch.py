"""Ping the devices' jobs, and end those that do not reply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workbench.runtime.commands import Ping, Pong
from workbench.runtime.devices import Devices

PING_EVERY_S, SILENCE_S = 0.5, 2.0
"""Seconds between two pings of a device, and the silence in seconds after which a device is ended."""
_SLOW_ANSWERS = 4.0
"""The silence time-out is at least this multiple of the slowest recent reply, because on a busy host all replies are
late."""
_TURN_S = 0.2
"""If the coordinator listens less often than this, a busy host has delayed the coordinator itself."""
_STARVED_SHARE, _MOST_STARVED = 0.02, 10.0
"""A silent process that used this share of a processor is starved by the host, not frozen.

The second value is how many silence time-outs a starved process is given.
"""


class Watch:
    """The devices' jobs as their leader sees them: it pings them, and ends those that do not reply.

    names: the devices' names.  silence_s: a device that is silent for longer is ended.  reasons: why devices were lost,
    by rank.
    """

    def __init__(self, devices: Devices, names: Sequence[str], silence_s: float) -> None:
        self._devices, self._names, self._silence_s = devices, names, silence_s
        self._health: dict[int, Pong] = {}  # the last reply of each device
        self._first: dict[int, Pong] = {}
        self._asked_s: dict[int, float] = {}  # time of each device's last ping
        self._pinged_s: dict[int, float] = {}  # time of each unanswered ping
        self._cpu_s: dict[int, float] = {}  # processor seconds at each device's last ping
        self._answers_s: dict[int, float] = {}  # duration of each device's last reply
        self._listened_s = 0.0
        self.reasons: dict[int, str] = {}

    def now_s(self) -> float:
        """Return the time of the devices' clock in seconds."""
        return self._devices.now_s()

    def name(self, rank: int) -> str:
        """Return a device's name."""
        return self._names[rank]

    def end(self, rank: int, reason: str) -> None:
        """Kill a faulty device's process.  `news` will report that it is lost."""
        self.reasons[rank] = reason
        self._devices.kill(rank)

    def replied(self, rank: int, pong: Pong) -> None:
        """Record a device's reply to a ping."""
        self._health[rank] = pong
        self._first.setdefault(rank, pong)
        if rank in self._pinged_s:
            self._answers_s[rank] = self.now_s() - self._pinged_s.pop(rank)

    def forget(self, rank: int, why: str | None) -> None:
        """Stop waiting for replies of a device that is lost or whose job has ended.

        why: the reason of the loss, if known.
        """
        if why is not None:
            self.reasons.setdefault(rank, why)
        self._pinged_s.pop(rank, None)
        self._answers_s.pop(rank, None)

    def silent(self, ranks: Iterable[int]) -> int:
        """Return the device that has not replied for the longest time."""
        return min(ranks, key=lambda rank: (self._pinged_s.get(rank, float("inf")), rank))

    def ping(self, ranks: Iterable[int]) -> None:
        """Ping devices and end those that do not reply.  `news` will report that they are lost."""
        now_s = self.now_s()
        late_s = now_s - self._listened_s
        if late_s > _TURN_S:  # the leading process itself was delayed
            self._pinged_s = {rank: pinged_s + late_s for rank, pinged_s in self._pinged_s.items()}
        self._listened_s = now_s
        silence_s = max(self._silence_s, _SLOW_ANSWERS * max(self._answers_s.values(), default=0.0))
        for rank in ranks:
            if rank not in self._pinged_s:
                if now_s - self._asked_s.get(rank, 0.0) >= PING_EVERY_S:
                    self._pinged_s[rank] = self._asked_s[rank] = now_s
                    self._cpu_s[rank] = self._devices.cpu_s(rank)
                    self._devices.command(rank, Ping())
            elif now_s - self._pinged_s[rank] > silence_s:
                self._pinged_s[rank] = now_s
                before_s, self._cpu_s[rank] = self._cpu_s[rank], self._devices.cpu_s(rank)
                is_starved = self._cpu_s[rank] - before_s > _STARVED_SHARE * silence_s
                if not is_starved or now_s - self._asked_s[rank] > _MOST_STARVED * silence_s:
                    self.end(rank, f"no sign of life for {now_s - self._asked_s[rank]:.0f} s")
