"""How items.toml describes a figure of a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Rules = tuple[tuple[str, ...], ...]
"""Each rule is a value and its labels; '*' is any label, and omitted labels match any.  The first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure of a result; drawing.py documents each field.

    only: patterns of labels, whose cells are drawn in this order.  labels, line: templates of a cell's labels, such as
    '{1} tokens'.
    parts: columns of the result's first table, by name.  x_axis, y_axis: plotly's own settings.
    """

    name: str
    caption: str
    kind: Literal["bars", "lines", "stacked", "words"]
    title: str = "{title}"
    subtitle: str = ""
    unit: str = ""
    only: Rules = ()
    labels: tuple[str, ...] = ()
    facet: int | None = None
    parts: dict[str, int] = field(default_factory=dict)
    panel: str = ""
    line: str = ""
    x: tuple[int, ...] = ()
    paper: bool = False
    x_title: str = ""
    y_title: str = ""
    dashes: dict[str, str] = field(default_factory=dict)
    logarithmic: bool = False
    colour_up_to: str = ""
    x_axis: dict[str, Any] = field(default_factory=dict)
    y_axis: dict[str, Any] = field(default_factory=dict)


def matches(pattern: Sequence[str], labels: Sequence[str]) -> bool:
    """Return whether labels match a pattern (see Rules)."""
    return all(expected in ("*", label) for expected, label in zip(pattern, labels, strict=False))
