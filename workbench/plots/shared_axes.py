"""Give figures the same ranges, so that they can be compared by eye."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from numbers import Real
from typing import Any

import plotly.graph_objects as go

ROOM = 0.05
"""Between the outermost value and the end of an axis, as a share of the axis."""

_SIZES = ({"µs": 1e-6, "ms": 1e-3, "s": 1.0}, {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9})
_UNIT = re.compile(r"(?:^|(?<=\())(?:µs|ms|s|B|kB|MB|GB)(?=\)|$)")

Range = tuple[float, float]


def share_axes(*figures: go.Figure) -> None:
    """Give finished figures the same ranges and units, axis by axis.

    Axes that do not count the same keep their own: those with other titles, and rows of names.
    """
    names = [{f"{letter}axis{_axis_of(trace, letter)[1:]}" for trace in one.data for letter in "xy"} for one in figures]
    for name in sorted(set.intersection(*names)):
        _share_unit(figures, name)
        axes = [figure.layout[name] for figure in figures]
        ranges = [_range(figure, name) for figure in figures]
        known = [one for one in ranges if one is not None]
        if len(known) == len(figures) and len({(axis.title.text, axis.type) for axis in axes}) == 1:
            for axis in axes:
                axis.range = [min(low for low, _ in known), max(high for _, high in known)]


def _share_unit(figures: Sequence[go.Figure], name: str) -> None:
    """Count an axis of all figures in the largest of their units, if only the units differ."""
    titles = [figure.layout[name].title.text or "" for figure in figures]
    found = [_UNIT.search(title) for title in titles]
    units = [match[0] for match in found if match]
    sizes = next((sizes for sizes in _SIZES if {*units} <= {*sizes}), {})
    if len(units) < len(figures) or not sizes or len({_UNIT.sub("", title) for title in titles}) > 1:
        return
    largest = max(units, key=sizes.__getitem__)
    for figure, unit in zip(figures, units, strict=True):
        if unit != largest:
            _scale(figure, name, sizes[unit] / sizes[largest])
            figure.layout[name].title.text = titles[units.index(largest)]


def _scale(figure: go.Figure, name: str, factor: float) -> None:
    axis, letter = figure.layout[name], name[0]
    for trace in figure.data:
        if f"{letter}axis{_axis_of(trace, letter)[1:]}" == name:
            for field in (letter, *(["base"] if trace.type == "bar" and _holds_values(trace, letter) else [])):
                if trace[field] is not None:
                    trace[field] = [value if value is None else value * factor for value in trace[field]]
    if axis.range is not None:
        axis.range = [end * factor for end in axis.range]


def _holds_values(trace: Any, letter: str) -> bool:
    """Return whether this is the axis along which bars are long."""
    return bool((letter == "x") == (trace.orientation == "h"))


def _axis_of(trace: Any, letter: str) -> str:
    return getattr(trace, f"{letter}axis", None) or letter


def _range(figure: go.Figure, name: str) -> Range | None:
    """Return the range that an axis has, or else the one that its values need; None for rows of names."""
    axis, letter = figure.layout[name], name[0]
    if axis.autorange == "reversed" or axis.ticktext is not None:
        return None
    if axis.range is not None:
        low, high = axis.range
        is_known = isinstance(low, Real) and isinstance(high, Real) and float(low) < float(high)
        return (float(low), float(high)) if is_known else None
    ends: list[float] = []
    stacked: dict[tuple[Any, bool], float] = defaultdict(float)
    for trace in figure.data:
        if f"{letter}axis{_axis_of(trace, letter)[1:]}" != name:
            continue
        values = [value for value in (() if trace[letter] is None else trace[letter]) if value is not None]
        if not all(isinstance(value, Real) for value in values):
            return None
        numbers = [float(value) for value in values if math.isfinite(value)]
        is_value = trace.type == "bar" and _holds_values(trace, letter)
        if is_value and figure.layout.barmode in ("stack", "relative"):
            for at, value in zip(trace["y" if letter == "x" else "x"], numbers, strict=False):
                stacked[at, value < 0] += value
        ends += [*numbers, 0.0] if is_value else numbers
    ends += stacked.values()
    if axis.rangemode == "tozero":
        ends.append(0.0)
    if axis.type == "log":
        ends = [math.log10(value) for value in ends if value > 0]
    if not ends:
        return None
    low, high = min(ends), max(ends)
    room = ROOM * (high - low or abs(high) or 1.0)
    return (low if low == 0 else low - room, high if high == 0 else high + room)
