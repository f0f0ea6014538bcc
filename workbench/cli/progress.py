"""Live progress of a run in the terminal: its whole state, or a line now and then where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from workbench.cli.output import say
from workbench.progress import RunState

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
        from rich.text import Text

        return Text(str(self.state.snapshot()), no_wrap=True, overflow="ellipsis")

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


def _told_loss(loss: float | None) -> str:
    return "" if loss is None else f", loss {loss:.4f}"
