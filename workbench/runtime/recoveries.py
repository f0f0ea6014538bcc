"""The cost of changes of a run's devices: the times until each is noticed, planned for, and resumed after."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from workbench.core.report import Recovery
from workbench.runtime.commands import Generation

STOPPING, PLANNING, MEETING = "stopping", "planning", "meeting"
"""Parts of the way to the first step after a change: the devices end their work, the next generation is planned, its
devices form a group.  The parts after these are those that the devices report.
"""


@dataclass(kw_only=True)
class Change:
    """A device fault or return and its consequences, in seconds of the devices' clock.

    what: the change, such as 'kill beta'.  step: number of completed steps at that time; known: number of completed
    steps when it was noticed.
    begun_s: start of the generation that followed; stopped_s: when the last member completed the last step before the
    change; first: generation and step of the first step afterwards; resumed_s: when the last member completed it.
    entered_s: by part, when the slowest device began with it.
    For the other fields see core.report.Recovery.
    """

    what: str
    step: int
    since_s: float
    noticed_s: float | None = None
    begun_s: float | None = None
    stopped_s: float = 0.0
    first: tuple[int, int] | None = None
    resumed_s: float | None = None
    step_s: float = 0.0
    stood_still_s: float = 0.0
    known: int = 0
    repeated: int = 0
    entered_s: dict[str, float] = field(default_factory=dict)

    @property
    def recovery(self) -> Recovery | None:
        """Return the cost of the change.  None if no step followed."""
        if self.noticed_s is None or self.begun_s is None or self.resumed_s is None:
            return None
        return Recovery(
            what=self.what,
            step=self.step,
            noticed_s=self.noticed_s - self.since_s,
            planned_s=self.begun_s - self.noticed_s,
            resumed_s=self.resumed_s - self.begun_s,
            step_s=self.step_s,
            stood_still_s=self.stood_still_s,
            repeated=self.repeated,
            noticed_steps=max(0, self.known - self.step),
            parts_s=self._parts_s(self.resumed_s),
        )

    def _parts_s(self, end_s: float) -> dict[str, float]:
        """Return the seconds of each part."""
        begins = sorted(self.entered_s.items(), key=lambda part: part[1])
        return {name: until_s - begin_s for (name, begin_s), (_, until_s) in pairwise([*begins, ("", end_s)])}


@dataclass(kw_only=True)
class Recoveries:
    """The changes of a run's devices and what followed each, by the clock `now_s`."""

    now_s: Callable[[], float]
    _changes: list[Change] = field(default_factory=list)

    @property
    def costs(self) -> tuple[Recovery, ...]:
        """Return the costs of all changes after which a step was completed."""
        return tuple(recovery for change in self._changes if (recovery := change.recovery) is not None)

    def changed(self, what: str, step: int) -> None:
        """Record a change after `step` completed steps."""
        self._changes.append(Change(what=what, step=step, since_s=self.now_s()))

    def noticed(self, what: str, step: int) -> None:
        """Record that a change is noticed after `step` completed steps."""
        for change in self._changes:
            if change.what == what and change.noticed_s is None:
                change.noticed_s, change.known = self.now_s(), step
                change.entered_s[STOPPING] = change.noticed_s

    def entered(self, part: str, *, by_device: bool = False) -> None:
        """Record that a device, or the coordinator, begins with a part of the way to the first step.  by_device: a part
        that a device reports counts once the next generation has begun.
        """
        for change in self._changes:
            is_past = change.noticed_s is None or change.resumed_s is not None
            if not is_past and (change.begun_s is not None or not by_device):
                change.entered_s[part] = self.now_s()

    def begun(self, step: int, stopped_s: float) -> None:
        """Record that a generation begins after `step` completed steps.  stopped_s: when the last step before it was
        completed.
        """
        self.entered(MEETING)
        for change in self._changes:
            if change.noticed_s is not None and change.begun_s is None:
                change.begun_s, change.stopped_s = self.now_s(), stopped_s
                change.repeated = max(0, change.known - step)

    def resumed(self, generation: Generation, step: int, now_s: float) -> None:
        """Record that a member has completed a step."""
        for change in self._changes:
            if change.begun_s is not None and change.first in (None, (generation.number, step)):
                change.first, change.resumed_s, change.step_s = (
                    (generation.number, step),
                    now_s,
                    generation.predictor.seconds(step),
                )
                change.stood_still_s = max(0.0, now_s - change.stopped_s - change.step_s)
