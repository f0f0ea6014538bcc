"""The shapes of all schematics: a card, blocks, arrows, devices, lanes and a legend, with one meaning for each colour.

Lengths are pixels of a card that is 800 wide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from workbench.core.schedule import Op
from workbench.core.timeline import Timeline
from workbench.plots import style, svg

WIDTH, MARGIN = 800, 28
SIZE = 13
"""Size of the text, in pixels."""

FORWARD, BACKWARD = style.COLOURS["forward"], style.COLOURS["backward"]
MESSAGE, COLLECTIVE = style.COLOURS["send"], svg.themed(style.COLOURS["collective"])
FROZEN, TRAINED = svg.themed(style.MID_GREY), style.COLOURS["optimizer"]
OLDER = "var(--workbench-older)"
"""Colour of older versions of trained weights."""
ACTIVATION, CACHE = style.SKY_BLUE, style.COLOURS["load from cache"]

RIM: dict[str, Any] = {"stroke": FROZEN, "stroke_width": 1.25}
DASHED_RIM: dict[str, Any] = RIM | {"stroke_dasharray": "5 4"}
"""The line around absent or idle devices."""

Pictures = Mapping[str, Callable[[], str]]
Point = tuple[float, float]
Entry = tuple[str, str, str]
"""An entry of a legend: BOX, ARROW or DASHED, colour, words."""

LIGHT = {"ground": "#f7f7f5", "older": "#e4c3d5"}
"""The variables that only pictures have; the others have their light colours by default (see plots.svg)."""
DARK = svg.DARK | {"paper": "#2b2b2d", "ground": "#1d1d1f", "older": "#5f4152"}


def _sheet() -> str:
    light = f".picture{{{svg.variables(LIGHT)}font-family:Helvetica,Arial,sans-serif}}"
    return light + style.DARK_PAGE(f".picture{{{svg.variables(DARK)}}}")


def card(title: str, description: str, *parts: str, height: float, entries: Sequence[Entry] = ()) -> str:
    """Return a whole picture on a ground, readable on a light and on a dark page.

    title, description: words for those who cannot see it.  entries: the legend's, at the bottom.
    """
    ground = svg.box(0.5, 0.5, WIDTH - 1, height - 1, "var(--workbench-ground)", rx=10, stroke=svg.TRACK)
    words = svg.tag("title", svg.escape(title), id="title") + svg.tag("desc", svg.escape(description), id="desc")
    foot = [legend(height - 22, *entries)] if entries else []
    return (
        svg.tag(
            "svg",
            "\n".join([words, svg.tag("style", _sheet()), ground, *parts, *foot, ""]),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {height:g}",
            width=WIDTH,
            height=height,
            class_="picture",
            role="img",
            aria_labelledby="title desc",
            # What most texts have.
            fill=svg.INK,
            font_size=SIZE,
            text_anchor="middle",
        )
        + "\n"
    )


_SCRIPT = re.compile(r"([_^])(\{[^}]*\}|.)")


def words(
    x: float, y: float, line: str, *, size: float = SIZE, anchor: str = "", colour: str = "", **more: object
) -> str:
    """Return a line of text, centred at x unless `anchor` says otherwise.  In it `_x` and `_{xy}` are lowered, `^x` is
    raised.
    """
    shown, down, place = "", 0.0, 0
    for script in _SCRIPT.finditer(line):
        shown += _run(line[place : script.start()], 0.0, -down)
        down = size * (0.25 if script[1] == "_" else -0.4)
        shown += _run(script[2].strip("{}"), size * 0.72, down)
        place = script.end()
    shown += _run(line[place:], 0.0, -down)
    attributes = {"font_size": None if size == SIZE else size, "fill": colour or None, "text_anchor": anchor or None}
    return svg.tag("text", shown, x=float(x), y=float(y), **attributes, **more)


muted = partial(words, size=12, colour=svg.MUTED)
"""Return a line in small, lighter type."""


def _run(part: str, size: float, down: float) -> str:
    """Return a part of a line.  size: 0 for the line's.  down: how far below the part before it."""
    if not part or not down:
        return svg.escape(part)
    return svg.tag("tspan", svg.escape(part), dy=down, font_size=size or None)


def _ink_on(fill: str) -> str:
    """Return the colour of text on a colour, '' for the ink of the page."""
    return style.text_on(fill) if fill.startswith("#") else ""


def _lines(x: float, middle: float, lines: str, colour: str, size: float = SIZE) -> str:
    """Return centred lines, separated by line breaks, around a height."""
    shown = lines.split("\n") if lines else []
    top = middle - (len(shown) - 1) * size * 0.62 + size * 0.35
    return "".join(
        words(x, top + number * size * 1.24, line, size=size, colour=colour) for number, line in enumerate(shown)
    )


def heading(x: float, y: float, line: str, rest: str = "") -> str:
    """Return the heading of a part of a picture, and on the same line what it says, in lighter type."""
    more = svg.tag("tspan", svg.escape(rest), font_weight="normal", fill=svg.MUTED, dx=10.0) if rest else ""
    return svg.tag("text", svg.escape(line) + more, x=x, y=y, font_size=14.5, font_weight="bold", text_anchor="start")


