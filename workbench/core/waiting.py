"""Waits of the main thread that Ctrl-C and SIGTERM always end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NoReturn, TypeVar

T = TypeVar("T")
# Python calls a signal's handler between two instructions of the main thread.  A signal that arrives just before the
# thread begins a wait without end would be noticed only after it, so the thread wakes up so often.
_WAKE_S = 0.5


def as_finished(futures: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures as they finish."""
    unfinished = set(futures)
    while unfinished:
        finished, unfinished = wait(unfinished, _WAKE_S, FIRST_COMPLETED)
        yield from finished


def wait_for_interrupt() -> NoReturn:
    """Wait until Ctrl-C or SIGTERM raises an error."""
    while True:
        time.sleep(_WAKE_S)
