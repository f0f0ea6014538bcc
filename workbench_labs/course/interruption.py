"""An endless loop in a notebook ends: what runs longer than a limit is interrupted."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

SECONDS = 30.0
"""Time limit for one answer, as for the teacher (see isolation)."""


class InterruptedAnswerError(BaseException):
    """An answer takes too long.  No `except Exception` of the answer catches it."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt what runs longer.  Raises InterruptedAnswerError.

    Only in the main thread, and where the system has timers: elsewhere it runs on.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise InterruptedAnswerError(f"It takes more than {seconds:g} s. Does a loop never end?")

    began_s = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left_s:  # somebody else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left_s - (time.monotonic() - began_s)))
