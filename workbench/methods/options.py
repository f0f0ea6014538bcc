"""Turn a job's options into a method's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.serial import shown

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_options(method: str, settings: type[T], given: Mapping[str, Any]) -> T:
    """Return a method's settings, a dataclass with defaults, from Job.options.  Raises ConfigError naming the wrong one."""
    kinds = get_type_hints(settings)
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"The option '{name}' of {method} was asked for.", f"Known: {', '.join(kinds)}.", did_you_mean(name, kinds))
        try:
            msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError:
            asked = f"The option {name} = {shown(repr(value) if isinstance(value, str) else value)} of {method} was asked for."
            raise ConfigError(asked, f"It must be {_wanted(kinds[name])}.", "Change it.") from None
    return msgspec.convert(dict(given), settings, strict=False)


def _wanted(kind: Any) -> str:
    """Return in words what a setting of a type may be: one of some names, a number, or (for an optional one) also nothing."""
    if kind in _WORDS:
        return _WORDS[kind]
    parts = [part for part in get_args(kind) if part is not type(None)]
    if all(isinstance(part, str) for part in parts):
        return f"one of {', '.join(parts)}"
    return f"{_wanted(parts[0])}, or left out"
