"""Serving a stream while devices slow down, die and return: settings, events, answers, the report (Galaxy+, III-E and
IV-F).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault
from workbench.core.errors import ConfigError
from workbench.core.inference import InferencePlan
from workbench.core.ranges import Count, Interval, Seconds, Seed, Slowness, Tokens, require_ranges
from workbench.core.serial import read_json
from workbench.core.spread import percentile
from workbench.core.timeline import SourcedReport

Reaction = Literal["none", "exclude"]
"""The reaction to a straggler: none, or exclude it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """The arrival of requests.

    rate_per_s: rate of a Poisson process; 0: back to back, the next request arrives after the last answer.

    num_requests: the number of requests.  length: number of tokens of each; 0 takes the task's lengths.
    """

    num_requests: Annotated[int, Meta(ge=1, le=10**7)] = 100
    rate_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    seed: Seed = 0
    length: Tokens = 0

    def __post_init__(self) -> None:
        require_ranges(self, "A stream")

    def arrival_times(self) -> tuple[float, ...]:
        """Return the arrival times of a Poisson process in seconds, the first after one interval; empty for
        back-to-back requests.
        """
        if self.rate_per_s == 0:
            return ()
        draws = random.Random(self.seed)
        return tuple(accumulate(draws.expovariate(self.rate_per_s) for _ in range(self.num_requests)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReschedulingSettings:
    """How stragglers are detected, excluded and readmitted.

    reaction: see Reaction.  report_every_s: the interval at which a device reports the latency of its blocks.
    A block is slow if its time, relative to the plan's expectation, is `slow_factor` times the median of the other
    devices.  A device is a straggler if most of its blocks were slow in `repeats` of its last `window` reports.
    An excluded device computes a probe, one layer's work, every probe_every_s.  It is readmitted after good_probes
    consecutive probes below recovered_factor (which is less than slow_factor: hysteresis).  If it becomes a straggler
    again within calm_s, it waits back_off times longer, up to longest_probe_s, before its next probe.  After calm_s
    without trouble the wait is reset.
    silence_s: the heartbeat timeout after which a device is lost.  request_timeout_s: the time for which a device waits
    for another before it gives up the request, which a new group then repeats.
    """

    reaction: Reaction = "exclude"
    report_every_s: Interval = 0.5
    slow_factor: Slowness = 1.5
    window: Count = 5
    repeats: Count = 3
    recovered_factor: Slowness = 1.2
    good_probes: Count = 3
    probe_every_s: Interval = 0.5
    back_off: Slowness = 2.0
    longest_probe_s: Interval = 30.0
    calm_s: Seconds = 10.0
    silence_s: Interval = 5.0
    request_timeout_s: Interval = 20.0

    def __post_init__(self) -> None:
        require_ranges(self, "Re-scheduling")
        request = "Re-scheduling was asked for with "
        if not self.recovered_factor < self.slow_factor:
            raise ConfigError(
                f"{request}slow_factor {self.slow_factor:g} and recovered_factor {self.recovered_factor:g}.",
                "A device must be clearly better to be taken back than it was to be left out, or it goes in and out.",
                "Set 1 <= recovered_factor < slow_factor.",
            )
        if self.repeats > self.window:
            raise ConfigError(
                f"{request}repeats {self.repeats} and window {self.window}.",
                "A straggler is found by `repeats` of the last `window` reports.",
                "Set repeats <= window.",
            )


EventKind = Literal[
    "slowed",  # injected: the device computes `value` times slower from now on
    "restored",  # injected: at normal speed again
    "killed",  # injected: its process was ended
    "frozen",  # injected: its process was stopped and does not answer
    "revived",  # injected: its process runs again
    "straggler",  # it is `value` times slower than the others
    "lost",  # it is dead or silent
    "excluded",  # the plan does not use it
    "kept",  # a straggler that the others cannot replace
    "probed",  # an excluded device computed a layer's work, `value` times slower than expected
    "recovered",  # enough consecutive probes were good
    "readmitted",  # the plan uses it again
    "planned",  # a new plan was decided on; `value`: its predicted seconds
    "loaded",  # its weights were read from the disk in the background; `value`: seconds, detail: bytes
    "switched",  # requests are served under the new plan from now on
    "repeated",  # the request in flight is served again
    "paused",  # requests wait while a new plan's weights replace the old ones: a device has no memory for both
    "waiting",  # no plan fits the remaining devices: requests wait
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRequest:
    """One request.

    arrival_s, start_s, end_s: its arrival, the start of its first attempt, its answer, in seconds of the service.

    plan: index in ServingReport.plans of the plan that answered it.  is_right: whether the answer equals the local
    model's; None: not compared.
    """

    number: int
    arrival_s: float
    start_s: float
    end_s: float
    tokens: int
    plan: int
    attempts: int = 1
    is_right: bool | None = None

    @property
    def latency_s(self) -> float:
        """Return the seconds from arrival to answer: queueing and service."""
        return self.end_s - self.arrival_s

    @property
    def queueing_s(self) -> float:
        """Return the seconds before its first attempt started."""
        return self.start_s - self.arrival_s

    @property
    def service_s(self) -> float:
        """Return the seconds from the start of its first attempt to the answer, repetitions included."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEvent:
    """A change during the service.  rank -1: no single device.  plan_before, plan_after: indexes in
    ServingReport.plans, -1: none.
    """

    time_s: float
    kind: EventKind
    rank: int = -1
    plan_before: int = -1
    plan_after: int = -1
    value: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """The load of a device from start_s to end_s.

    busy_s: seconds of computing for requests.  slowness: slowness relative to the other devices; 0: unknown.

    load: share of the device used by other work (an injected slow-down of factor f uses 1 - 1/f).
    """

    rank: int
    start_s: float
    end_s: float
    busy_s: float
    slowness: float = 0.0
    load: float = 0.0

    @property
    def utilisation(self) -> float:
        """Return the share of the time in which the device's processor was busy, with requests or with other work."""
        busy_share = min(1.0, self.busy_s / (self.end_s - self.start_s)) if self.end_s > self.start_s else 0.0
        return max(busy_share, self.load)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport(SourcedReport):
    """The record of a served stream.

    events, requests: ordered by time.
    num_lost: number of requests without an answer, except those that remained when the user ended the service.
    plans[0] was the first plan; re-scheduling made all others.  memory: resident bytes over time, (time_s, bytes of
    each device's process by rank, and last the portal's).  valid: also False if a requested fault never started.
    """

    model: str
    cluster: Cluster
    stream: StreamSettings
    rescheduling: ReschedulingSettings
    faults: tuple[Fault, ...] = ()
    plans: tuple[InferencePlan, ...]
    requests: tuple[ServedRequest, ...] = ()
    events: tuple[ServingEvent, ...] = ()
    samples: tuple[DeviceSample, ...] = ()
    memory: tuple[tuple[float, tuple[int, ...]], ...] = ()
    num_lost: int = 0

    @property
    def end_s(self) -> float:
        """Return the time of the last answer."""
        return max((request.end_s for request in self.requests), default=0.0)

    @property
    def num_wrong(self) -> int:
        """Return the number of answers that differ from the local model's, among those compared."""
        return sum(request.is_right is False for request in self.requests)

    @property
    def num_repeated(self) -> int:
        """Return the number of requests that took more than one attempt."""
        return sum(request.attempts > 1 for request in self.requests)

    def percentile_s(self, share: float, of: Literal["latency", "queueing", "service"] = "latency") -> float:
        """Return the seconds that `share` (0 to 1) of the requests did not exceed; 0 without requests."""
        return percentile((getattr(request, f"{of}_s") for request in self.requests), share)

    def throughput_per_s(self, start_s: float, end_s: float) -> float:
        """Return the answers per second in [start_s, end_s).

        A request that is in service at either end counts with the part of its service that is inside.
        """
        if end_s <= start_s:
            return 0.0
        parts = 0.0
        for request in self.requests:
            inside = min(request.end_s, end_s) - max(request.start_s, start_s)
            if inside > 0:
                parts += inside / request.service_s
            elif request.service_s == 0 and start_s <= request.end_s < end_s:
                parts += 1
        return parts / (end_s - start_s)

    def throughput(self, step_s: float) -> list[tuple[float, float]]:
        """Return (middle of the step, answers per second) from 0 to the last answer, without the last
        incomplete step.
        """
        return self._over(step_s, ((request.start_s, request.end_s, 1.0) for request in self.requests))

    def utilisation(self, rank: int, step_s: float) -> list[tuple[float, float]]:
        """Return (middle of the step, share of the time busy) of a device, from 0 to the last answer."""
        rank_samples = (sample for sample in self.samples if sample.rank == rank)
        spans = (
            (sample.start_s, sample.end_s, (sample.end_s - sample.start_s) * sample.utilisation)
            for sample in rank_samples
        )
        return [(middle, min(1.0, share)) for middle, share in self._over(step_s, spans)]

    def _over(self, step_s: float, spans: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
        sums = by_step(step_s, int(self.end_s / step_s), spans)
        return [((index + 0.5) * step_s, amount / step_s) for index, amount in enumerate(sums)]

    def events_of(self, *kinds: EventKind, rank: int | None = None) -> tuple[ServingEvent, ...]:
        """Return the events of the given kinds, of one device if `rank` is given."""
        return tuple(event for event in self.events if event.kind in kinds and (rank is None or event.rank == rank))

    def restored_after_s(self, since_s: float, level_per_s: float, *, window_s: float = 1.0) -> float | None:
        """Return the seconds from since_s until throughput over the next window_s reaches level_per_s again; None:
        never.

        Checked after every answer.  Galaxy+ Fig. 16(d).
        """
        for request in self.requests:
            is_inside = request.end_s > since_s and request.end_s + window_s <= self.end_s
            if is_inside and self.throughput_per_s(request.end_s, request.end_s + window_s) >= level_per_s:
                return request.end_s - since_s
        return None

    @property
    def heading(self) -> str:
        """Return the heading of its summary."""
        return f"Serving {self.model} on {self.cluster.name} ({self.label})"

    def summary(self) -> dict[str, Any]:
        """Return its numbers by name."""
        kinds: tuple[EventKind, ...] = ("straggler", "excluded", "lost", "revived", "readmitted")
        return {
            "numbers are": self.label,
            "requests answered": len(self.requests),
            "requests lost": self.num_lost,
            "answers wrong": self.num_wrong,
            "requests repeated": self.num_repeated,
            "answers per second": self.throughput_per_s(0.0, self.end_s),
            "latency p50 (s)": self.percentile_s(0.5),
            "latency p95 (s)": self.percentile_s(0.95),
            "latency p99 (s)": self.percentile_s(0.99),
            "queueing p50 (s)": self.percentile_s(0.5, "queueing"),
            "queueing p95 (s)": self.percentile_s(0.95, "queueing"),
            "plans": len(self.plans),
            **{f"devices {kind}": len(self.events_of(kind)) for kind in kinds},
            "plans switched to": len(self.events_of("switched")),
            "late share": self.overrun_share,
            "valid": self.valid,
        }

    @classmethod
    def read(cls, path: Path | str) -> ServingReport:
        """Read a report.  Raises ConfigError if the file is missing or is not a report."""
        return read_json(path, cls, "the serving report")


def by_step(step_s: float, num_steps: int, spans: Iterable[tuple[float, float, float]]) -> list[float]:
    """Return the sum of the parts of some amounts in each step from 0 on.  spans: (start, end, amount, which is spread
    evenly).
    """
    sums = [0.0] * num_steps
    for start_s, end_s, amount in spans:
        first, last = int(start_s / step_s), int(end_s / step_s)
        for index in range(first, min(last, num_steps - 1) + 1):
            inside_s = min(end_s, (index + 1) * step_s) - max(start_s, index * step_s)
            sums[index] += amount if first == last else amount * max(inside_s, 0.0) / (end_s - start_s)
    return sums
