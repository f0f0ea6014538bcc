"""Draw a cluster's devices below their switch or shared air, each as a card with its link, speed and memory on scales.

The scales are the same for all devices, so that they compare by eye.  A page may put a knob on each of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.plots import style, svg

HEIGHT = 184
BAR = (4, 8)
"""The box of the switch or the air: top and height."""
NODE = (92, 86)
"""A device's frame: top and height."""
GAUGE = 6
LEAST_LINK, MORE_LINK = 1.5, 9.0
"""Width of the slowest link, and by how much the fastest one is wider."""


class Track(NamedTuple):
    """The place of a scale in a card, from its least to its highest value.  left, right: in per cent of the card's
    width.

    aside: added to both, in pixels.  begin_y, end_y: in pixels.
    """

    left: float
    right: float
    aside: float
    begin_y: float
    end_y: float


TRACKS = {
    "bandwidth": Track(50, 50, 0, 82, 24),
    "latency": Track(50, 50, 30, 82, 24),
    "speed": Track(10, 90, 0, 136, 136),
    "memory": Track(10, 90, 0, 166, 166),
}
"""The scales of a card.  Of a link, fast and late are both at the top."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """A value of a device.  what: a key of TRACKS.  label: its name for a screen reader.  text: the value with its
    unit.

    share: where it is on its scale, from 0 to 1.  before: where it was at first.
    stops: where it can be put, as (share, text), ascending.
    """

    what: str
    label: str
    text: str
    share: float
    before: float
    stops: tuple[tuple[float, str], ...] = ()


def share_of(value: float, positions: Sequence[float]) -> float:
    """Return where a value is on a scale whose positions (ascending, two or more) are equally far apart: 0 to 1."""
    last = len(positions) - 1
    if value <= positions[0]:
        return 0.0
    if value >= positions[-1]:
        return 1.0
    below = bisect_right(positions, value) - 1
    return (below + (value - positions[below]) / (positions[below + 1] - positions[below])) / last


def card(
    name: str, more: str, dials: Sequence[Dial], *, ticks: Sequence[float], hot: str = "", is_shared: bool = False
) -> str:
    """Return a device's card as SVG, as wide as its place.  more: what follows the speed, in words; '' for nothing.

    dials: one for each of TRACKS.  hot: its speed when hot, in words; '' if it keeps its speed.
    ticks: where the scale of the link's rate has marks, from 0 to 1.  is_shared: all links lead to one shared medium,
    which has their colour.
    """
    by_name = {dial.what: dial for dial in dials}
    speed, memory = by_name["speed"], by_name["memory"]
    top, height = NODE
    parts = [
        _link(by_name["bandwidth"], by_name["latency"], ticks),
        svg.box("0%", BAR[0], "100%", BAR[1], style.GREEN if is_shared else svg.themed(style.MID_GREY)),
        svg.box("4%", top, "92%", height, svg.PAPER, rx=6, stroke=svg.INK, stroke_width=1.25),
        svg.text("10%", top + 17, svg.shortened(name, 90 if hot else 150), size=12.5, font_weight="bold"),
        svg.text("90%", top + 17, hot, size=11, text_anchor="end"),
        svg.text("10%", top + 34, f"{speed.text}{f' ({more})' * bool(more)}", size=11),
        _gauge(speed, style.BLUE),
        svg.text("10%", top + 64, f"{memory.text} of memory", size=11),
        _gauge(memory, style.ORANGE),
    ]
    values = ", ".join(f"{dial.label.removeprefix(f'{name}: ')} {dial.text}" for dial in dials)
    label = f"{name}: {', '.join(filter(None, (values, hot)))}"
    return svg.drawing("".join(parts), label=label, height=HEIGHT)


def _link(rate: Dial, latency: Dial, ticks: Sequence[float]) -> str:
    """Return the link from the switch to the device, as wide as it is fast, and the scales of rate and latency."""
    width = LEAST_LINK + MORE_LINK * rate.share
    track, late = TRACKS["bandwidth"], TRACKS["latency"]
    parts = [svg.box(-width / 2, BAR[0], width, NODE[0] - BAR[0], style.GREEN)]
    parts += [svg.box(-11, _height(track, tick) - 0.5, 5, 1, svg.MUTED) for tick in ticks]
    if rate.before != rate.share:
        parts.append(svg.box(-13, _height(track, rate.before) - 1, 26, 2, svg.INK))
    end = _height(track, rate.share)
    parts.append(svg.text(-14, end + 4, rate.text, size=11, text_anchor="end", class_="workbench-halo"))
    dots = {"stroke_dasharray": "1 4", "stroke_linecap": "round", "stroke_width": 2}
    parts.append(svg.path([(late.aside, late.begin_y), (late.aside, late.end_y)], svg.MUTED, **dots))
    if latency.before != latency.share:
        parts.append(svg.box(late.aside - 7, _height(late, latency.before) - 1, 14, 2, svg.INK))
    end = _height(late, latency.share)
    parts.append(svg.text(late.aside + 12, end + 4, latency.text, size=11, class_="workbench-halo"))
    return svg.tag("svg", "".join(parts), x="50%", y=0, overflow="visible")


def _height(track: Track, share: float) -> float:
    return track.begin_y + (track.end_y - track.begin_y) * share


def _gauge(dial: Dial, colour: str) -> str:
    track = TRACKS[dial.what]
    width, top = track.right - track.left, track.begin_y - GAUGE / 2
    parts = svg.box(f"{track.left}%", top, f"{width}%", GAUGE, svg.TRACK)
    parts += svg.box(f"{track.left}%", top, f"{width * dial.share:.2f}%", GAUGE, colour)
    if dial.before != dial.share:
        parts += svg.box(f"{track.left + width * dial.before:.2f}%", top - 4, 2, GAUGE + 8, svg.INK)
    return parts
