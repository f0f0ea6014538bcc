"""A clock for tests."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """A clock that tests, and calls of known length, move forward.  order: the names of the calls so far."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s, self.order = now_s, list[object]()

    def __call__(self) -> float:
        return self.now_s

    def call(self, name: object, seconds: float | Callable[[], float]) -> Callable[..., None]:
        """Return a call that takes so many seconds."""

        def run(*_: object) -> None:
            self.order.append(name)
            self.now_s += seconds() if callable(seconds) else seconds

        return run
