"""Types, ranges and docstrings in words, for tables in Markdown."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text"}


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; columns that are empty in all rows are left out."""
    rows = [list(row) for row in rows]
    columns = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    lines = [[head[i] for i in columns], ["---"] * len(columns), *([row[i] for i in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def meanings(kind: type) -> dict[str, str]:
    """Return what the docstrings of a class and of its bases say of each field: 'name, other: text'."""
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        is_dataclass = hasattr(owner, "__dataclass_fields__")
        names = [field.name for field in fields(owner)] if is_dataclass else getattr(owner, "_fields", ())
        texts |= entries_of(owner.__doc__, names)[1]
    return texts


def entries_of(docstring: str | None, names: Iterable[str]) -> tuple[str, dict[str, str]]:
    """Return what stands before a docstring's first entry, and its entries, 'name, other: text', by name."""
    text = re.sub(r"\n\s*\n", ". ", docstring or "")
    text = re.sub(r"(?<!\.)\.\. ", ". ", " ".join(text.split()))
    either = "|".join(map(re.escape, names)) or "(?!)"
    entries = list(re.finditer(rf"(?:(?<=[.:] )|^)((?:{either})(?:, (?:{either}))*): ", text))
    texts: dict[str, str] = {}
    for entry, following in zip_longest(entries, entries[1:]):
        says = text[entry.end() : following.start() if following else None].strip()
        texts |= {name: says for name in entry[1].split(", ")}
    return text[: entries[0].start()].strip() if entries else text, texts


def described(hint: Any) -> tuple[str, list[Any]]:
    """Return the values of a type in words, and the declarations in its annotations, outermost first."""
    if get_origin(hint) is Annotated:
        words, inner = described(hint.__origin__)
        metas = [one for one in hint.__metadata__ if isinstance(one, Meta)]
        return words + "".join(map(_range, metas)), [*hint.__metadata__, *inner]
    if get_origin(hint) is Literal:
        return ", ".join(map(value, get_args(hint))), []
    if get_origin(hint) in (Union, types.UnionType):
        parts = [described(part) for part in get_args(hint) if part is not types.NoneType]
        none = ", none" if types.NoneType in get_args(hint) else ""
        return " or ".join(dict.fromkeys(words for words, _ in parts)) + none, [
            one for _, more in parts for one in more
        ]
    return KINDS.get(get_origin(hint) or hint, "by name"), []


def value(content: Any) -> str:
    """Return a value as it is written behind `--option NAME=`, as code."""
    text = "none" if content is None else str(content).lower() if isinstance(content, bool) else str(content)
    return f"`{text}`" if text else ""


def _range(meta: Meta) -> str:
    low = _number(meta.ge) if meta.ge is not None else f"above {_number(meta.gt)}" if meta.gt is not None else ""
    high = _number(meta.le) if meta.le is not None else f"below {_number(meta.lt)}" if meta.lt is not None else ""
    return f", {low} to {high}" if low and high else f", {low or high}" if low or high else ""


def _number(number: float) -> str:
    return f"{int(number):,}" if number == int(number) and number < 1e7 else f"{number:.0e}".replace("e+0", "e")
