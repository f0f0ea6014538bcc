"""The box of everything that is shown in a notebook's cell, its words, and what stays of it without a kernel."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import anywidget
import ipywidgets as widgets
import traitlets
from IPython.display import HTML, display
from markupsafe import Markup, escape

from workbench.core.errors import WorkbenchError
from workbench.plots.style import dark_css

REOPENED = Markup("""
<div class="workbench-reopened">
{}<p>The controls need their kernel: choose Run, then Run All Cells.</p>
</div>
<style>
.jp-OutputArea:has(.widget-vbox) .workbench-reopened {{display: none}}
.workbench-reopened .workbench-picture {{background: white; display: block; max-width: 100%}}
.jp-OutputArea:has(.workbench-reopened):not(:has(.widget-vbox)) .jp-OutputArea-output.jupyter-widgets {{display: none}}
</style>
""")
"""What is seen of a panel where it is no widget: without its kernel, and where notebooks are only shown."""


class Page(anywidget.AnyWidget):
    """An invisible widget that fixes the page in which it is shown, see page.js and page.css.

    width: of the surrounding box, in pixels; 0: not known.  takes_picture: whether the page sends the figure in that
    box as `picture`, the address of an image that holds it, each time it has changed.
    """

    width = traitlets.Int(0).tag(sync=True)
    takes_picture = traitlets.Bool(False).tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    _esm = Path(__file__).with_name("page.js")
    _css = Path(__file__).with_name("page.css").read_text(encoding="utf-8") + dark_css(
        'body[data-jp-theme-light="false"] .js-plotly-plot'
    )


class Panel(widgets.VBox):
    """A box for a notebook's cell: screen readers get names for its sliders, and JupyterLab ignores keys pressed in
    it.

    Its words, drawings and figures stay in the notebook as they were last; only the controls need a kernel.
    """

    def __init__(self, children: Sequence[widgets.Widget], **settings: Any) -> None:
        self.page, self._handle = Page(layout=widgets.Layout(display="none")), None
        super().__init__([*children, self.page], **settings)

    @property
    def still(self) -> Markup:
        """Return the present state as HTML that needs no kernel and no script."""
        return Markup().join(map(still_of, self.children))

    def _ipython_display_(self) -> None:
        """Show the panel, and leave its picture for a notebook that is opened again without its kernel."""
        display(self._repr_mimebundle_(), raw=True)
        self._handle = display(HTML(REOPENED.format(self.still)), display_id=True)
        for page in pages_in(self):
            page.observe(self._on_picture, names="picture")

    def _on_picture(self, _: object) -> None:
        self.keep()

    def keep(self) -> None:
        """Leave the present state for a notebook that is opened again without its kernel."""
        if self._handle is not None:
            self._handle.update(HTML(REOPENED.format(self.still)))


def pages_in(box: widgets.Box) -> Iterator[Page]:
    """Return the pages of all panels in a box."""
    for child in box.children:
        if isinstance(child, Page):
            yield child
        elif isinstance(child, widgets.Box):
            yield from pages_in(child)


@runtime_checkable
class Kept(Protocol):
    """What stays in a notebook without a kernel."""

    @property
    def still(self) -> Markup:
        """Return the present state as HTML that needs no kernel and no script."""


def still_of(widget: widgets.Widget) -> Markup:
    """Return what stays of a widget: words, drawings and figures, those of the chosen tab; nothing of a control."""
    if isinstance(widget, widgets.DOMWidget) and widget.layout.display == "none":
        return Markup()
    if isinstance(widget, Kept):
        return widget.still
    if isinstance(widget, Html):
        return Markup(widget.value)
    if isinstance(widget, widgets.Tab):
        at = widget.selected_index or 0
        return Markup("<b>{}</b>{}").format(widget.titles[at], still_of(widget.children[at]))
    if isinstance(widget, widgets.Box):
        return Markup().join(map(still_of, widget.children))
    return Markup()


class Html(widgets.HTML):
    """HTML made by Markup("...").format(...), which escapes its arguments; any other string is shown as plain text."""

    @traitlets.validate("value")
    def _escaped(self, proposal: Any) -> str:
        return escape(proposal["value"])


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
