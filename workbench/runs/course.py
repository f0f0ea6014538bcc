"""Collect from a run's events what its charts need: losses, scores, the plan, a step as predicted and as measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.plan import Plan
from workbench.core.timeline import Span, Timeline
from workbench.methods.base import Event

KEPT_SHARES = 40
"""Number of last steps of which each device's work is shown."""
GONE = ("lost", "leaving", "left")


class Energy(NamedTuple):
    """Energy of a device.  is_measured: by its own meter, with all else that it did."""

    joules: float
    is_measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """A run's course up to one moment.

    losses: (step, loss), steps counted from 1 through all epochs; the loss of a step that was repeated is the last one.
    num_steps: steps of the run as predicted, 0 if unknown.  scores: (step, value) of the first metric, on the
    validation split.
    marks: (step, words) of changes of the devices.  busy: for each device, the shares of its last steps in which it
    computed.
    energy: each device's joules so far, by its own meter or by the power model of summary.energy_j without sending;
    None for a device that has neither.
    plan: the plan of the present steps, None if not known yet.  is_replanned: whether it is not the run's first.
    cached: whether the last step ran from the cache.
    requests, predicted_requests: (number from 1, seconds) of the answered inference requests, and of all as predicted.
    predicted: a step of typical length under this plan, simulated.  measured: the newest step whose spans are known,
    measured_step: which one, in words, expected_s: its own predicted seconds, None if not known under this plan.
    unit: what a step is called: 'step' or 'request'.
    """

    losses: tuple[tuple[int, float], ...] = ()
    num_steps: int = 0
    scores: tuple[tuple[int, float], ...] = ()
    metric: str = ""
    marks: tuple[tuple[int, str], ...] = ()
    busy: tuple[tuple[float, ...], ...] = ()
    energy: tuple[Energy | None, ...] = ()
    plan: Plan | None = None
    is_replanned: bool = False
    cached: bool = False
    predicted: Timeline | None = None
    measured: Timeline | None = None
    measured_step: str = ""
    expected_s: float | None = None
    requests: tuple[tuple[int, float], ...] = ()
    predicted_requests: tuple[tuple[int, float], ...] = ()
    unit: str = "step"


@dataclass(slots=True)
class CourseLog:
    """Collects events of a run on a cluster; `course` may be read at any time between two events.

    answers: whether its steps are inference requests.  predicted_s: seconds of each (epoch, step) as simulated.
    cached: epochs that run from the cache.
    """

    cluster: Cluster
    answers: bool = False
    predicted_s: dict[tuple[int, int], float] = field(default_factory=dict)
    cached: frozenset[int] = frozenset()
    _requests: dict[int, float] = field(default_factory=dict)
    _losses: dict[int, float] = field(default_factory=dict)
    _steps: dict[int, int] = field(default_factory=dict)
    _scores: dict[int, Mapping[str, float]] = field(default_factory=dict)
    _marks: list[tuple[int, str]] = field(default_factory=list)
    _busy: list[deque[float]] = field(default_factory=list)
    _energy_j: list[float] = field(default_factory=list)
    _metered_j: dict[int, float] = field(default_factory=dict)
    _plan: Plan | None = None
    _is_replanned: bool = False
    _timelines: dict[str, Timeline] = field(default_factory=dict)
    _spans: tuple[Span, ...] = ()
    _measured: tuple[int, int] = (0, 0)
    _epoch: int = 0
    _last: int = 0

    def __post_init__(self) -> None:
        self._busy = [deque(maxlen=KEPT_SHARES) for _ in self.cluster.devices]
        self._energy_j = [0.0 for _ in self.cluster.devices]

    def update(self, event: Event) -> None:
        """Take over what an event says; the other kinds are ignored."""
        match event.kind:
            case "predicted":
                counts: dict[int, int] = {}
                for record in event.predicted:
                    counts[record.epoch] = counts.get(record.epoch, 0) + 1
                self._steps |= counts
                self.cached = frozenset(record.epoch for record in event.predicted if record.cached)
                self.predicted_s = {
                    (record.epoch, record.step): record.predicted_s or 0.0 for record in event.predicted
                }
            case "plan" if event.plan is not None:
                self._take_plan(event.plan, event)
            case "step":
                self._steps[event.epoch], self._epoch = event.num_steps, event.epoch
                self._last = self._number(event.epoch, event.step)
                if event.loss is not None:
                    self._losses[self._last] = event.loss
                elif self.answers and event.seconds is not None:
                    self._requests[self._last] = event.seconds
            case "spans":
                self._spans, self._measured = event.spans, (event.epoch, event.step)
            case "scores":
                self._scores[event.epoch] = event.metrics
            case "device" if 0 <= event.rank < len(self._busy) and event.device is not None:
                state = event.device
                if state.metered_j is not None:
                    self._metered_j[event.rank] = state.metered_j
                if state.phase in (*GONE, "back"):
                    self._marks.append((self._last + 1, f"{self.cluster.devices[event.rank].name} {state.phase}"))
                if state.phase in GONE:
                    self._busy[event.rank].clear()
                elif state.step_s and (share := state.busy_share) is not None:
                    self._busy[event.rank].append(share)
                    device = self.cluster.devices[event.rank]
                    watts = device.watts_idle + share * (device.watts_busy - device.watts_idle)
                    self._energy_j[event.rank] += watts * state.step_s

    def _take_plan(self, plan: Plan, event: Event) -> None:
        now = plan.at(max(0, event.step))
        if self._plan is not None and self._last and now.stages != self._plan.stages:
            self._is_replanned = True
            self._spans = ()  # of other devices
        self._plan, self._timelines = now, dict(event.timelines) or self._timelines

    def _number(self, epoch: int, step: int) -> int:
        return sum(count for number, count in self._steps.items() if number < epoch) + step + 1

    @property
    def course(self) -> Course:
        """Return the course up to now."""
        cached = self._epoch in self.cached
        names = [name for name in self._timelines if name.startswith("cached") == cached]
        metric = next((name for metrics in self._scores.values() for name in metrics), "")
        epoch, step = self._measured
        return Course(
            losses=tuple(sorted(self._losses.items())),
            num_steps=sum(self._steps.values()),
            scores=tuple(
                (self._number(number + 1, -1), metrics[metric])
                for number, metrics in sorted(self._scores.items())
                if metric in metrics
            ),
            metric=metric,
            marks=tuple(self._marks),
            busy=tuple(map(tuple, self._busy)),
            energy=tuple(self._energy(rank) for rank in range(self.cluster.world_size)),
            plan=self._plan,
            is_replanned=self._is_replanned,
            cached=cached and self._plan is not None and self._plan.cached is not None,
            predicted=self._timelines[names[0]] if names else None,
            measured=self._timeline() if self._spans and (epoch in self.cached) == cached else None,
            measured_step=f"request {step + 1}" if self.answers else f"step {step + 1} of epoch {epoch + 1}",
            requests=tuple(sorted(self._requests.items())),
            expected_s=None if self._is_replanned else self.predicted_s.get(self._measured),
            predicted_requests=tuple(enumerate(self.predicted_s.values(), 1)) if self.answers else (),
            unit="request" if self.answers else "step",
        )

    def _energy(self, rank: int) -> Energy | None:
        if rank in self._metered_j:
            return Energy(self._metered_j[rank], is_measured=True)
        joules = self._energy_j[rank]
        return Energy(joules, is_measured=False) if joules > 0 else None

    def _timeline(self) -> Timeline:
        return Timeline(
            source="real" if self.cluster.is_real else "emulated",
            device_names=self.cluster.names,
            spans=self._spans,
        )
