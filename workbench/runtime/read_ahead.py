"""Prepare the next batches in a thread while the current one trains, so that loading hides behind compute (PAC+, section V-B).

What hides is waiting for a disk, and copying where a core is free.  An emulated device has one slowed core and its own pace: there
nothing is read ahead (depth 0), and a LOAD takes as long as it was profiled to take.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls load(0), load(1), ... up to `depth` steps ahead of `take`; use it as a context manager.

    depth: prepared results that may wait; 0 loads when asked, without a thread.  Result s may use the buffer of result
    s - num_buffers again: whoever takes a result is done with the one before.
    """

    def __init__(self, load: Callable[[int], T], count: int, *, depth: int = 2) -> None:
        self._load, self._count, self._depth = load, count, depth
        self._next = 0
        self._ready: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True) if depth > 0 and count > 0 else None

    @property
    def num_buffers(self) -> int:
        """Return how many results are alive at most: those that wait, and the one that was taken."""
        return self._depth + 1

    def __enter__(self) -> ReadAhead[T]:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._room.release()
        if self._thread is not None:
            self._thread.join()

    def take(self) -> T:
        """Return the next result; wait for it if it is not ready.  Raises what `load` raised for it."""
        if self._next >= self._count:
            raise IndexError(f"all {self._count} results were taken")
        self._next += 1
        if self._thread is None:
            return self._load(self._next - 1)
        self._room.release()
        result, error = self._ready.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def _run(self) -> None:
        for step in range(self._count):
            self._room.acquire()
            if self._stop.is_set():
                return
            try:
                self._ready.put((self._load(step), None))
            except BaseException as error:
                self._ready.put((None, error))
                return
