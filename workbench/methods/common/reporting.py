"""Progress messages of a device: its phase, steps, utilization and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.runtime.context import RankContext
from workbench.runtime.memory import MemoryBudget

if TYPE_CHECKING:
    from workbench.methods.common.session import StepTrace

LOADING, WAITING, IDLE, DONE = "loading", "waiting for the others", "idle", "done"
FIRST_EPOCH, CACHED_EPOCH = "first epoch", "cached epoch"


class DeviceReporter:
    """Publishes one dict for each phase and each step; records.Progress reads them.

    Every message has the epoch and step, if any, so that the error for a lost device can name them.
    """

    def __init__(self, context: RankContext, budget: MemoryBudget | None = None) -> None:
        self._context, self._budget = context, budget
        self._where: dict[str, int] = {}
        self._phase = ""
        self._last_end_s: float | None = None

    def phase(self, name: str, epoch: int | None = None) -> None:
        """Report that a phase begins; if an epoch is given, the phase trains that epoch."""
        self._phase = name
        self._last_end_s = None
        if epoch is not None:
            self._where = {"epoch": epoch}
        self._context.publish(self._where | {"phase": name, "used_bytes": self.used_bytes})

    def step(self, trace: StepTrace, num_steps: int, *, cached: bool, trains: bool = True) -> None:
        """Report a step that this device has finished.  A step lasts from the end of the step before, so waiting counts.

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
        """Return the bytes that count against the budget; None if the system does not report them."""
        if self._budget is None or not self._budget.footprint_bytes:
            return None
        return self._budget.used_bytes
