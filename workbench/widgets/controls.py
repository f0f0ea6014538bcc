"""Parts shared by the forms and labs: described controls, a line for errors, a figure that can be drawn again,
explorers.

An explorer has controls, and below them the answer for their newest position, computed in the background.  Also the
start values of the notebooks' parameters (small under test, full size for a person), and texts longer than a sentence.
"""

from __future__ import annotations

import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Generic, TypeVar

import anywidget
import ipywidgets as widgets
import plotly.graph_objects as go
import traitlets
from IPython.display import HTML, display
from markupsafe import Markup, escape

from workbench.assets.fetch import cache_folder
from workbench.core.errors import WorkbenchError
from workbench.core.serial import write_text
from workbench.plots.style import BREAK, CONFIG, dark_css, only_our_tags
from workbench.profiler.timing import tiny
from workbench.tasks import load_task

Control = TypeVar("Control", bound=widgets.Widget)

BIG_FIRST = Markup("<div role='status' style='line-height:1.5'><b style='font-size:larger'>{}</b><br>{}</div>")
"""A headline in large letters, with a line below it."""
REOPENED = Markup("""
<div class="workbench-reopened">
{}<p>The controls need their kernel: choose Run, then Run All Cells.</p>
</div>
<style>
.jp-OutputArea:has(.widget-vbox) .workbench-reopened {{display: none}}
.jp-OutputArea:has(.workbench-reopened):not(:has(.widget-vbox)) .jp-OutputArea-output.jupyter-widgets {{display: none}}
</style>
""")
"""What is seen of a panel where it is no widget: without its kernel, and where notebooks are only shown."""
WIDE = {"description_width": "9em"}
TITLE_PIXELS, TOP_PIXELS, WIDTH_PIXELS, LEAST_PIXELS, BORDER_PIXELS = 100, 55, 1000, 500, 8  # sizes of a figure


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
    made = widgets.Button(description=description, tooltip=tooltip, icon=icon, button_style=style, **settings)
    if style:
        made.style.text_color = ON_COLOUR
    made.on_click(lambda _: action())
    return made


class _WholeFigure(go.FigureWidget):
    """A figure widget that opens its channel to the browser with all its data.

    FigureWidget opens an empty channel and sends the data later.  A browser that is still loading plotly loses them and
    shows bare axes.
    """

    _is_whole = False

    def open(self) -> None:
        """Open the channel once all data are present."""
        if self._is_whole:
            super().open()

    @classmethod
    def of(cls, figure: go.Figure) -> _WholeFigure:
        """Return the widget of a figure."""
        made = cls(figure)
        made._config = made._config | CONFIG
        made._is_whole = True
        made.open()
        return made


class FigureBox(Panel):
    """A figure that can be drawn again, as wide as its cell.  Its title is text above it: plotly draws a new title over
    the subtitle.
    """

    def __init__(self, figure: go.Figure | None = None) -> None:
        self.heading = Html()
        self.shown: Any = None  # a FigureWidget, once one is shown
        super().__init__([self.heading])
        self._page.observe(lambda _: self._fit(), names="width")
        if figure is not None:
            self.show(figure)

    @property
    def _width(self) -> int:
        """Return the width of the figure in pixels: plotly's widget does not find it by itself."""
        return (
            min(WIDTH_PIXELS, max(LEAST_PIXELS, self._page.width - BORDER_PIXELS)) if self._page.width else WIDTH_PIXELS
        )

    def _fit(self) -> None:
        if self.shown is not None and self.shown.layout.width != self._width:
            self.shown.layout.width = self._width

    def show(self, figure: go.Figure) -> None:
        """Show another figure."""
        title = figure.layout.title
        subtitle = title.subtitle.text
        self.heading.value = Markup(
            "<div style='line-height:1.5'><span style='font-size:larger'>{}</span><br>{}</div>"
        ).format(*(Markup(only_our_tags(one or "").replace(BREAK, " ")) for one in (title.text, subtitle)))
        above = figure.layout.margin.t or TITLE_PIXELS
        bare = go.Figure(figure)
        bare.update_layout(
            title=None, height=figure.layout.height - above + TOP_PIXELS, margin_t=TOP_PIXELS, width=self._width
        )
        if self.shown is None:
            self.shown = _WholeFigure.of(bare)
            self.children = (self.heading, self._page, self.shown)
            return
        # The first traces of the same kinds are changed in place, so there is no moment with bare axes.
        kinds = zip(self.shown.data, bare.data, strict=False)
        same = len(list(takewhile(lambda pair: pair[0].type == pair[1].type, kinds)))
        if len(self.shown.data) > same:
            self.shown.data = self.shown.data[:same]
        with self.shown.batch_update():
            self.shown.update_layout(bare.layout, overwrite=True)
            for trace, wanted in zip(self.shown.data, bare.data, strict=False):
                fields = {name: value for name, value in wanted.to_plotly_json().items() if name not in ("type", "uid")}
                gone = trace.to_plotly_json().keys() - fields.keys() - {"type", "uid"}
                trace.update(fields | dict.fromkeys(gone), overwrite=True)
        if len(bare.data) > same:
            self.shown.add_traces(bare.data[same:])


