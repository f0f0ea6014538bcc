"""What a device tells of itself while it works: its phase, its steps, how busy it was, what memory it uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget

if TYPE_CHECKING:
    from workbench.methods.common.session import StepTrace

LOADING, WAITING, IDLE, DONE = "loading", "waiting for the others", "idle", "done"
FIRST_EPOCH, CACHED_EPOCH = "first epoch", "cached epoch"


class DeviceReporter:
    """Publishes one dict for each phase and each step; records.Progress takes them.

    epoch and step are in every message once there are any, so that the error for a lost device can name them.
    """

    def __init__(self, context: RankContext, budget: MemoryBudget | None = None) -> None:
        self._context, self._budget = context, budget
        self._where: dict[str, int] = {}
        self._phase = ""
        self._last_end_s: float | None = None

    def phase(self, name: str, epoch: int | None = None) -> None:
        """Tell that a phase begins; with an epoch, that it trains that epoch."""
        self._phase = name
        self._last_end_s = None
        if epoch is not None:
            self._where = {"epoch": epoch}
        self._context.publish(self._where | {"phase": name, "used_bytes": self.used_bytes})

    def step(self, trace: StepTrace, num_steps: int, *, cached: bool, trains: bool = True) -> None:
        """Tell of a step that this device has done.  A step lasts from the end of the one before, so that waiting counts.

        trains: False for a step without a loss.
        """
        begin_s = trace.start_s if self._last_end_s is None else self._last_end_s
        self._last_end_s = trace.end_s
        self._where = {"epoch": trace.epoch, "step": trace.step}
        message: dict[str, Any] = {
            "num_steps": num_steps,
            "cached": cached,
            "samples": trace.samples,
            "phase": self._phase,
            "step_s": trace.end_s - begin_s,
            "busy_s": trace.busy_s,
            "used_bytes": self.used_bytes,
        }
        self._context.publish(self._where | message | ({"loss": trace.loss} if trains else {}))

    @property
    def used_bytes(self) -> int | None:
        """Return the bytes that count against the budget; None on a system that does not tell."""
        if self._budget is None or not self._budget.footprint_bytes:
            return None
        return self._budget.used_bytes
