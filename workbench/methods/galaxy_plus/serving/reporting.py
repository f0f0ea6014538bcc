"""Report a device's execution latency block by block while it computes (Galaxy+, section III-E1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.core.schedule import Op
from workbench.runtime.pacing import Paced, Pacer


class ReportingPacer(Pacer):
    """A pacer that adds up the seconds of every operation by block, and tells them once a period has passed and when asked to.

    Operations come as the executor hands them over: partial(handler, operation, contents).  By what a busy host was late is not an
    emulated device's doing, and is left out.
    """

    def __init__(
        self,
        factor: float,
        *,
        every_s: float,
        tell: Callable[[dict[int, float]], None],
        dilation: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(factor, dilation=dilation, clock=clock, sleep=sleep)
        self._every_s, self._tell = every_s * dilation, tell
        self._blocks: dict[int, float] = {}
        self._told_s = clock()

    def run(self, function: Callable[[], Any], duration_s: float, begin_s: float | None = None) -> Paced[Any]:
        """See Pacer.run."""
        done = super().run(function, duration_s, begin_s)
        if isinstance(function, partial) and function.args and isinstance(function.args[0], Op):
            block = function.args[0].stage
            seconds = (done.end_s - done.start_s - done.late_s) / self._dilation
            self._blocks[block] = self._blocks.get(block, 0.0) + seconds
            if done.end_s - self._told_s > self._every_s:
                self.tell(before=block - 1)  # tiles of neighbouring blocks overlap: those before are whole
        return done

    def tell(self, before: int | None = None) -> None:
        """Tell what has been added up since the last time.  before: of the blocks before this one; None: of all."""
        ready = {block: seconds for block, seconds in self._blocks.items() if before is None or block < before}
        if ready:
            self._blocks = {block: seconds for block, seconds in self._blocks.items() if block not in ready}
            self._told_s = self._clock()
            self._tell(ready)

    def forget(self) -> None:
        """Forget what a request that failed has left."""
        self._blocks = {}
