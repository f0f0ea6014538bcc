"""Parts shared by the explorers: controls, and below them the answer for their newest position, computed in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import ipywidgets as widgets
import plotly.graph_objects as go
from markupsafe import Markup

from workbench.core.errors import WorkbenchError
from workbench.widgets.controls import BIG_FIRST, FigureBox, Html, Message, Panel

Request = TypeVar("Request")


class Latest(Generic[Request]):
    """Does `work` with the newest request in a separate thread; of the requests that come while it is busy, only the last is kept.

    work: must not raise; it shows its own errors.
    """

    def __init__(self, work: Callable[[Request], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._waiting: list[Request] = []  # at most one
        self._thread: threading.Thread | None = None
        self._busy = False

    def ask(self, request: Request) -> None:
        """Request work on `request`; it replaces a waiting request."""
        with self._lock:
            self._waiting = [request]
            if not self._busy:
                self._busy = True
                self._thread = threading.Thread(target=self._run, name="workbench-latest", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until no work is left."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                request = self._waiting.pop()
            self._work(request)


class Explorer(Panel):
    """Controls above, a headline, a message, and one figure, or several in tabs, below.

    asked: returns the request that the controls describe; may raise WorkbenchError.  answer: shows the answer, in the background.
    tabs: titles of the figures; without any, one figure and no tabs.  refused: the headline if a request cannot be answered.
    """

    def __init__(
        self,
        rows: Sequence[widgets.Widget],
        controls: Sequence[Any],
        asked: Callable[[], Any],
        answer: Callable[[Any], None],
        *,
        tabs: Sequence[str] = (),
        below: Sequence[Html] = (),
        refused: str = "",
    ) -> None:
        self.message, self.headline = Message(), Html()
        self._asked, self._answer, self._refused, self._below = asked, answer, refused, tuple(below)
        self._paused = False
        self._boxes = [FigureBox() for _ in tabs or ("",)]
        self._figures: tuple[Callable[[], go.Figure], ...] = ()
        self._latest: Latest[Any] = Latest(self._work)
        self.figure = self._boxes[0]
        self.tabs = widgets.Tab(self._boxes, titles=tuple(tabs))
        for control in controls:
            control.observe(lambda _: self.changed(), names="value")
        self.tabs.observe(lambda _: self._switch(), names="selected_index")
        super().__init__([*rows, self.headline, self.message, *below, self.tabs if tabs else self.figure])
        self.changed()
        self.wait()

    def wait(self) -> None:
        """Wait until the answer shown belongs to the controls' settings."""
        self._latest.wait()

    def changed(self) -> None:
        """Answer the current request of the controls."""
        if self._paused:
            return
        try:
            self._latest.ask(self._asked())
        except WorkbenchError as error:
            self._latest.ask(error)  # after the current work, which would clear it

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Change several controls inside the context; their answer is shown once, at the end."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
        self.changed()

    def refuse(self, headline: str, why: str) -> None:
        """Show why a request has no answer, and no figure."""
        self.headline.value = BIG_FIRST.format(headline, "")
        self.message.error(why)
        self.show()

    def show(self, *figures: Callable[[], go.Figure]) -> None:
        """Show a figure for each tab, or none; only the visible one is drawn, because drawing is the most expensive part."""
        self._figures = figures
        for box in self._boxes:
            box.layout.visibility = "visible" if figures else "hidden"
        self._draw()

    def _switch(self) -> None:
        try:
            self._draw()
        except Exception as error:  # nobody would see the error of a callback
            self.message.show_exception(error)

    def _draw(self) -> None:
        if self._figures:
            at = self.tabs.selected_index or 0
            self._boxes[at].show(self._figures[at]())

    def _work(self, request: Any) -> None:
        try:
            if isinstance(request, WorkbenchError):
                raise request
            self.message.clear()
            self._answer(request)
        except Exception as error:  # nobody would see the error of a thread
            self.headline.value = BIG_FIRST.format(self._refused, "") if self._refused else Markup()
            for one in self._below:
                one.value = Markup()
            self.show()
            self.message.show_exception(error)
