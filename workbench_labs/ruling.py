"""A student's rule as a portal's decisions: which devices to leave out of a service (Galaxy+, section III-E)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from workbench.core.errors import PlanError
from workbench.methods.galaxy_plus.serving.records import EventKind
from workbench.methods.galaxy_plus.serving.rescheduler import BlockSeconds, Rescheduler, compare
from workbench_labs.course.verdict import WrongAnswerError, number_of

Rule = Callable[[list[float | None], list[list[float | None]]], Any]
"""(milliseconds of each device, those of former reports) -> devices to leave out."""


def ruled_by(rule: Rule, usual_ms: Sequence[float]) -> type[Rescheduler]:
    """Return a Rescheduler that asks a rule at every report, and does nothing else about stragglers.

    usual_ms: time of each device's work at its full speed.  The rule gets it multiplied by the slowness that was last
    measured: by the device's reports or, if it is left out, by its probes.  It gets None for a device that does not
    answer.
    """

    class Ruled(Rescheduler):
        def __post_init__(self, world_size: int) -> None:
            super().__post_init__(world_size)
            self.slowness = [1.0] * world_size
            self.history: list[list[float | None]] = []

        def report(self, now_s: float, plan: int, measured: BlockSeconds) -> None:
            if plan != self.current or plan < 0:
                return
            for rank, slowness in compare(measured, self.times(self.log.plans[plan], {}).blocks).items():
                self.slowness[rank] = slowness
                self.pace.observe(rank, slowness, 1.0)
            if self.current == self.wanted:
                self._ask(now_s)

        def probed(self, now_s: float, rank: int, slowness: float) -> None:
            device = self.candidates[rank]
            if device.is_alive and not device.is_in:
                self.log.add(now_s, "probed", rank, value=slowness)
                device.next_probe_s = now_s + self.settings.probe_every_s
                self.slowness[rank] = slowness

        def revived(self, now_s: float, rank: int) -> None:
            self.slowness[rank] = 1.0
            super().revived(now_s, rank)

        def _ask(self, now_s: float) -> None:
            times: list[float | None] = [
                usual_ms[rank] * self.slowness[rank] if device.is_alive else None
                for rank, device in enumerate(self.candidates)
            ]
            out = left_out(rule(list(times), [list(times_before) for times_before in self.history]), len(times))
            self.history.append(times)
            changed = [
                rank for rank, device in enumerate(self.candidates) if device.is_alive and device.is_in == (rank in out)
            ]
            before = [device.is_in for device in self.candidates]
            for rank in changed:
                self.candidates[rank].is_in = rank not in out
            try:
                plan = self.planner(self._usable()) if changed else None
            except PlanError:  # the others cannot do without them
                for rank, was_in in enumerate(before):
                    self.candidates[rank].is_in = was_in
                return
            for rank in changed if plan is not None else ():
                kind: EventKind = "excluded" if rank in out else "readmitted"
                self.log.add(now_s, kind, rank, before=self.current, value=self.slowness[rank])
                self.candidates[rank].next_probe_s = now_s + self.settings.probe_every_s
            if plan is not None:
                self._want(now_s, plan)

    return Ruled


def left_out(answer: Any, size: int) -> set[int]:
    """Return a rule's answer as devices.  Raises WrongAnswerError unless it lists some of them, and not all."""
    if not isinstance(answer, list | tuple | set):
        raise WrongAnswerError(f"The devices to leave out are a list; the rule returned {answer!r:.80}.")
    devices = {int(number_of(device)) for device in answer}
    if not devices <= set(range(size)) or len(devices) == size:
        raise WrongAnswerError(f"Some of the devices 0 to {size - 1} can be left out, not all; this is {answer!r:.80}.")
    return devices
