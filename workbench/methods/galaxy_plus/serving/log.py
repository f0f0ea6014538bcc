"""The log of a service: plans, events, answers, and each device's state over time; it ends as a ServingReport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.inference import InferencePlan
from workbench.core.units import three_figures
from workbench.methods.galaxy_plus.serving.records import (
    DeviceSample,
    EventKind,
    ReschedulingSettings,
    ServedRequest,
    ServingEvent,
    ServingReport,
    StreamSettings,
    by_step,
)


class Busy(NamedTuple):
    """A device computed busy_s seconds between start_s and end_s."""

    start_s: float
    end_s: float
    busy_s: float


class Samples:
    """The samples of a service, by rank; `over` divides them into equal time steps.

    busy: a device's computation for each request.  loads: (time, share of the device that another load takes from then
    on).  slowness: (time, slowdown that the portal has measured).
    """

    def __init__(self, world_size: int) -> None:
        self.busy: list[list[Busy]] = [[] for _ in range(world_size)]
        self.loads: list[list[tuple[float, float]]] = [[(0.0, 0.0)] for _ in range(world_size)]
        self.slowness: list[list[tuple[float, float]]] = [[] for _ in range(world_size)]

    def over(self, step_s: float, end_s: float) -> tuple[DeviceSample, ...]:
        """Return a sample of each device and step from 0 to end_s, in order of time; a device is busy evenly within its
        interval.
        """
        num_steps = int(end_s / step_s) + 1
        after = (num_steps * step_s, 0.0)
        shares = [
            [(a, b, load * (b - a)) for (a, load), (b, _) in pairwise([*load_points, after])]
            for load_points in self.loads
        ]
        busy, loads = (
            [by_step(step_s, num_steps, rank_spans) for rank_spans in spans] for spans in (self.busy, shares)
        )
        last = [{int(time_s / step_s): value for time_s, value in slowness_points} for slowness_points in self.slowness]
        return tuple(
            DeviceSample(
                rank=rank,
                start_s=index * step_s,
                end_s=(index + 1) * step_s,
                busy_s=min(step_s, busy[rank][index]),
                slowness=last[rank].get(index, 0.0),
                load=loads[rank][index] / step_s,
            )
            for index in range(num_steps)
            for rank in range(len(self.busy))
        )


Watcher = Callable[[ServingEvent], None]


@dataclass(slots=True, kw_only=True)
class ServingLog:
    """The log of one service.

    watch: called with every event.  arrivals_s: arrival times of the requests; empty: each arrives when the one before
    was answered.
    """

    arrivals_s: tuple[float, ...] = ()
    plans: list[InferencePlan] = field(default_factory=list)
    events: list[ServingEvent] = field(default_factory=list)
    requests: list[ServedRequest] = field(default_factory=list)
    watch: Watcher | None = None
    first_s: float | None = None  # when the first attempt of the next request began, if it has begun
    num_attempts: int = 0

    @property
    def end_s(self) -> float:
        """Return the time of the last answer."""
        return self.requests[-1].end_s if self.requests else 0.0

    def report(
        self, samples: Samples, *, stream: StreamSettings, rescheduling: ReschedulingSettings, **settings: Any
    ) -> ServingReport:
        """Return the report of a finished service."""
        return ServingReport(
            stream=stream,
            rescheduling=rescheduling,
            plans=tuple(self.plans),
            requests=tuple(self.requests),
            events=tuple(self.events),
            samples=samples.over(rescheduling.report_every_s, self.end_s),
            num_lost=stream.num_requests - len(self.requests),
            **settings,
        )

    @property
    def arrival_s(self) -> float:
        """Return when the next request arrives."""
        return self.arrivals_s[len(self.requests)] if self.arrivals_s else self.end_s

    def attempted(self, start_s: float) -> None:
        """Record that the next request is being answered since start_s."""
        self.num_attempts += 1
        self.first_s = start_s if self.first_s is None else self.first_s

    def repeated(self, now_s: float, plan: int) -> None:
        """Record that the current attempt has failed."""
        self.add(now_s, "repeated", before=plan, value=len(self.requests))

    def answered(self, end_s: float, *, tokens: int, plan: int, is_right: bool | None = None) -> ServedRequest:
        """Record the answer to the last attempted request, and return it."""
        assert self.first_s is not None
        request = ServedRequest(
            number=len(self.requests),
            arrival_s=self.arrival_s,
            start_s=self.first_s,
            end_s=end_s,
            tokens=tokens,
            plan=plan,
            attempts=self.num_attempts,
            is_right=is_right,
        )
        self.requests.append(request)
        self.first_s, self.num_attempts = None, 0
        return request

    def plan(self, new_plan: InferencePlan) -> int:
        """Return the plan's index: that of an equal plan (apart from its cost), or a new one."""
        for index, plan in enumerate(self.plans):
            if _parts(plan) == _parts(new_plan):
                return index
        self.plans.append(new_plan)
        return len(self.plans) - 1

    def add(
        self,
        time_s: float,
        kind: EventKind,
        rank: int = -1,
        *,
        before: int = -1,
        after: int = -1,
        value: float = 0.0,
        detail: str = "",
    ) -> None:
        """Record an event."""
        event = ServingEvent(
            time_s=time_s,
            kind=kind,
            rank=rank,
            plan_before=before,
            plan_after=after,
            value=round(value, 6),
            detail=detail,
        )
        self.events.append(event)
        if self.watch is not None:
            self.watch(event)


def _parts(plan: InferencePlan) -> InferencePlan:
    """Return a plan without its cost, with rounded shares."""
    shares = tuple(round(share, 9) for share in plan.shares)
    return replace(plan, method="", shares=shares, length=0, predicted_s=0.0, notes=())


def never_begun(faults: Sequence[Fault], cluster: Cluster, end_s: float) -> tuple[str, ...]:
    """Return a note for each fault timed after the last answer of a service; the report shows no effect of it."""
    return tuple(
        f"The fault '{fault.kind}' of {cluster.devices[fault.rank].name} at {fault.start:g} s never began: "
        f"the stream ended after {three_figures(end_s)} s. Send more requests, or begin it earlier."
        for fault in faults
        if fault.start >= end_s
    )
