"""What happens while a stream is served, as it happens: plans, events, answers, samples; in the end a ServingReport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.core.inference import InferencePlan
from workbench.core.serving import EventKind, ReschedulingSettings, ServedRequest, ServingEvent, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.samples import Samples

Watcher = Callable[[ServingEvent], None]


@dataclass(slots=True, kw_only=True)
class ServingLog:
    """watch: takes every event.  arrivals_s: of the requests; empty: each arrives when the one before was answered."""

    arrivals_s: tuple[float, ...] = ()
    plans: list[InferencePlan] = field(default_factory=list)
    events: list[ServingEvent] = field(default_factory=list)
    requests: list[ServedRequest] = field(default_factory=list)
    watch: Watcher | None = None
    first_s: float | None = None  # when the first attempt of the next request began, if it has begun
    num_attempts: int = 0

    @property
    def end_s(self) -> float:
        """Return when the last answer was there."""
        return self.requests[-1].end_s if self.requests else 0.0

    def report(self, samples: Samples, *, stream: StreamSettings, rescheduling: ReschedulingSettings, **settings: Any) -> ServingReport:
        """Return the report of a service that is over."""
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
        """Take note that the next request is being answered since start_s."""
        self.num_attempts += 1
        self.first_s = start_s if self.first_s is None else self.first_s

    def repeated(self, now_s: float, plan: int) -> None:
        """Note that the attempt under way has failed."""
        self.add(now_s, "repeated", before=plan, value=len(self.requests))

    def answered(self, end_s: float, *, tokens: int, plan: int, is_right: bool | None = None) -> ServedRequest:
        """Note the answer to the request that was attempted last, and return it."""
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


def _parts(plan: InferencePlan) -> InferencePlan:
    """Return a plan without its price, and its shares without the last digits."""
    shares = tuple(round(share, 9) for share in plan.shares)
    return replace(plan, method="", shares=shares, group_tokens=0, merge_tokens=0, length=0, predicted_s=0.0, notes=())
