"""Write SVG as text: drawings that a panel changes many times a second, and that stay in a notebook without a kernel.

Colours of text and ground are variables of the page's style sheet, so that a drawing follows its theme; a page without
them shows the defaults.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape

from workbench.plots import style

INK, MUTED, PAPER = (
    "var(--workbench-ink, #1F1F1F)",
    "var(--workbench-muted, #595959)",
    "var(--workbench-paper, #FFFFFF)",
)
TRACK = f"var(--workbench-track, {style.LIGHT_GREY})"
"""The ground of a bar, and whatever is idle."""
ALERT = "var(--workbench-alert, #B00020)"
_THEMED = {
    style.DARK_GREY: f"var(--workbench-dark-grey, {style.DARK_GREY})",
    style.MID_GREY: f"var(--workbench-mid-grey, {style.MID_GREY})",
    style.LIGHT_GREY: TRACK,
    style.BLACK: INK,
}
DARK = {
    "ink": "#E6E6E6",
    "muted": "#B5B5B5",
    "paper": "#1E1E1E",
    "track": "#3A3A3A",
    "mid-grey": "#6E6E6E",
    "dark-grey": "#C4C4C4",
    "alert": "#FF8A80",
}
"""The variables of the page's style sheet on a dark page.  widgets/live.css and server/page.html have the same, by a
test."""
CHARACTER = 0.53
"""Mean width of a character relative to the size of its type."""


def variables(colours: Mapping[str, str]) -> str:
    """Return the declarations of variables in a style sheet, from such as DARK."""
    return "".join(f"--workbench-{name}:{colour};" for name, colour in colours.items())


def themed(colour: str) -> str:
    """Return a colour of the palette as it is on the page's ground: greys are lighter on a dark one."""
    return _THEMED.get(colour, colour)


def tag(name: str, content: str = "", /, **attributes: object) -> str:
    """Return an element.  content: markup.  attributes: escaped; '_' stands for '-', and None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>"


def text(x: object, y: float, words: str, *, size: float = 12, colour: str = INK, **attributes: object) -> str:
    """Return a line of text, escaped."""
    return tag("text", escape(words), x=x, y=y, font_size=size, fill=colour, **attributes)


def box(
    x: object, y: float, width: object, height: float, colour: str, *, title: str = "", **attributes: object
) -> str:
    """Return a rectangle.  title: shown under the pointer."""
    content = tag("title", escape(title)) if title else ""
    return tag("rect", content, x=x, y=y, width=width, height=height, fill=colour, **attributes)


def path(points: Iterable[tuple[float, float]], colour: str, **attributes: object) -> str:
    """Return a line through some points."""
    way = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return tag("path", d=way, fill="none", stroke=colour, **attributes)


def arrow(points: Sequence[tuple[float, float]], colour: str, *, head: float = 7, **attributes: object) -> str:
    """Return a line through some points with a head at its end.  head: its length."""
    (before_x, before_y), (x, y) = points[-2:]
    turn = math.degrees(math.atan2(y - before_y, x - before_x))
    drawn = tag(
        "path",
        d=f"M0 0L{-head:g} {-head / 2:g}L{-head:g} {head / 2:g}Z",
        fill=colour,
        transform=f"translate({x:.1f} {y:.1f}) rotate({turn:.1f})",
    )
    return path(points, colour, **attributes) + drawn


def drawing(content: str, *, label: str, height: float, width: float | None = None) -> str:
    """Return a whole drawing, for screen readers one picture.  width: how wide its coordinates are before it is scaled;
    None: it is as wide as its place, and horizontal positions are per cent.
    """
    how = {"xmlns": "http://www.w3.org/2000/svg", "role": "img"}
    if width is None:
        return tag("svg", content, width="100%", height=height, aria_label=label, **how)
    return tag("svg", content, viewBox=f"0 0 {width:g} {height:g}", aria_label=label, **how)


def swatch(colour: str) -> str:
    """Return a small coloured square for a legend, as a drawing, so that it shows wherever drawings do."""
    square = box(0, 0, 10, 10, themed(colour))
    return tag("svg", square, xmlns="http://www.w3.org/2000/svg", aria_hidden="true", width=10, height=10)


_DRAWING = re.compile(r"<svg(?P<attributes>[^>]*)>(?P<content>.*?)</svg>", re.DOTALL)


def as_images(page: str) -> str:
    """Return HTML in which each drawing is an image.

    A notebook that its reader does not trust, such as one that a batch has run, shows images; of a drawing in its page
    it leaves the words alone.  An image follows a dark page by itself.
    """
    dark = style.DARK_PAGE(f"svg{{{variables(DARK)}}}")
    rules = f"svg{{font-family:Helvetica,Arial,sans-serif}}{dark}"
    sheet = tag("style", rules)

    def image(drawing: re.Match[str]) -> str:
        attributes = drawing["attributes"]
        words, width, height = (
            re.search(rf'{name}="([^"]*)"', attributes) for name in ("aria-label", "[^-]width", "[^-]height")
        )
        written = f"<svg{attributes}>{sheet}{drawing['content']}</svg>"
        source = "data:image/svg+xml;base64," + base64.b64encode(written.encode()).decode()
        label = unescape(words[1]) if words else ""
        wide, high = width[1] if width else "100%", height[1] if height else None
        return tag("img", src=source, alt=label, width=wide, height=high).removesuffix("</img>")

    return _DRAWING.sub(image, page)


def shortened(words: str, width: float, size: float = 12) -> str:
    """Return words that fit into a width, cut with an ellipsis if they are longer."""
    most = max(2, int(width / (CHARACTER * size)))
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers from low to high."""
    if not high > low:
        return [low]
    step = round_step((high - low) / count)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten: the smallest that is not below a rough distance."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
