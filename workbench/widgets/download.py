"""A button that saves a text, made when it is pressed, as a file of the reader's computer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets


class DownloadButton(anywidget.AnyWidget):
    """A button that saves a file; it works with a kernel on another computer, too.

    make: returns the file's name and text.
    """

    label = traitlets.Unicode().tag(sync=True)
    hint = traitlets.Unicode().tag(sync=True)
    _esm = Path(__file__).with_name("download.js")

    def __init__(self, label: str, hint: str, make: Callable[[], tuple[str, str]]) -> None:
        super().__init__(label=label, hint=hint)
        self._make = make
        self.on_msg(self._answer)

    def _answer(self, widget: Any, content: Any, buffers: Any) -> None:
        name, text = self._make()
        self.send({"name": name, "text": text})


def trace_button(make: Callable[[], tuple[str, str]]) -> DownloadButton:
    """Return the button that saves timelines.  make: returns the file's name and the JSON of a Chrome trace."""
    return DownloadButton("Save trace", "Save the timelines as a Chrome trace, for ui.perfetto.dev", make)
