"""The constants of a paper, in a file that states the source of each value."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from workbench.core.serial import from_builtins, read_toml

T = TypeVar("T")


def constants_of(path: Path, kind: type[T], section: str = "") -> T:
    """Return the constants of a paper's constants.toml, which states the source of each value: of one section, or of
    all.
    """
    tables = read_toml(path)
    chosen = tables[section] if section else {name: value for table in tables.values() for name, value in table.items()}
    return from_builtins(chosen, kind, source=f"'{path}'")
