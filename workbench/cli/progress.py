"""Live progress of a run in the terminal: the phase, the steps with their loss, and what each device is doing."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from workbench.cli.output import say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from workbench.core.cluster import Cluster
    from workbench.methods.base import Event


class RunProgress:
    """A context manager whose `update` takes the run's events; on anything but a terminal it prints a line per phase and epoch."""

    def __init__(self, cluster: Cluster) -> None:
        self._doing = ["" for _ in cluster.devices]
        self._names = [device.name for device in cluster.devices]
        self._live: Any = None
        self._bar: Any = None
        self._task: Any = None
        self._epoch: int | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            )
            self._task = self._bar.add_task("starting", total=None)
            self._live = Live(get_renderable=self._draw, console=Console(stderr=True), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, event: Event) -> None:
        """Show an event of `experiment.run`: a phase, a step, the end of an epoch, or what one device is doing."""
        if event.kind == "step":
            self._show_step(event)
        elif 0 <= event.rank < len(self._doing):
            self._doing[event.rank] = event.message
        elif event.kind == "epoch":
            took = "" if event.seconds is None else f", {event.seconds:.1f} s"
            loss = "" if event.loss is None else f", loss {event.loss:.4f}"
            self._note(event.message or f"epoch {event.epoch + 1} done{loss}{took}")
        elif event.message:
            self._note(event.message)

    def _show_step(self, event: Event) -> None:
        name = f"epoch {event.epoch + 1}"
        begins = event.epoch != self._epoch
        self._epoch = event.epoch
        if self._bar is None:
            if begins:
                say(f"{name}: {event.num_steps} steps")
            return
        if begins:
            self._bar.reset(self._task, total=event.num_steps)
        loss = "" if event.loss is None else f", loss {event.loss:.4f}"
        self._bar.update(self._task, completed=event.step + 1, description=f"{name}{loss}")

    def _note(self, text: str) -> None:
        if self._bar is None:
            say(text)
        else:
            self._bar.update(self._task, description=text)

    def _draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        width = max(map(len, self._names))
        lines = [f"  {name:<{width}}  {doing}" for name, doing in zip(self._names, self._doing, strict=True) if doing]
        return Group(self._bar, Text("\n".join(lines))) if lines else self._bar
