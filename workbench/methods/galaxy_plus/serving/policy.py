"""Galaxy+'s coordinator policy for a stream: the devices that serve, their plan, weight loading, repeated requests
(section III-E).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import psutil
from torch import Tensor

from workbench.core.cluster import Cluster, Factors
from workbench.core.device_faults import Fault, FaultSchedule
from workbench.core.errors import PlanError, RuntimeSetupError
from workbench.core.inference import InferencePlan, StackShape
from workbench.core.schedule import Ranks
from workbench.methods.galaxy_plus.planning import as_plan
from workbench.methods.galaxy_plus.prepare import Request, is_right
from workbench.methods.galaxy_plus.serving.log import Busy, Samples, ServingLog
from workbench.methods.galaxy_plus.serving.messages import (
    BlockReport,
    Failed,
    Loaded,
    Served,
    ServiceBegun,
    ServiceJob,
    UnderWay,
)
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServedRequest
from workbench.methods.galaxy_plus.serving.rescheduler import RequestTimes, Rescheduler, means
from workbench.models.sharding import ShardSpec, shard_spec
from workbench.runtime.commands import Generation, Parts, Probe, Probed, StepDone, is_broken
from workbench.runtime.devices import Devices
from workbench.runtime.fleet import Fleet
from workbench.runtime.memory import MemoryReading

_MOST_ATTEMPTS = 20
_MEMORY_EVERY_S = 1.0
RESTARTS = 3
"""Maximum number of restarts of a device that ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingState:
    """The state of a service.

    step, num_steps: numbers of answered requests and of all requests.  now_s: seconds of the service.  attempts: number
    of attempts at the next request.

    serving, wanted: devices of the plan that serves now, and of the plan that should serve; empty if no plan can serve,
    or none fits.
    left_out, lost: devices that the next plans do not use, and devices that do not answer.  slower: how many times
    slower than the others each straggler is by its last reports.
    """

    step: int
    num_steps: int
    now_s: float
    attempts: int
    serving: tuple[str, ...]
    wanted: tuple[str, ...]
    left_out: tuple[str, ...]
    lost: tuple[str, ...]
    slower: dict[str, float]


