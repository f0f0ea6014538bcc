"""Live progress in a cell's own output: it changes while the cell runs, and its last state stays in a notebook run without a browser."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

from IPython.display import DisplayHandle, display

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.methods.base import Event
from workbench.progress import RunState
from workbench.widgets.progress import as_html, as_text

REFRESH_S = 0.5


class LiveProgress:
    """A context manager whose `update` takes a run's events.

    stop: once set, the next event ends the run as Ctrl-C would.
    """

    def __init__(self, job: Job, cluster: Cluster, *, stop: threading.Event | None = None) -> None:
        self.state = RunState(job, cluster)
        self._stop = stop or threading.Event()
        self._over = threading.Event()
        self._handle: DisplayHandle | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._handle = display(self, display_id=True)
        self._thread = threading.Thread(target=self._refresh, name="workbench-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.state.finish("finished" if kind is None else "stopped" if issubclass(kind, KeyboardInterrupt) else "failed")
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._draw()

    def update(self, event: Event) -> None:
        """Take one of the run's events.  Raises KeyboardInterrupt if the run is to stop."""
        self.state.update(event)
        if self._stop.is_set():
            raise KeyboardInterrupt

    def _refresh(self) -> None:
        while not self._over.wait(REFRESH_S):
            self._draw()

    def _draw(self) -> None:
        if self._handle is not None:
            self._handle.update(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        now = self.state.snapshot()
        return {"text/plain": as_text(now), "text/html": as_html(now)}
