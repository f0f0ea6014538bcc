"""Turn a job's options into a method's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from workbench.core.errors import ConfigError, did_you_mean
from workbench.core.ranges import range_of, require_range
from workbench.core.serial import shown

T = TypeVar("T")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def read_options(method: str, settings: type[T], given: Mapping[str, Any]) -> T:
    """Return a method's settings, a dataclass with defaults, from Job.options.  Raises ConfigError that names the wrong option."""
    kinds = get_type_hints(settings)
    stated = get_type_hints(settings, include_extras=True)
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"The option '{name}' of {method} was asked for.", f"Known: {', '.join(kinds)}.", did_you_mean(name, kinds))
        try:
            msgspec.convert(value, kinds[name], strict=False)
        except msgspec.ValidationError:
            asked = f"The option {name} = {shown(repr(value) if isinstance(value, str) else value)} of {method} was asked for."
            raise ConfigError(asked, f"It must be {_wanted(kinds[name])}.", "Change it.") from None
        try:
            msgspec.convert(value, stated[name], strict=False)
        except msgspec.ValidationError:
            require_range(msgspec.convert(value, kinds[name], strict=False), range_of(settings, name), f"An option of {method}", name)
            raise  # msgspec refuses a range that ours accepts
    return msgspec.convert(dict(given), settings, strict=False)


def require_width(method: str, name: str, value: int, model: str, most: int) -> None:
    """Raise ConfigError if a rank or width is too large for a model, before memory is allocated for it."""
    if value > most:
        raise ConfigError(
            f"The option {name} = {value:,} of {method} was asked for.", f"For '{model}' it is at most {most:,}.", f"Lower {name}."
        )


def _wanted(kind: Any) -> str:
    """Describe in words the values that a type allows: one of some names, a number, or (if optional) also nothing."""
    if kind in _WORDS:
        return _WORDS[kind]
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, parts))}"
    return f"{_wanted(parts[0])}, or left out"
