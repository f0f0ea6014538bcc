"""Texts with half a character, such as half an emoji, which no tokenizer can read: U+FFFD takes its place."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

HALF_CHARACTER = re.compile(r"[\ud800-\udfff]")
HALF = "\ufffd"


def whole_characters(value: Any) -> Any:
    """Return a value with U+FFFD for each half of a character, which no tokenizer can read."""
    if isinstance(value, str):
        return HALF_CHARACTER.sub(HALF, value)
    if isinstance(value, list):
        return [whole_characters(entry) for entry in value]
    return {name: whole_characters(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def notes_on_broken(columns: Iterable[list[Any]]) -> tuple[str, ...]:
    """Return the note on rows with characters that whole_characters replaced."""
    rows = sorted(
        {row for values in columns for row, value in enumerate(values, 1) if isinstance(value, str) and HALF in value}
    )
    if not rows:
        return ()
    return (
        f"{len(rows)} rows hold broken characters, such as half an emoji, shown as U+FFFD; the first is row {rows[0]}.",
    )
