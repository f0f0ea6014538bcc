"""Threads that do not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_background(work: Callable[..., Any], *args: Any, name: str | None = None) -> threading.Thread:
    """Start work(*args) in a daemon thread of this name."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    thread.start()
    return thread
