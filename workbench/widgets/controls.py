"""Parts shared by the forms and labs: panels, described controls, a line for errors."""

from __future__ import annotations

import sys
import threading
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anywidget
import ipywidgets as widgets
import traitlets
from IPython.display import HTML, display
from markupsafe import Markup, escape

from workbench.core.errors import RuntimeSetupError, WorkbenchError
from workbench.core.threads import in_background
from workbench.plots.style import dark_css

Control = TypeVar("Control", bound=widgets.Widget)

REOPENED = Markup("""
<div class="workbench-reopened">
{}<p>The controls need their kernel: choose Run, then Run All Cells.</p>
</div>
<style>
.jp-OutputArea:has(.widget-vbox) .workbench-reopened {{display: none}}
.jp-OutputArea:has(.workbench-reopened):not(:has(.widget-vbox)) .jp-OutputArea-output.jupyter-widgets {{display: none}}
</style>
""")
"""Replaces a panel where there are no widgets: without a kernel, and in a viewer of notebooks."""
WIDE = {"description_width": "9em"}

# ipykernel 7.4 hands a widget's messages to the thread that made the widget, where they wait until the running cell has
# ended.  JupyterLab asks for another thread.  Without this method the kernel does what JupyterLab asks.
if (comms := sys.modules.get("ipykernel.comm.comm")) is not None:  # this process is a notebook's kernel
    comms.BaseComm._reply_subshell_for = None


class _Page(anywidget.AnyWidget):
    """An invisible widget that fixes the page in which it is shown, see page.js and page.css."""

    width = traitlets.Int(0).tag(sync=True)  # of the surrounding box, in pixels; 0: not known
    _esm = Path(__file__).with_name("page.js")
    _css = Path(__file__).with_name("page.css").read_text(encoding="utf-8") + dark_css(
        'body[data-jp-theme-light="false"] .js-plotly-plot'
    )


class Panel(widgets.VBox):
    """A box for a notebook's cell: screen readers get names for its sliders, and JupyterLab ignores keys pressed in
    it.
    """

    def __init__(self, children: Sequence[widgets.Widget], **settings: Any) -> None:
        self._page = _Page(layout=widgets.Layout(display="none"))
        self._still, self._handle = Markup(), None
        super().__init__([*children, self._page], **settings)

    def _ipython_display_(self) -> None:
        """Show the panel, and leave its picture for a notebook that is opened again without its kernel."""
        display(self._repr_mimebundle_(), raw=True)
        self._handle = display(HTML(REOPENED.format(self._still)), display_id=True)

    def keep(self, still: Markup) -> None:
        """Leave a picture of the present state for a notebook that is opened again without its kernel."""
        self._still = still
        if self._handle is not None:
            self._handle.update(HTML(REOPENED.format(still)))


class Html(widgets.HTML):
    """HTML made by Markup("...").format(...), which escapes its arguments; any other string is shown as plain text."""

    @traitlets.validate("value")
    def _escaped(self, proposal: Any) -> str:
        return escape(proposal["value"])


