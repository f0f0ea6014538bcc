"""What happens while a stream is served, as it happens: plans, events, answers, samples; in the end a ServingReport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.core.inference import InferencePlan
from workbench.core.serving import DeviceSample, EventKind, ServedRequest, ServingEvent

Watcher = Callable[[ServingEvent], None]


@dataclass(slots=True, kw_only=True)
class ServingLog:
    """watch: is told of every event."""

    plans: list[InferencePlan] = field(default_factory=list)
    events: list[ServingEvent] = field(default_factory=list)
    requests: list[ServedRequest] = field(default_factory=list)
    samples: list[DeviceSample] = field(default_factory=list)
    watch: Watcher | None = None

    def plan(self, made: InferencePlan) -> int:
        """Return the plan's index: of an equal one (but for its price), or a new one."""
        for index, plan in enumerate(self.plans):
            if _parts(plan) == _parts(made):
                return index
        self.plans.append(made)
        return len(self.plans) - 1

    def add(
        self, time_s: float, kind: EventKind, rank: int = -1, *, before: int = -1, after: int = -1, value: float = 0.0, detail: str = ""
    ) -> None:
        """Note an event."""
        event = ServingEvent(
            time_s=time_s, kind=kind, rank=rank, plan_before=before, plan_after=after, value=round(value, 6), detail=detail
        )
        self.events.append(event)
        if self.watch is not None:
            self.watch(event)


def _parts(plan: InferencePlan) -> tuple[object, ...]:
    return (
        plan.paradigm,
        plan.ranks,
        plan.units,
        plan.columns,
        tuple(round(share, 9) for share in plan.shares),
        plan.schemes,
        plan.layers,
        plan.overlap,
        plan.both_ways,
        plan.tile_tokens,
    )
