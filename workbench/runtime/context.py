"""The context of a job function on its engine: its rank, its peers, how to report progress and when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import quote

from workbench.core.cluster import Cluster, Device
from workbench.core.run_files import DEVICES


class Channel(Protocol):
    """Connects a rank to the process that leads the run."""

    def send(self, event: Any) -> None:
        """Send one event."""

    def store(self) -> Any:
        """Return the torch.distributed.Store through which the ranks form groups."""
        return None

    def should_stop(self) -> bool:
        """Return whether the leading process wants to end the job early."""
        return False

    def listen(self, take: Callable[[Any], None]) -> None:
        """Pass every command to `take`, in another thread, until the job ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The context of one rank in a run.

    interface: where gloo binds ('' lets gloo choose).  generation: number of the run.
    clock_offset_s: added to this rank's monotonic clock, it gives rank 0's clock.  local_folder: where this rank stores
    large private files ('' uses the job's folder).  dilation: all emulated devices and links run this many times
    slower, so that this machine can keep up; reported times are in emulated seconds (`now_s`).  is_watched: somebody
    looks at the run's operations while it goes on.
    """

    rank: int
    world_size: int
    device: Device
    cluster: Cluster
    fidelity: Literal["kernel", "paced", "real"]
    interface: str = ""
    generation: int = 0
    clock_offset_s: float = 0.0
    local_folder: str = ""
    dilation: float = 1.0
    is_watched: bool = False
    channel: Channel | None = field(default=None, repr=False, compare=False)

    def own_folder(self, shared: Path) -> Path:
        """Return the folder for this device's large private files: on the device's disk, or in the shared folder."""
        name = quote(self.device.name, safe="").replace(".", "%2E")
        return Path(self.local_folder or shared) / DEVICES / name

    def now_s(self) -> float:
        """Return the monotonic clock in emulated seconds."""
        return time.monotonic() / self.dilation

    def publish(self, event: Any) -> None:
        """Send an event to the parent.  Dict events may contain 'epoch' and 'step', which a later DeviceLostError
        reports.
        """
        if self.channel is not None:
            self.channel.send(event)

    def should_stop(self) -> bool:
        """Return whether the parent wants to end the run early."""
        return self.channel is not None and self.channel.should_stop()