class WorkPanel(Panel):
    """A panel that works in a thread, so that the kernel stays free, with a button that stops the work.  Failures are
    shown.

    running: whether work is in progress, in the thread or in a cell.
    """

    message: Message
    stop_button: widgets.Button
    running = traitlets.Bool(False)

    def __init__(self, children: Sequence[widgets.Widget]) -> None:
        self._thread: threading.Thread | None = None
        self._changing = threading.RLock()  # the thread and the kernel's both change the panel
        self._stop = threading.Event()
        super().__init__(children)
        self.observe(lambda _: self._enable(), names="running")
        self._enable()

    @abstractmethod
    def _described(self) -> Any:
        """Return what the controls ask for.  Raises ConfigError."""

    @abstractmethod
    def _enable(self) -> None:
        """Enable the buttons that can be pressed now."""

    def _clear(self) -> None:
        """Remove an old result before new work."""

    def stop(self) -> None:
        """End the work at its next step, as Ctrl-C would."""
        self._stop.set()
        with self._changing:
            if self.running:
                self.message.say("Stopping at the next step ...")

    def wait(self) -> None:
        """Wait until the panel's thread is done."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, work: Callable[[Any], Callable[[], object]]) -> None:
        """Begin what the controls ask for in a thread; errors in them are shown at once.

        work: (what the controls ask for) -> what shows the outcome.
        """
        with self._changing:
            try:
                if self.running:
                    todo = f"Wait for it, or press {self.stop_button.description}."
                    raise RuntimeSetupError("A run was asked for.", "One is in progress.", todo)
                self.message.clear()
                self._clear()
                described = self._described()
            except Exception as error:  # nobody would see the error of a callback
                self.message.show_exception(error)
                return
            self._stop.clear()
            self.running = True  # before the thread starts, which may end at once
        self._thread = in_background(self._work, work, described, name="workbench-run")

    def _work(self, work: Callable[[Any], Callable[[], object]], described: Any) -> None:
        try:
            show = work(described)
        except BaseException as error:
            show = partial(self.message.show_exception, error)
        with self._changing:  # Stop says nothing over the outcome
            self.running = False
            show()

    @contextmanager
    def _in_cell(self) -> Iterator[None]:
        """Work in a cell: meanwhile the buttons start nothing."""
        self._stop.clear()
        self.running = True
        try:
            yield
        finally:
            self.running = False


class Headline(Html):
    """The result of an answer, in large letters, with a line below it."""

    def say(self, first: str, rest: str = "") -> None:
        """Show both."""
        self.value = Markup(
            "<div role='status' style='line-height:1.5'><b style='font-size:larger'>{}</b><br>{}</div>"
        ).format(first, rest)


class Message(Html):
    """A line that a screen reader announces: an error (red), a remark, or empty."""

    def error(self, text: str, *, details: str = "") -> None:
        """Show an error; its details can be unfolded."""
        more = Markup("<details><summary>details</summary><pre>{}</pre></details>").format(details) if details else ""
        self.value = Markup(
            "<div role='alert' style='color:var(--jp-error-color1, #B00020);line-height:1.4'><b>&#9888;</b> {}{}</div>"
        ).format(text, more)

    def say(self, text: str) -> None:
        """Show a remark."""
        self.value = Markup("<div role='status' style='line-height:1.4'>{}</div>").format(text)

    def clear(self) -> None:
        """Clear the line."""
        self.value = Markup()

    def show_exception(self, error: BaseException) -> None:
        """Show a failure: a user's error as its one line, any other error with its trace."""
        if isinstance(error, WorkbenchError):
            self.error(str(error))
        else:
            self.error(f"{type(error).__name__}: {error}", details="".join(traceback.format_exception(error)))


def described(kind: type[Control], description: str, tooltip: str, *, width: str = "24em", **settings: Any) -> Control:
    """Return a control with its label in front of it and a tooltip."""
    return kind(description=description, tooltip=tooltip, style=WIDE, layout=widgets.Layout(width=width), **settings)


def slider(
    description: str, tooltip: str, value: int, least: int, most: int, *, width: str = "34em", **settings: Any
) -> widgets.IntSlider:
    """Return a slider over whole numbers."""
    return described(widgets.IntSlider, description, tooltip, width=width, value=value, min=least, max=most, **settings)


ON_COLOUR = "black"
"""Text colour of a coloured button: the page's white has a contrast of 2 to 3; weak eyes need 4.5 (WCAG 2.1, 1.4.3)."""


def button(
    description: str, tooltip: str, icon: str, action: Callable[[], object], style: str = "", **settings: Any
) -> widgets.Button:
    """Return a button that calls `action`."""
    widget = widgets.Button(description=description, tooltip=tooltip, icon=icon, button_style=style, **settings)
    if style:
        widget.style.text_color = ON_COLOUR
    widget.on_click(lambda _: action())
    return widget
