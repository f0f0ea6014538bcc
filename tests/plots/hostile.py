"""A name that would run a script where it reaches HTML as it is, and ways to find it."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from typing import Any, TypeVar

from workbench.core.serial import from_json, to_json

NAME = "<img src=x onerror=alert(1)>"
T = TypeVar("T")


def renamed(value: T, *names: str) -> T:
    """Return a dataclass of the vocabulary with each of these words, wherever it is a whole string, made hostile and
    still distinct."""
    text = to_json(value, indent=-1)
    for number, name in enumerate(names):
        assert f'"{name}"' in text, name
        text = text.replace(f'"{name}"', f'"{NAME}{number or ""}"')
    return from_json(text, type(value))


DRAWN = "data:image/svg+xml;base64,"


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        source = dict(attrs).get("src") or ""
        if tag == "img" and source.startswith(DRAWN):  # a drawing of ours (plots.svg.as_images)
            assert {name for name, _ in attrs} <= {"src", "alt", "width", "height"}
            self.text += shown_by(base64.b64decode(source.removeprefix(DRAWN)).decode())
            return
        self.tags += [tag, *(name for name, _ in attrs)]

    def handle_data(self, data: str) -> None:
        self.text += data


def shown_by(html: str) -> str:
    """Return the text that HTML shows, having checked that no image and no handler came out of a name."""
    reader = _Reader()
    reader.feed(str(html))
    assert not {"img", "onerror", "script"} & {*reader.tags}, html
    return reader.text


def texts_of(figure: Any) -> str:
    """Return all texts of a figure as plotly shows them, having checked that plotly finds no tag in a name."""
    results: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, str):
            results.append(value)
        elif isinstance(value, dict):
            [*map(walk, value.values())]
        elif isinstance(value, list | tuple):
            [*map(walk, value)]

    walk(figure.to_plotly_json())
    assert not [text for text in results if "<img" in text]
    return "\n".join(results).replace("&lt;", "<")
