"""Report the seconds of a device's operations while it serves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.core.heat import Heat
from workbench.core.schedule import Op
from workbench.runtime.pacing import Paced, Pacer


class ReportingPacer(Pacer):
    """A pacer that adds up the seconds of every operation by block, and sends the sums after each period and on
    request.

    Operations arrive from the executor as partial(handler, operation, contents).  Delays of a busy host are excluded,
    because the emulated device does not cause them.
    """

    def __init__(
        self,
        factor: float,
        *,
        every_s: float,
        tell: Callable[[dict[int, float]], None],
        dilation: float = 1.0,
        heat: Heat | None = None,
        **time: Any,
    ) -> None:
        """time: provides clock and sleep (see Pacer)."""
        super().__init__(factor, dilation=dilation, heat=heat, **time)
        self._every_s, self._tell = every_s * dilation, tell
        self._blocks: dict[int, float] = {}
        self._told_s = self._clock()

    def noted(self, function: Callable[[], Any], paced: Paced[Any]) -> Paced[Any]:
        """Add the seconds of an operation to its block's (see Pacer)."""
        if isinstance(function, partial) and function.args and isinstance(function.args[0], Op):
            block = function.args[0].stage
            seconds = (paced.end_s - paced.start_s - paced.late_s) / self._dilation
            self._blocks[block] = self._blocks.get(block, 0.0) + seconds
            if paced.end_s - self._told_s > self._every_s:
                self.tell(before=block - 1)  # tiles of neighbouring blocks overlap: the blocks before are complete
        return paced

    def tell(self, before: int | None = None) -> None:
        """Send the sums since the last call.  before: only blocks before this one; None: all."""
        ready = {block: seconds for block, seconds in self._blocks.items() if before is None or block < before}
        if ready:
            self._blocks = {block: seconds for block, seconds in self._blocks.items() if block not in ready}
            self._told_s = self._clock()
            self._tell(ready)

    def forget(self) -> None:
        """Discard the sums of a failed request."""
        self._blocks = {}
