"""The interface of the devices' processes, emulated, real or virtual: start, command, kill, freeze and restart them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol


class News(NamedTuple):
    """News from a device: 'event' (a published event), 'ended' (an Outcome), 'died' (why, or None) or 'restarted'
    (None, or an error).
    """

    rank: int
    kind: Literal["event", "ended", "died", "restarted"]
    content: Any = None


class Devices(Protocol):
    """The interface between the coordinator's process and the devices: implemented by engine_service.EngineService and
    virtual_devices.VirtualDevices.

    silence_s: a device that does not reply for longer counts as lost.  timeout_s: the shortest time-out of their jobs.
    is_real: whether they are real, not emulated.
    """

    silence_s: float
    timeout_s: float
    is_real: bool

    def start(self, rank: int) -> None:
        """Start a device's job.  One that serves a coordinator publishes Ready once it accepts commands."""

    def command(self, rank: int, message: Any) -> Any:
        """Send a command to a device's job."""

    def kill(self, rank: int) -> None:
        """Kill a device's process at once.  `news` reports when it has died."""

    def freeze(self, rank: int) -> None:
        """Suspend a device's process without ending it."""

    def restart(self, rank: int) -> None:
        """Restart a device's process in the background.  `news` reports when it is up."""

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds used by a device's process.  0 if unknown."""

    def news(self, timeout_s: float) -> list[News]:
        """Return the events since the last call.  Waits up to timeout_s for the first one."""

    def now_s(self) -> float:
        """Return the time of the devices' clock in seconds."""
