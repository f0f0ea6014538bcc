"""Read and write the vocabulary's dataclasses as JSON and TOML (by msgspec)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from workbench.core.errors import ConfigError
from workbench.core.files import whole_file

T = TypeVar("T")


def to_json(value: Any, *, indent: int = 1) -> str:
    """Return a dataclass of the vocabulary as JSON text; NamedTuples become arrays."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def to_builtins(value: Any) -> Any:
    """Return a dataclass as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value)


def from_json(text: str | bytes, kind: type[T], *, source: str = "JSON text") -> T:
    """Return a `kind` from JSON text.  Raises ConfigError naming `source` and the faulty field."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise _malformed(kind, source, error) from error


def from_builtins(value: Any, kind: type[T], *, source: str) -> T:
    """Return a `kind` from dicts and lists.  Raises ConfigError naming `source` and the faulty field."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise _malformed(kind, source, error) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return a TOML file's tables.  Raises ConfigError if it is missing or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"Asked to read '{path}'.", "There is no such file.", "Check the path.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"Asked to read '{path}' as TOML.", f"It is malformed: {error}.", "Mend that line.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all (see whole_file).  Raises WriteError."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def _malformed(kind: type, source: str, error: Exception) -> ConfigError:
    # A dataclass's own ConfigError from __post_init__ comes wrapped: its sentences are better than ours.
    cause = error.__cause__
    if isinstance(cause, ConfigError):
        return ConfigError(f"In {source}: {cause.asked}", cause.found, cause.todo)
    return ConfigError(f"Asked to read {source} as a {kind.__name__}.", f"{error}.", "Mend that field.")
