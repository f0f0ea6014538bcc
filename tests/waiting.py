"""How tests wait: for a condition, with a limit that only what hangs reaches, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 240.0
"""Below the time limit of a whole test (timeout in pyproject.toml), so that a test which hangs says what it waited
for."""

T = TypeVar("T")


def wait_for(found: Callable[[], T], what: str, *, limit_s: float = LIMIT_S) -> T:
    """Return the first result of `found` that is true.  what: is named by the AssertionError if there is none."""
    end_s = time.monotonic() + limit_s
    while not (result := found()):
        assert time.monotonic() < end_s, f"{what}: not within {limit_s:g} s"
        time.sleep(0.02)
    return result
