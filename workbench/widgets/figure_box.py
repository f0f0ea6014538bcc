"""A figure in a notebook that can be drawn again, as wide as its cell."""

from __future__ import annotations

from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import anywidget
import plotly
import plotly.graph_objects as go
import traitlets
from markupsafe import Markup

from workbench.plots.style import BREAK, CONFIG, only_our_tags
from workbench.widgets.controls import Html, Panel

TITLE_PIXELS, TOP_PIXELS, WIDTH_PIXELS, LEAST_PIXELS, BORDER_PIXELS = 100, 55, 1000, 500, 8  # sizes of a figure
HERE = Path(__file__)


class _PlotlyCode(anywidget.AnyWidget):
    """The code of plotly's widget, which is never shown.  A FigureWidget sends these 5 MB with each figure, and the
    browser reads them again each time.
    """

    code = traitlets.Unicode().tag(sync=True)
    version = traitlets.Unicode(plotly.__version__).tag(sync=True)
    _esm = HERE.with_name("plotly_code.js")


@cache
def _plotly_code() -> _PlotlyCode:
    """Return the code for all figures of this process."""
    return _PlotlyCode(code=str(go.FigureWidget._esm))


class _WholeFigure(go.FigureWidget):
    """A figure widget that opens its channel to the browser with all its data.

    FigureWidget opens an empty channel and sends the data later.  A browser that is still loading plotly loses them and
    shows bare axes.
    """

    _esm = HERE.with_suffix(".js").read_text(encoding="utf-8").replace("VERSION", plotly.__version__)
    _is_whole = False

    def open(self) -> None:
        """Open the channel once all data are present."""
        if self._is_whole:
            super().open()

    @classmethod
    def of(cls, figure: go.Figure) -> _WholeFigure:
        """Return the widget of a figure."""
        _plotly_code().open()  # again if all widgets were closed
        widget = cls(figure)
        widget._config = widget._config | CONFIG
        widget._is_whole = True
        widget.open()
        return widget


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
        """Return the width of the figure in pixels, which plotly's widget cannot measure."""
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
        ).format(*(Markup(only_our_tags(text or "").replace(BREAK, " ")) for text in (title.text, subtitle)))
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
            for trace, target in zip(self.shown.data, bare.data, strict=False):
                fields = {name: value for name, value in target.to_plotly_json().items() if name not in ("type", "uid")}
                removed = trace.to_plotly_json().keys() - fields.keys() - {"type", "uid"}
                trace.update(fields | dict.fromkeys(removed), overwrite=True)
        if len(bare.data) > same:
            self.shown.add_traces(bare.data[same:])
