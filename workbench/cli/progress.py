"""Live progress of a run in the terminal: a table of devices, a bar for each epoch; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from workbench.cli.output import say
from workbench.progress import DeviceRow, EpochRow, RunState

if TYPE_CHECKING:
    from rich.console import RenderableType

    from workbench.core.cluster import Cluster
    from workbench.core.job import Job
    from workbench.methods.base import Event

PLAIN_INTERVAL_S = 5.0
"""Without a terminal: how often a line tells of the steps."""


class RunProgress:
    """A context manager whose `update` takes the run's events.  All goes to stderr: stdout is the result's."""

    def __init__(self, job: Job, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = RunState(job, cluster, clock=clock)
        self._clock = clock
        self._live: Any = None
        self._told_s = float("-inf")
        self._begun: set[int] = set()
        self._finished: set[int] = set()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(get_renderable=self.draw, console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.state.finish(kind)
        if self._live is not None:
            self._live.stop()

    def update(self, event: Event) -> None:
        """Take an event of `experiment.run`."""
        self.state.update(event)
        if self._live is None:
            self._tell(event)

    def draw(self) -> RenderableType:
        """Return what the terminal shows now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self.state.snapshot()
        parts: list[RenderableType] = [Text(now.headline)]
        if any(epoch.num_steps for epoch in now.epochs):
            bars = Table.grid(padding=(0, 2))
            for epoch in now.epochs:
                bar = ProgressBar(total=max(1, epoch.num_steps), completed=epoch.done, width=30)
                name = "requests" if epoch.answers else f"epoch {epoch.epoch + 1}"
                bars.add_row(name, bar, f"{epoch.done}/{epoch.num_steps}", _epoch_words(epoch))
            parts.append(bars)
        if any(device.phase for device in now.devices):
            table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
            for column, right in (("device", False), ("doing", False), ("computing", True), ("memory", True), ("of its budget", True)):
                table.add_column(column, justify="right" if right else "left", no_wrap=True)
            for device in now.devices:
                table.add_row(*(Text(cell) for cell in _device_cells(device)))
            parts.append(table)
        return Group(*parts)

    def _tell(self, event: Event) -> None:
        """Print a line for a phase, an epoch's begin and end, and every few seconds for the steps."""
        if event.kind in ("phase", "note") and event.message:
            say(event.message)
        if event.kind != "step":
            return
        now = self.state.snapshot()
        row = now.epochs[event.epoch]
        if event.epoch not in self._begun:
            self._begun.add(event.epoch)
            self._told_s = self._clock()
            if not row.answers:
                say(f"epoch {event.epoch + 1}: {event.num_steps} steps")
        if row.is_finished and event.epoch not in self._finished:
            self._finished.add(event.epoch)
            name = f"{row.num_steps} requests" if row.answers else f"epoch {event.epoch + 1}"
            say(f"{name} done{_told_loss(row.loss)}, {row.seconds:.1f} s")
        elif self._clock() - self._told_s >= PLAIN_INTERVAL_S:
            self._told_s = self._clock()
            busy = ", ".join(f"{device.name} {device.busy_share:.0%}" for device in now.devices if device.busy_share is not None)
            where = "request" if row.answers else f"epoch {event.epoch + 1}, step"
            say(f"{where} {event.step + 1} of {event.num_steps}{now.facts}" + (f"; computing: {busy}" if busy else ""))


def _epoch_words(epoch: EpochRow) -> str:
    if not epoch.done:
        return ""
    return f"{epoch.seconds:.1f} s{_told_loss(epoch.loss)}"


def _told_loss(loss: float | None) -> str:
    return "" if loss is None else f", loss {loss:.4f}"


def _device_cells(device: DeviceRow) -> tuple[str, str, str, str, str]:
    busy = "" if device.busy_share is None else f"{device.busy_share:.0%}"
    if device.used_bytes is None:
        return device.name, device.doing, busy, "", ""
    used = f"{device.used_bytes / 1e6:.0f} of {device.budget_bytes / 1e6:.0f} MB"
    return device.name, device.doing, busy, used, f"{device.used_bytes / device.budget_bytes:.0%}"
