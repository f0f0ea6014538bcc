"""Controls, and below them the answer for their newest position, computed in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import ipywidgets as widgets
import plotly.graph_objects as go
from markupsafe import Markup

from workbench.core.errors import WorkbenchError
from workbench.core.threads import in_background
from workbench.widgets.controls import Headline, Html, Message, Panel
from workbench.widgets.figure_box import FigureBox
from workbench.widgets.tables import Table

Request = TypeVar("Request")


class Latest(Generic[Request]):
    """Does `work` with the newest request in a separate thread; of the requests that come while it is busy, only the
    last is answered.

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
                self._thread = in_background(self._run, name="workbench-latest")

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
    """Controls above, a headline, a message, a table if there is one, and one figure, or several in tabs, below.

    The last answer's words stay in a notebook without its kernel.
    request: returns the request that the controls describe; may raise WorkbenchError.  answer: shows the answer, in the
    background.
    tabs: titles of the figures; without any, one figure and no tabs.  refused: the headline if a request cannot be
    answered.
    pin: a button that keeps the answer as A, with its headline and figure, while the settings are changed.
    """

    def __init__(
        self,
        rows: Sequence[widgets.Widget],
        controls: Sequence[Any],
        request: Callable[[], Any],
        answer: Callable[[Any], None],
        *,
        tabs: Sequence[str] = (),
        refused: str = "",
    ) -> None:
        self.message, self.headline, self.table = Message(), Headline(), Html()
        self.table.layout.display = "none"
        self._request, self._answer, self._refused = request, answer, refused
        self._paused = False
        self._boxes = [FigureBox() for _ in tabs or ("",)]
        self._figures: tuple[Callable[[], go.Figure], ...] = ()
        self._latest: Latest[Any] = Latest(self._work)
        self.figure = self._boxes[0]
        self.tabs = widgets.Tab(self._boxes, titles=tuple(tabs))
        self._first_values = [(control, control.value) for control in controls]
        tooltip = "Keep this answer as A, in sight while you change the settings"
        self.pin = widgets.ToggleButton(description="Keep as A", tooltip=tooltip, icon="thumb-tack")
        self.kept_headline, self.kept_figure = Html(), FigureBox()
        self.kept_figure.layout.display = "none"
        self._kept_figures: tuple[Callable[[], go.Figure], ...] = ()
        for control in controls:
            control.observe(lambda _: self.changed(), names="value")
        self.tabs.observe(lambda _: self._switch(), names="selected_index")
        self.pin.observe(lambda change: self._keep(change["new"]), names="value")
        answers = [self.pin, self.kept_headline, self.headline, self.message, self.table]
        super().__init__([*rows, *answers, self.tabs if tabs else self.figure, self.kept_figure])
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
            self._latest.ask(self._request())
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

    def reset(self) -> None:
        """Put every control back to its first value, and keep no answer."""
        self.pin.value = False
        with self.setting():
            for control, value in self._first_values:
                control.value = value

    def refuse(self, headline: str, why: str) -> None:
        """Show why a request has no answer, and no figure."""
        self.headline.say(headline)
        self.message.error(why)
        self.show()

    def tabulate(self, table: Table) -> None:
        """Show a table below the headline."""
        self.table.layout.display = ""
        self.table.value = table._repr_html_()

    def show(self, *figures: Callable[[], go.Figure]) -> None:
        """Show a figure for each tab, or none; only the visible one is drawn, because drawing is the most expensive
        part.
        """
        self._figures = figures
        for box in self._boxes:
            box.layout.display = "" if figures else "none"
        self._draw()

    def _keep(self, is_kept: bool) -> None:
        """Show the answer as A, next to the following ones, or show no A any more."""
        self.wait()
        self._kept_figures = self._figures if is_kept else ()
        self.pin.description = "Drop A" if is_kept else "Keep as A"
        box = Markup("<div style='border-left:4px solid;padding-left:8px'><b>A, kept:</b> {}</div>")
        self.kept_headline.value = box.format(Markup(self.headline.value)) if is_kept else Markup()
        self._switch()

    def _switch(self) -> None:
        try:
            self._draw()
        except Exception as error:  # nobody would see the error of a callback
            self.message.show_exception(error)

    def _draw(self) -> None:
        tab = self.tabs.selected_index or 0
        if self._figures:
            self._boxes[tab].show(self._figures[tab]())
        self.kept_figure.layout.display = "" if self._kept_figures else "none"
        if self._kept_figures:
            figure = self._kept_figures[tab]()
            figure.update_layout(title_text=f"A, kept: {figure.layout.title.text or ''}")
            self.kept_figure.show(figure)

    def _work(self, request: Any) -> None:
        try:
            if isinstance(request, WorkbenchError):
                raise request
            self.message.clear()
            self._answer(request)
            self.keep(Markup(self.headline.value) + Markup(self.table.value))
        except Exception as error:  # nobody would see the error of a thread
            self.headline.value = self.table.value = Markup()
            if self._refused:
                self.headline.say(self._refused)
            self.show()
            self.message.show_exception(error)