@dataclass(kw_only=True, repr=False)
class ServingPolicy:
    """A runtime.coordinator.Policy whose steps are requests.  Times are seconds since the first request was admitted.

    num_steps: number of requests in the stream.  requests: requests that are served in turn, all of one length.
    answers: the local model's answers, empty if they are not compared.  stacks: the model's stacks.  holds_both:
    whether a device has memory for the weights of a second plan in addition to those of the first, by rank.  answered:
    called with every answer.
    memory: memory of the devices, and last of this process.  read_memory: returns the devices' memory, None for lost
    devices.
    is_over: called at every turn with the service's seconds; returns whether to end early.
    """

    has_converged = False

    fleet: Fleet
    cluster: Cluster
    stacks: Sequence[StackShape]
    rescheduler: Rescheduler
    settings: ReschedulingSettings
    log: ServingLog
    samples: Samples
    num_steps: int
    requests: tuple[Request, ...]
    answers: Sequence[Tensor] = ()
    holds_both: Callable[[int, ShardSpec, ShardSpec], bool] = lambda rank, first, second: True
    answered: Callable[[ServedRequest], None] = lambda request: None
    read_memory: Callable[[], Sequence[MemoryReading | None]] | None = None
    is_over: Callable[[float], bool] = lambda now_s: False
    memory: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    late_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by rank
    paced_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    _begin_s: float | None = None
    _held: dict[int, ShardSpec] = field(default_factory=dict)
    _loaded: dict[int, dict[int, Loaded]] = field(default_factory=lambda: defaultdict(dict))  # by plan and rank
    _reports: dict[int, list[Mapping[int, float]]] = field(default_factory=lambda: defaultdict(list))
    _reported_s: float = 0.0
    _since_s: float | None = None  # start of the next request's current attempt, if it has begun

    @classmethod
    def on(
        cls, devices: Devices, cluster: Cluster, faults: FaultSchedule, rescheduler: Rescheduler, **parts: Any
    ) -> Self:
        """Return the policy of a service on devices, with the faults that are injected.  parts: its other fields."""
        settings = rescheduler.settings
        fleet = Fleet(devices, cluster.names, faults, silence_s=settings.silence_s, num_restarts=RESTARTS)
        return cls(
            fleet=fleet,
            cluster=cluster,
            rescheduler=rescheduler,
            settings=settings,
            log=rescheduler.log,
            samples=Samples(cluster.world_size),
            **parts,
        )

    @property
    def step(self) -> int:
        """Return the number of answered requests."""
        return len(self.log.requests)

    @property
    def now_s(self) -> float:
        """Return the seconds of the service, 0 before it begins."""
        return 0.0 if self._begin_s is None else self.fleet.now_s() - self._begin_s

    @property
    def state(self) -> ServingState:
        """Return the state of the service as data."""
        rescheduler, names = self.rescheduler, self.cluster.names
        serving, wanted_plan = (
            tuple(names[rank] for rank in self.log.plans[index].ranks) if index >= 0 else ()
            for index in (rescheduler.current, rescheduler.wanted)
        )
        candidates = tuple(zip(names, rescheduler.candidates, strict=True))
        slowness = {name: rescheduler.pace.slowness(rank) for rank, name in enumerate(names)}
        return ServingState(
            step=self.step,
            num_steps=self.num_steps,
            now_s=self.now_s,
            attempts=self.log.num_attempts,
            serving=serving,
            wanted=wanted_plan,
            left_out=tuple(name for name, candidate in candidates if candidate.is_alive and not candidate.is_in),
            lost=tuple(name for name, candidate in candidates if not candidate.is_alive),
            slower={name: factor for name, factor in slowness.items() if factor > self.settings.slow_factor},
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state})"

    def faults_s(self) -> float:
        """Return the seconds on the faults' clock.  No fault is due before the service begins."""
        return -1.0 if self._begin_s is None else self.now_s

    def plan_ahead(self, number: int, ready: Ranks, factors: Factors) -> None:
        """Do nothing, because the rescheduler has the plans (see Policy)."""

    def charged(self, charges: Mapping[str, float]) -> None:
        """Ignore the devices' charge: nobody takes another's place by it."""

    def generation(self, number: int, ready: Ranks, factors: Factors) -> Generation:
        """Return the remaining requests as a job of the wanted plan's devices (see Policy)."""
        index = self.rescheduler.wanted
        plan = self.log.plans[index] if index >= 0 else None
        if plan is None or not set(plan.ranks) <= set(ready):
            raise PlanError("A plan for the present devices was asked for.", "None fits.", "Bring a device back.")
        draft_rank = self.draft_rank(plan, ready)
        members = tuple(sorted({*plan.ranks, *([] if draft_rank is None else [draft_rank])}))
        job = ServiceJob(
            index=index,
            plan=plan,
            members=members,
            specs=self._specs(plan),
            requests=self.requests,
            arrivals_s=self.log.arrivals_s,
            first_step=self.step,
            last_step=self.num_steps,
            begin_s=self._begin_s,
            cluster=self.cluster,
            timeout_s=self.settings.request_timeout_s,
            draft_rank=draft_rank,
        )
        stages = as_plan(replace(plan, ranks=tuple(map(members.index, plan.ranks))), self.stacks)
        predictor = RequestTimes(plan.predicted_s, self.num_steps)
        return Generation(
            number, members, stages, job, predictor, job.timeout_s, prepares=() if self._is_tight(plan) else members
        )

    def draft_rank(self, plan: InferencePlan, ready: Ranks) -> int | None:
        """Return the device that guesses tokens: the plan's first, or one that it leaves out; None if none does."""
        return None

    def _specs(self, plan: InferencePlan) -> dict[int, ShardSpec]:
        specs = [self._held.get(rank) for rank in plan.ranks]
        return {
            rank: shard_spec(plan, position, self.stacks, old_specs=specs) for position, rank in enumerate(plan.ranks)
        }

    def _is_tight(self, plan: InferencePlan) -> bool:
        """Return whether a serving device lacks memory for this plan's weights in addition to its current ones."""
        serving, specs = set() if self.rescheduler.plan is None else set(self.rescheduler.plan.ranks), self._specs(plan)
        return not all(
            self.holds_both(rank, self._held[rank], specs[rank])
            for rank in serving.intersection(plan.ranks, self._held)
        )

    def part(self, generation: Generation, place: int) -> Any:
        """Return the whole job, for every member (see Policy)."""
        return generation.job

    def begun(self, generation: Generation) -> Generation:
        """Return it unchanged, because `generation` has set everything (see Policy)."""
        self._reports.clear()
        return generation

    def differs(self, generation: Generation, ready: Ranks, factors: Factors) -> bool:
        """Return whether the rescheduler now wants another plan."""
        return self.rescheduler.wanted not in (-1, generation.job.index)

    def turn(self) -> bool:
        """Probe the excluded devices, sample memory, submit the reports of a period; return whether the service
        continues.
        """
        now_s = self.now_s
        if self.read_memory is not None and (not self.memory or now_s - self.memory[-1][0] > _MEMORY_EVERY_S):
            resident = (0 if reading is None else reading.rss_bytes for reading in self.read_memory())
            self.memory.append((now_s, (*resident, psutil.Process().memory_info().rss)))
        if self._begin_s is not None:
            for rank in self.rescheduler.due_probes(now_s):
                self.fleet.command((rank,), Probe(sum(self.requests[0].lengths)))
            plan = self.rescheduler.plan
            is_due = now_s - self._reported_s > self.settings.report_every_s
            if is_due and plan is not None and set(self._reports).issuperset(_computing(plan)):
                self._reported_s = now_s
                # In the middle of a request some devices are a block ahead: a block is compared among the devices that
                # have reported it.
                measured = {rank: means(reports) for rank, reports in self._reports.items()}
                self._reports.clear()
                self.rescheduler.report(now_s, self.rescheduler.current, measured)
                for rank in measured:
                    self.samples.slowness[rank].append((now_s, self.rescheduler.pace.slowness(rank)))
        return not self.is_over(now_s)

    # Messages from the devices, and faults.

    def stepped(self, generation: Generation, rank: int, done: StepDone) -> None:
        """Record a device's work on a request; from the plan's first device this is the answer."""
        served: Served = done.content
        begin_s = self._begin_s
        if begin_s is None:
            return  # arrived before the first device's message that the service has begun
        self.samples.busy[rank].append(Busy(served.start_s - begin_s, served.end_s - begin_s, served.busy_s))
        self.late_s[rank] += served.late_s
        self.paced_s[rank] += served.paced_s
        if done.step != self.step or served.output is None:
            return
        self._since_s = None
        self.log.attempted(served.since_s - begin_s)
        tokens = self.requests[done.step % len(self.requests)].length
        equals_local = is_right(served.output, self.answers[done.step % len(self.answers)]) if self.answers else None
        self.answered(
            self.log.answered(served.until_s - begin_s, tokens=tokens, plan=generation.job.index, is_right=equals_local)
        )

    def heard(self, generation: Generation | None, rank: int, event: Any) -> None:
        """Handle another message of a device."""
        match event:
            case BlockReport():
                if event.plan == self.rescheduler.current:
                    self._reports[rank].append(event.blocks)
            case UnderWay():
                if event.number == self.step:
                    self._since_s = event.since_s
            case Loaded():
                self._take_loaded(rank, event)
            case ServiceBegun():
                self._begin_s = event.begin_s
                if generation is not None and event.plan == generation.job.index:
                    self._held |= generation.job.specs
                    self._loaded.clear()
                    self._reports.clear()
                    if event.plan != self.rescheduler.current:
                        self.rescheduler.switched(self.now_s, event.plan)
            case Probed():
                self.rescheduler.probed(self.now_s, rank, event.slowness)
            case Failed():
                raise RuntimeSetupError(
                    f"Device '{self.fleet.name(rank)}' was serving request {event.number}.", event.error, "See above."
                )

    def _take_loaded(self, rank: int, loaded: Loaded) -> None:
        if loaded.error and not self._held:
            raise RuntimeSetupError(
                f"Device '{self.fleet.name(rank)}' was to load its part of plan {loaded.plan}.",
                loaded.error,
                "Give it more memory, or leave it out.",
            )
        if loaded.error:
            self.fleet.end(rank, loaded.error)  # the others continue without it
            return
        loaded_ranks = self._loaded[loaded.plan]
        if rank in loaded_ranks or loaded.plan == self.rescheduler.current:
            return  # a device reports it again when it begins to serve
        loaded_ranks[rank] = loaded
        if set(self.log.plans[loaded.plan].ranks) <= set(loaded_ranks):
            before, nbytes = self.rescheduler.current, sum(holding.read_bytes for holding in loaded_ranks.values())
            seconds = max(holding.seconds for holding in loaded_ranks.values())
            self.log.add(
                self.now_s, "loaded", before=before, after=loaded.plan, value=seconds, detail=f"{nbytes} bytes"
            )

    def ended(self, generation: Generation, parts: Parts, lost: frozenset[int]) -> None:
        """Repeat the request that was in service when a device was lost."""
        if not is_broken(parts, lost):
            next_plan = self.rescheduler.wanted
            if next_plan not in (-1, self.rescheduler.current) and self._is_tight(self.log.plans[next_plan]):
                self.rescheduler.paused(self.now_s)
            return
        if self._since_s is None or self._begin_s is None:
            return
        self.log.attempted(self._since_s - self._begin_s)
        self.log.repeated(self.now_s, generation.job.index)
        self._since_s = None
        if self.log.num_attempts >= _MOST_ATTEMPTS:
            raise RuntimeSetupError(
                f"Request {self.step} was to be served.",
                f"{_MOST_ATTEMPTS} attempts failed.",
                "Look at the events for the reason.",
            )

    def shown(self, rank: int, state: str) -> None:
        """Record that a device is lost or back."""
        if state == "lost":
            self._held.pop(rank, None)
            for loaded_ranks in self._loaded.values():
                loaded_ranks.pop(rank, None)
            self.rescheduler.lost(self.now_s, rank)
        elif state == "back":
            self.log.add(self.now_s, "revived", rank)
            self.rescheduler.revived(self.now_s, rank)

    def injected(self, fault: Fault, begins: bool) -> None:
        """Record a fault; a returning device is recorded when it is present."""
        rank, now_s = fault.rank, self.now_s
        if fault.kind == "slow":
            factor = self.fleet.faults.factor(rank)
            self.log.add(now_s, "slowed" if begins else "restored", rank, value=factor)
            self.samples.loads[rank].append((now_s, 1 - 1 / max(1.0, factor)))
        elif begins:
            self.log.add(now_s, "killed" if fault.kind == "kill" else "frozen", rank)


def _computing(plan: InferencePlan) -> set[int]:
    """Return the devices of a plan that compute something and therefore must report."""
    parts = [part for part in (plan.units, plan.columns, plan.shares, plan.layers) if part]
    return {rank for position, rank in enumerate(plan.ranks) if any(part[position] for part in parts)}
