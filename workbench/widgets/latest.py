"""Work on the newest request only, in the background: what a slider that is dragged asks for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Latest(Generic[Request]):
    """Does `work` with the newest request in a thread of its own; requests that came while it was busy are dropped but for the last.

    work: must not raise; it shows its own errors.
    """

    def __init__(self, work: Callable[[Request], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._waiting: list[Request] = []  # none or one
        self._thread: threading.Thread | None = None
        self._busy = False

    def ask(self, request: Request) -> None:
        """Ask for work on `request`, in place of any that still waits."""
        with self._lock:
            self._waiting = [request]
            if not self._busy:
                self._busy = True
                self._thread = threading.Thread(target=self._run, name="workbench-latest", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is left to do."""
        while (thread := self._thread) is not None and thread.is_alive():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._busy = False
                    return
                request = self._waiting.pop()
            self._work(request)