def block(x: float, y: float, width: float, height: float, lines: str, fill: str, *, size: float = SIZE) -> str:
    """Return a rounded box with centred text.  lines: separated by line breaks."""
    return svg.box(float(x), y, float(width), height, fill, rx=3) + _lines(
        x + width / 2, y + height / 2, lines, _ink_on(fill), size
    )


def frame(x: float, y: float, width: float, height: float, name: str, note: str = "", *, dashed: bool = False) -> str:
    """Return a device, or another thing that holds others: a box with its name in the corner, and a note opposite."""
    drawn = svg.box(x, y, width, height, svg.PAPER, rx=9, **(DASHED_RIM if dashed else RIM))
    drawn += words(x + 12, y + 20, name, anchor="start", font_weight="bold")
    return drawn + (muted(x + width - 12, y + 20, note, anchor="end") if note else "")


def arrow(colour: str, *points: Point, dashed: bool = False) -> str:
    """Return an arrow through some points."""
    dashes = "5 4" if dashed else None
    return svg.arrow(points, colour, head=8, stroke_width=2, stroke_dasharray=dashes, stroke_linejoin="round")


def drum(x: float, y: float, width: float, height: float, lines: str) -> str:
    """Return a cylinder, which stands for storage."""
    tilt = min(7.0, height / 5)
    body = (
        f"M{x:g} {y + tilt:g}V{y + height - tilt:g}A{width / 2:g} {tilt:g} 0 0 0 {x + width:g} {y + height - tilt:g}"
        f"V{y + tilt:g}A{width / 2:g} {tilt:g} 0 0 0 {x:g} {y + tilt:g}Z"
    )
    middle = x + width / 2
    lid = svg.tag("ellipse", cx=middle, cy=y + tilt, rx=width / 2, ry=tilt, fill="#ffffff", fill_opacity=0.4)
    return svg.tag("path", d=body, fill=CACHE) + lid + _lines(middle, y + tilt + height / 2, lines, _ink_on(CACHE))


def matrix(x: float, y: float, width: float, height: float, count: int, part: range, fill: str, *, rows: bool) -> str:
    """Return a matrix in `count` strips, rows or else columns, of which `own` are filled."""
    step = (height if rows else width) / count
    strips = (
        svg.box(x, y + number * step, width, step - 1.5, fill if number in part else svg.TRACK, rx=1)
        if rows
        else svg.box(x + number * step, y, step - 1.5, height, fill if number in part else svg.TRACK, rx=1)
        for number in range(count)
    )
    return "".join(strips)


BOX, ARROW, DASHED = "box", "arrow", "dashed"


def legend(y: float, *entries: Entry) -> str:
    """Return what the colours mean, in one centred row."""
    mark = 29.0
    widths = [mark + len(text) * 6.4 for _, _, text in entries]
    gap = min(22.0, (WIDTH - 2 * MARGIN - sum(widths)) / max(1, len(entries) - 1))
    x = (WIDTH - sum(widths) - gap * (len(entries) - 1)) / 2
    parts = []
    for (kind, colour, text), width in zip(entries, widths, strict=True):
        if kind == BOX:
            parts.append(svg.box(x + 8, y - 10, 14, 12, colour, rx=2.5))
        else:
            parts.append(arrow(colour, (x, y - 4), (x + 22, y - 4), dashed=kind == DASHED))
        parts.append(muted(x + mark, y, text, anchor="start"))
        x += width + gap
    return "".join(parts)


def lanes(
    timeline: Timeline,
    x: float,
    y: float,
    width: float,
    *,
    names: Sequence[str],
    label: Callable[[Op], str] = style.number_of,
    whole_s: float = 0.0,
    height: float = 24,
    gap: float = 8,
    network: bool = False,
) -> str:
    """Return the lanes of a timeline: what each device computes, and, with `network`, what it sends below that.

    names: names of the lanes, left of x.  label: returns an operation's text, which may have two lines.  whole_s: the
    seconds that `width` stands for; 0: the timeline's.
    """
    scale = width / (whole_s or timeline.makespan_s)
    pitch = height + gap + (7 if network else 0)
    parts = [words(x - 12, y + rank * pitch + height / 2 + 4.5, name, anchor="end") for rank, name in enumerate(names)]
    parts += [
        svg.box(x, y + rank * pitch, timeline.makespan_s * scale, height, svg.TRACK, rx=2) for rank in range(len(names))
    ]
    for span in timeline.spans:
        if span.end_s == span.start_s:
            continue
        left = x + span.start_s * scale + 0.75
        wide = max(0.5, (span.end_s - span.start_s) * scale - 1.5)  # neighbours stand apart; a short one is still seen
        fill, top = style.COLOURS[style.class_of(span.op)], y + span.rank * pitch
        if not span.op.is_communication:
            parts.append(block(left, top, wide, height, label(span.op), fill, size=12))
        elif network and style.class_of(span.op) == "send":
            parts.append(svg.box(left, top + height + 2, wide, 5, fill, rx=1.5))
    return "".join(parts)
