"""Import a library without another that it asks for, does not need here, and waits seconds for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden(name: str) -> Iterator[None]:
    """Let imports of a module raise ImportError meanwhile, unless it has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # so the import system is told that there is none
    try:
        yield
    finally:
        del sys.modules[name]
