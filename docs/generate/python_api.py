"""Modules of the public Python interface, from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from generate.words import cell, meanings, table


def module(name: str, *names: str) -> str:
    """Return a section for a module: these of its functions and classes, or all that it defines."""
    loaded = importlib.import_module(name)
    inside = [
        one
        for one, found in vars(loaded).items()
        if not one.startswith("_")
        and (inspect.isfunction(found) or inspect.isclass(found))
        and found.__module__ == name
    ]
    parts = [f"## {name}\n", _prose(loaded.__doc__)]
    for one in names or inside:
        parts += _entry(getattr(loaded, one), one)
    return "\n".join(parts)


def _entry(found: Any, name: str) -> Iterator[str]:
    yield f"### {name}\n"
    yield f"```python\n{_signature(found, name)}\n```\n"
    if not dataclasses.is_dataclass(found):
        yield _prose(found.__doc__)
    else:
        says = meanings(found)
        yield _prose((found.__doc__ or "").split("\n\n")[0]) if not says else ""
        rows = [(f"`{field.name}`", cell(says.get(field.name, ""))) for field in dataclasses.fields(found)]
        yield table(("field", "meaning"), rows)
    if inspect.isclass(found):
        for member, inner in vars(found).items():
            function = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
            if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield f"- `{_signature(function, member)}`: {cell(_prose(function.__doc__))}"
            elif not member.startswith("_") and isinstance(inner, property) and inner.__doc__:
                yield f"- `{member}`: {cell(_prose(inner.__doc__))}"
        yield ""


def _signature(found: Any, name: str) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return name
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    shown = signature.replace(
        parameters=[one for one in parameters if one.name not in ("self", "cls")],
        return_annotation=inspect.Signature.empty,
    )
    return f"{name}{shown}"


def _prose(text: str | None) -> str:
    """Return a docstring as paragraphs."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(one.split()).replace("<", "\\<").replace("*", "\\*") for one in paragraphs) + "\n"
