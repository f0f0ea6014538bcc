"""Modules of the public Python interface, from their signatures and docstrings."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from generate.words import cell, entries_of, meanings, table


def module(name: str, *names: str) -> str:
    """Return a section for a module: these of its functions and classes, or all that it defines."""
    loaded = importlib.import_module(name)
    inside = [
        one
        for one, value in vars(loaded).items()
        if not one.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == name
    ]
    parts = [f"## {name}\n", _prose(loaded.__doc__)]
    for one in names or inside:
        parts += _entry(getattr(loaded, one), one)
    return "\n".join(parts)


def _entry(value: Any, name: str) -> Iterator[str]:
    yield f"### {name}\n"
    yield f"```python\n{_signature(value, name, is_block=True)}\n```\n"
    if not dataclasses.is_dataclass(value):
        lead, arguments = entries_of(value.__doc__, _parameters(value))
        # What a function raises stands last, behind its arguments.
        *others, last = arguments or [""]
        says, raises, errors = arguments.get(last, "").partition("Raises ")
        yield _prose(lead)
        yield from (f"- `{one}`: {cell(arguments[one])}" for one in others)
        yield f"- `{last}`: {cell(says)}\n\n{cell(raises + errors)}\n" if last else ""
    else:
        says = meanings(value)
        yield _prose((value.__doc__ or "").split("\n\n")[0]) if not says else ""
        rows = [(f"`{field.name}`", cell(says.get(field.name, ""))) for field in dataclasses.fields(value)]
        yield table(("field", "meaning"), rows)
    if inspect.isclass(value):
        for member, inner in vars(value).items():
            function = inner.__func__ if isinstance(inner, classmethod | staticmethod) else inner
            if not member.startswith("_") and inspect.isfunction(function) and function.__doc__:
                yield f"- `{_signature(function, member)}`: {cell(_prose(function.__doc__))}"
            elif not member.startswith("_") and isinstance(inner, property) and inner.__doc__:
                yield f"- `{member}`: {cell(_prose(inner.__doc__))}"
        yield ""


def _signature(value: Any, name: str, *, is_block: bool = False) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    parameters = [one for one in parameters if one.name not in ("self", "cls")]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    if is_block and len(name + shown) > 90:
        shown = textwrap.fill(shown, 86, initial_indent="", subsequent_indent="    ", break_on_hyphens=False)
    return f"{name}{shown}"


def _parameters(value: Any) -> list[str]:
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return []


def _prose(text: str | None) -> str:
    """Return a docstring as paragraphs."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(one.split()).replace("<", "\\<").replace("*", "\\*") for one in paragraphs) + "\n"
