"""A service in virtual time: the real policy, rescheduler and coordinator on virtual devices, which take the simulated
seconds.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from workbench.core.cluster import Cluster, Factors
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.inference import InferencePlan
from workbench.methods.galaxy_plus.memory import equal_layers
from workbench.methods.galaxy_plus.operation_costs import InferenceProfile
from workbench.methods.galaxy_plus.prepare import Request
from workbench.methods.galaxy_plus.serving.log import ServingLog, never_begun
from workbench.methods.galaxy_plus.serving.messages import (
    BlockReport,
    Loaded,
    Served,
    ServiceBegun,
    ServiceJob,
    UnderWay,
)
from workbench.methods.galaxy_plus.serving.policy import ServingPolicy
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import BlockTimes, Planner, Rescheduler, Times
from workbench.methods.galaxy_plus.serving.serve import run_service
from workbench.runtime.commands import End, StepDone
from workbench.runtime.virtual_devices import VirtualDevices
from workbench.runtime.virtual_work import VirtualWork, VirtualWorld


def simulate_serving(
    profile: InferenceProfile,
    cluster: Cluster,
    planner: Planner,
    times: Times,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings | None = None,
    faults: Sequence[Fault] = (),
    world: VirtualWorld | None = None,
    noise: float = 0.0,
    seed: int = 0,
    until_s: float = math.inf,
    decided_by: type[Rescheduler] = Rescheduler,
) -> ServingReport:
    """Return the simulated report of serving the stream.

    planner, times: see serve.planner_of and serve.simulated_times.  Weights are read at Device.storage_bytes_per_s.
    noise: standard deviation of the logarithm of the seconds that devices report and probes measure, drawn with `seed`.
    until_s: time at which the service ends, even if requests are unanswered.  decided_by: makes the decisions.
    Raises PlanError if no plan fits the whole cluster.
    """
    settings = rescheduling or ReschedulingSettings()
    log = ServingLog(arrivals_s=stream.arrival_times())
    rescheduler = decided_by(settings, cluster.world_size, planner, times, log)
    work = _Work(profile, cluster, times, noise, random.Random(seed))
    devices = VirtualDevices(
        cluster.world_size,
        work,
        replace(world or VirtualWorld(), report_s=settings.report_every_s),
        curves=[device.sustained for device in cluster.devices],
    )
    work.now_s = devices.now_s
    tokens = stream.length or log.plans[0].length
    policy = ServingPolicy.on(
        devices,
        cluster,
        FaultSchedule(faults),
        rescheduler,
        stacks=profile.stacks,
        num_steps=stream.num_requests,
        requests=(Request(tokens),),
        is_over=lambda now_s: now_s > until_s,
    )
    run_service(policy)
    notes = never_begun(faults, cluster, log.end_s)
    return log.report(
        policy.samples,
        source="simulated",
        model=profile.model,
        cluster=cluster,
        stream=stream,
        rescheduling=settings,
        faults=tuple(faults),
        valid=not notes,
        notes=notes,
    )


def bytes_to_read(old: InferencePlan | None, new: InferencePlan, profile: InferenceProfile, rank: int) -> int:
    """Return the bytes that a device reads from its disk to switch plans (Galaxy+, section III-E2): weights in memory
    are reused.
    """
    byte_pairs = itertools.zip_longest(_held_bytes(old, profile, rank), _held_bytes(new, profile, rank), fillvalue=0)
    return sum(max(0, after - before) for before, after in byte_pairs)


def _held_bytes(plan: InferencePlan | None, profile: InferenceProfile, rank: int) -> list[int]:
    """Return the bytes of embedding and head, and of attention, feed-forward network and norms in each layer; nothing
    outside the plan.
    """
    position = None if plan is None else plan.position_of(rank)
    if plan is None or position is None:
        return []
    sizes = [0 if position else profile.ends_bytes]
    for layers in equal_layers(plan, profile.stacks):
        sizes += layers.num_layers * layers.weights[position]
    return sizes


class _Work(VirtualWork):
    """Requests on virtual devices.  now_s: the clock of these devices."""

    def __init__(
        self, profile: InferenceProfile, cluster: Cluster, times: Times, noise: float, draws: random.Random
    ) -> None:
        self._profile, self._cluster, self._times = profile, cluster, times
        self._noise, self._draws = noise, draws
        self.now_s: Callable[[], float] = float
        self._begin_s = 0.0
        self._since_s = 0.0
        self._busy_s: dict[int, float] = defaultdict(float)  # by place, for the current request
        self._held: dict[int, InferencePlan] = {}  # by rank
        self._ready_s: dict[int, dict[int, float]] = defaultdict(dict)  # by rank: when each plan is loaded in addition
        self._numbers: dict[int, list[int]] = {}  # the blocks of each plan

    def _cost(self, job: ServiceJob, factors: Factors) -> BlockTimes:
        slower = {rank: factors[place] for place, rank in enumerate(_members(job)) if factors[place] != 1}
        return self._times(job.plan, slower)

    def seconds(self, job: ServiceJob, step: int, factors: Factors) -> float:
        return self._cost(job, factors).seconds

    def due_s(self, job: ServiceJob, step: int) -> float:
        return self._begin_s + job.arrivals_s[step] if job.arrivals_s else 0.0

    def reports(
        self, job: ServiceJob, place: int, step: int, before: float, after: float, factors: Factors
    ) -> Iterator[Any]:
        rank = _members(job)[place]
        if after == 0.0:
            self._since_s, self._busy_s[place] = self.now_s(), 0.0
            if rank == job.plan.ranks[0]:
                yield UnderWay(step, self._since_s)
            return
        cost = self._cost(job, factors)
        block_seconds = cost.blocks.get(rank, {})
        self._busy_s[place] += (after - before) * sum(block_seconds.values())
        numbers = self._numbers.setdefault(
            job.index, sorted({block for blocks in cost.blocks.values() for block in blocks})
        )
        first, last = (int(part * len(numbers) + 1e-9) for part in (before, after))
        done = {block: self._noisy(block_seconds[block]) for block in numbers[first:last] if block in block_seconds}
        if done:
            yield BlockReport(job.index, done)

    def done(self, job: ServiceJob, place: int, step: int, factor: float) -> StepDone:
        output = np.empty(0) if place == _members(job).index(job.plan.ranks[0]) else None
        now_s = self.now_s()
        return StepDone(
            step, 0.0, Served(output, self._since_s, now_s, self._since_s, now_s, self._busy_s[place], 0.0, 0.0)
        )

    def heating_s(self, job: ServiceJob, place: int, step: int, factor: float) -> float:
        return self._busy_s[place]

    def part(self, job: ServiceJob, place: int, end: End, stop: int) -> None:
        return None

    def slowness(self, rank: int, factor: float) -> float:
        return self._noisy(factor)

    def _noisy(self, value: float) -> float:
        return value * math.exp(self._draws.gauss(0.0, self._noise)) if self._noise else value

    # Weights.

    def prepare(self, job: ServiceJob, place: int) -> tuple[float, Iterable[Any]]:
        rank = _members(job)[place]
        loaded = self._load(job, rank)
        self._ready_s[rank][job.index] = self.now_s() + loaded.seconds
        return loaded.seconds, (loaded,)

    def begin(self, job: ServiceJob, now_s: float) -> tuple[float, Iterable[tuple[int, Any]]]:
        members = _members(job)
        loads = [self._load(job, rank) for rank in members]
        self._held |= dict.fromkeys(members, job.plan)
        for rank in members:
            self._ready_s.pop(rank, None)
        seconds = max(loaded.seconds for loaded in loads)
        self._begin_s = now_s + seconds if job.begin_s is None else job.begin_s
        return seconds, (*enumerate(loads), (members.index(job.plan.ranks[0]), ServiceBegun(job.index, self._begin_s)))

    def _load(self, job: ServiceJob, rank: int) -> Loaded:
        """Return the reading of a device's missing weights for a plan, or the remaining time of a reading
        in progress.
        """
        if job.index in self._ready_s[rank]:
            return Loaded(job.index, max(0.0, self._ready_s[rank][job.index] - self.now_s()), 0)
        nbytes = bytes_to_read(self._held.get(rank), job.plan, self._profile, rank)
        return Loaded(job.index, self._cluster.devices[rank].loaded_s(nbytes), nbytes)

    def ended(self, rank: int) -> None:
        self._held.pop(rank, None)
        self._ready_s.pop(rank, None)


def _members(job: ServiceJob) -> Sequence[int]:
    """Return the ranks of a plan's devices by their places in the group."""
    return sorted(job.plan.ranks)