def output_folder(name: str) -> Path:
    """Return a notebook's output folder: figures/NAME next to the notebooks' folder, or a temporary folder at the
    smallest settings.
    """
    if tiny():
        return Path(tempfile.gettempdir()) / "workbench-tiny" / name
    return Path("..") / "figures" / name


def passages_folder(folder: Path | str | None = None, *, count: int = 32, sentences: int = 12) -> str:
    """Write `count` passages of several movie-review sentences each, in SST-2's form, and return the folder for
    Job(data=...).

    The label is whether most sentences of a passage praise the movie.  Job(max_length=...) cuts passages to a number of
    tokens.
    folder: next to the fetched data if not given.
    """
    split = load_task("sentiment", test_samples=count * sentences).test
    texts, labels = split.texts, split.labels
    rows = []
    for first in range(0, len(texts) - sentences + 1, sentences):
        text = " ".join(part.replace("\t", " ").replace("\n", " ") for part in texts[first : first + sentences])
        rows.append(f"{text}\t{int(2 * sum(labels[first : first + sentences]) > sentences)}")
    folder = cache_folder() / f"passages-{count}-{sentences}" if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Nothing is trained, but a task must have training samples, ten for each validation sample.
    for name, lines in (("train.tsv", rows * -(-20 // len(rows))), ("dev.tsv", rows)):
        write_text(folder / name, "\n".join(["sentence\tlabel", *lines]) + "\n")
    return str(folder)


Request = TypeVar("Request")


class Latest(Generic[Request]):
    """Does `work` with the newest request in a separate thread; of the requests that come while it is busy, only the
    last is kept.

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

    The last answer's words stay in a notebook without its kernel.
    asked: returns the request that the controls describe; may raise WorkbenchError.  answer: shows the answer, in the
    background.
    tabs: titles of the figures; without any, one figure and no tabs.  refused: the headline if a request cannot be
    answered.
    pin: a button that keeps the answer as A, with its headline and figure, while the settings are changed.
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
        self._first_values = [(control, control.value) for control in controls]
        told = "Keep this answer as A, in sight while you change the settings"
        self.pin = widgets.ToggleButton(description="Keep as A", tooltip=told, icon="thumb-tack")
        self.kept_headline, self.kept_figure = Html(), FigureBox()
        self.kept_figure.layout.display = "none"
        self._kept: tuple[Callable[[], go.Figure], ...] = ()
        for control in controls:
            control.observe(lambda _: self.changed(), names="value")
        self.tabs.observe(lambda _: self._switch(), names="selected_index")
        self.pin.observe(lambda change: self._keep(change["new"]), names="value")
        answers = [self.pin, self.kept_headline, self.headline, self.message, *below]
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

    def reset(self) -> None:
        """Put every control back to its first value, and keep no answer."""
        self.pin.value = False
        with self.setting():
            for control, value in self._first_values:
                control.value = value

    def refuse(self, headline: str, why: str) -> None:
        """Show why a request has no answer, and no figure."""
        self.headline.value = BIG_FIRST.format(headline, "")
        self.message.error(why)
        self.show()

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
        self._kept = self._figures if is_kept else ()
        self.pin.description = "Drop A" if is_kept else "Keep as A"
        kept = Markup("<div style='border-left:4px solid;padding-left:8px'><b>A, kept:</b> {}</div>")
        self.kept_headline.value = kept.format(Markup(self.headline.value)) if is_kept else Markup()
        self._switch()

    def _switch(self) -> None:
        try:
            self._draw()
        except Exception as error:  # nobody would see the error of a callback
            self.message.show_exception(error)

    def _draw(self) -> None:
        at = self.tabs.selected_index or 0
        if self._figures:
            self._boxes[at].show(self._figures[at]())
        self.kept_figure.layout.display = "" if self._kept else "none"
        if self._kept:
            kept = self._kept[at]()
            kept.update_layout(title_text=f"A, kept: {kept.layout.title.text or ''}")
            self.kept_figure.show(kept)

    def _work(self, request: Any) -> None:
        try:
            if isinstance(request, WorkbenchError):
                raise request
            self.message.clear()
            self._answer(request)
            self.keep(Markup().join(Markup(one.value) for one in (self.headline, *self._below)))
        except Exception as error:  # nobody would see the error of a thread
            self.headline.value = BIG_FIRST.format(self._refused, "") if self._refused else Markup()
            for one in self._below:
                one.value = Markup()
            self.show()
            self.message.show_exception(error)
