"""Turn a job's options into a method's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from workbench.core.errors import ConfigError, did_you_mean

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
            choices = get_args(kinds[name])
            wanted = f"one of {', '.join(map(str, choices))}" if choices else _WORDS[kinds[name]]
            raise ConfigError(f"The option {name} = {value!r} of {method} was asked for.", f"It must be {wanted}.", "Change it.") from None
    return msgspec.convert(dict(given), settings, strict=False)
