"""Numbers in words for people: three figures, counts, bytes and durations with their unit; columns of numbers; the
beginning of a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"[+\-−]?[\d,]+(\.\d+)?(e[+-]\d+)?( ± [\d.,]+)?( ?%)?( \(!\))?|-?")
"""With its spread and the mark of an invalid run; or nothing, or '-' for nothing."""


def are_numbers(cells: Iterable[str]) -> bool:
    """Return whether a table's column holds numbers, which stand flush right."""
    column = list(cells)
    return any(column) and all(map(_NUMBER.fullmatch, column))


def with_capital(words: str) -> str:
    """Return words as the beginning of a sentence; a symbol ('r = 8') stays as it is."""
    return words if words[1:4] == " = " else words[:1].upper() + words[1:]


def counted(number: int, noun: str) -> str:
    """Return a number of things: '1 run', '0 runs'."""
    return f"{number} {noun}{'s' * (number != 1)}"


def three_figures(number: float) -> str:
    """Return a number with three figures and without a power of ten: '1,320', '12.3', '0.0123'."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def tenths(number: float) -> str:
    """Return a number with one decimal place, and one below 1 with three figures: '34.3', '0.0242'."""
    return f"{number:.1f}" if abs(number) >= 1 else f"{number:.3g}"


def size_words(nbytes: float) -> str:
    """Return a number of bytes with its unit: 1.4 GB, 350 MB, 12.0 kB (powers of 1000)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}" if nbytes < 100 * size else f"{nbytes / size:.0f} {unit}"
    return f"{nbytes:.0f} bytes"


def duration_words(seconds: float) -> str:
    """Return a duration in whole units, from two of a unit on in that unit: 90 s, 5 min, 3 h, 12 days."""
    for unit, size, larger in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 24)):
        if seconds < 2 * larger * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
