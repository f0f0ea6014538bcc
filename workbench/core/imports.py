"""Import a library without an optional dependency that takes seconds to load and is not needed here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Make imports of a module raise ImportError inside the block, unless it has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # so the import system is told that there is none
    try:
        yield
    finally:
        del sys.modules[name]
