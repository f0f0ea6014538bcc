"""A service in virtual time: arrivals, answers, reports, loads, probes and faults as events, with the portal's real decisions."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from workbench.core.cluster import Cluster
from workbench.core.device_faults import Fault, FaultSchedule, never_begun
from workbench.core.inference import InferencePlan, InferenceProfile
from workbench.methods.galaxy_plus.serving.log import Busy, Samples, ServingLog
from workbench.methods.galaxy_plus.serving.records import ReschedulingSettings, ServingReport, StreamSettings
from workbench.methods.galaxy_plus.serving.rescheduler import Planner, Rescheduler, Times, means
from workbench.runtime.virtual_devices import Agenda


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """Properties of virtual devices besides compute.  noise: standard deviation of the logarithm of a reported block time.

    notice_s: until the portal detects that a process has ended.  restart_s: until a killed device's new process answers.
    join_s: to form a group again.  probe_s: of one layer's work.  until_s: the service ends then, answered or not.
    """

    noise: float = 0.0
    seed: int = 0
    notice_s: float = 0.05
    restart_s: float = 2.0
    join_s: float = 0.05
    probe_s: float = 0.05
    until_s: float = math.inf


def simulate_serving(
    profile: InferenceProfile,
    cluster: Cluster,
    planner: Planner,
    times: Times,
    *,
    stream: StreamSettings,
    rescheduling: ReschedulingSettings | None = None,
    faults: Sequence[Fault] = (),
    world: SimulatedWorld | None = None,
) -> ServingReport:
    """Return the simulated report of serving the stream.

    planner, times: see service.planner_of and service.simulated_times.  Weights are read at Device.storage_bytes_per_s.
    Raises PlanError if no plan fits the whole cluster.
    """
    settings = rescheduling or ReschedulingSettings()
    log, samples = ServingLog(arrivals_s=stream.arrival_times()), Samples(cluster.world_size)
    _VirtualPortal(profile, cluster, planner, times, stream, settings, faults, world or SimulatedWorld(), log, samples).run()
    notes = never_begun(faults, cluster, log.end_s)
    return log.report(
        samples,
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
    """Return the bytes that a device reads from its disk to switch plans (Galaxy+, section III-E2): weights in memory are reused."""
    held = itertools.zip_longest(_held_bytes(old, profile, rank), _held_bytes(new, profile, rank), fillvalue=0)
    return sum(max(0, after - before) for before, after in held)


def _held_bytes(plan: InferencePlan | None, profile: InferenceProfile, rank: int) -> list[int]:
    """Return the bytes of embedding and head, and of attention, feed-forward network and norms in each layer; nothing outside the plan."""
    position = None if plan is None else plan.position_of(rank)
    if plan is None or position is None:
        return []
    found = [profile.first_bytes + profile.last_bytes if position == 0 else 0]
    for shape, count, units, columns in plan.parts(profile.stacks):
        held = units[position] * (shape.unit_bytes + shape.cross_unit_bytes), columns[position] * shape.column_bytes
        found += count * [*held, shape.layer_bytes if any(held) else 0]
    return found


@dataclass(slots=True)
class _Attempt:
    """The request in service.  done: the finished fraction of its work, as of time since_s.

    num_reported: blocks that the devices have reported, which they also do in the middle of a long request.
    """

    plan: int
    since_s: float
    done: float = 0.0
    ticket: int = 0
    num_reported: int = 0


@dataclass(slots=True)
class _VirtualPortal:
    """One service; used once.  The log has its results."""

    profile: InferenceProfile
    cluster: Cluster
    planner: Planner
    times: Times
    stream: StreamSettings
    settings: ReschedulingSettings
    faults: Sequence[Fault]
    world: SimulatedWorld
    log: ServingLog
    samples: Samples

    _portal: Rescheduler = field(init=False)
    _injected: FaultSchedule = field(init=False)
    _agenda: Agenda = field(default_factory=Agenda)
    _tickets: itertools.count = field(default_factory=itertools.count)
    _draws: random.Random = field(init=False)
    _attempt: _Attempt | None = None
    _down: set[int] = field(default_factory=set)
    _loading: int = -1
    _ready: int = -1
    _held: dict[int, int] = field(default_factory=dict)  # by rank: the plan whose weights it has loaded
    _served: dict[int, list[Mapping[int, float]]] = field(default_factory=lambda: defaultdict(list))
    _probes_s: float = 0.0

    def run(self) -> None:
        """Serve until every request was answered, no event is left, or the time is over."""
        self._draws = random.Random(self.world.seed)
        self._injected = FaultSchedule(self.faults)
        self._portal = Rescheduler(self.settings, self.cluster.world_size, self.planner, self.times, self.log)
        self._switch()
        for fault in self.faults:
            for moment_s in (fault.start, fault.end):
                if moment_s is not None:
                    self._agenda.at(moment_s, self._inject)
        self._agenda.at(self.settings.report_every_s, self._report)
        self._serve_next()
        while self._agenda and self._agenda.next_s <= self.world.until_s and len(self.log.requests) < self.stream.num_requests:
            self._agenda.step()
            self._probe()
            self._load()

    @property
    def now_s(self) -> float:
        """Return the virtual seconds."""
        return self._agenda.now_s

    def _factors(self) -> dict[int, float]:
        factors = {rank: self._injected.factor(rank) for rank in range(self.cluster.world_size)}
        return {rank: factor for rank, factor in factors.items() if factor != 1}

    # Requests

    def _serve_next(self) -> None:
        """Begin the next request under the newest loaded plan, or schedule the next attempt."""
        if self._attempt is not None:
            return
        if self._ready == self._portal.wanted != self._portal.current:
            self._switch()
        plan = self._portal.plan
        if plan is None or not self._down.isdisjoint(plan.ranks):
            return  # the event that repairs this calls again; the portal may not know yet that a device is down
        if len(self.log.requests) == self.stream.num_requests:
            return
        if self.log.arrival_s > self.now_s:
            self._agenda.at(self.log.arrival_s, self._serve_next)
            return
        self.log.attempted(self.now_s)
        self._attempt = _Attempt(self._portal.current, self.now_s)
        self._schedule_answer()

    def _switch(self) -> None:
        self._portal.switched(self.now_s, self._portal.wanted)
        self._ready = -1
        for rank in self.log.plans[self._portal.current].ranks:
            self._held[rank] = self._portal.current

    def _schedule_answer(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        attempt.ticket = ticket = next(self._tickets)
        whole_s = self.times(self.log.plans[attempt.plan], self._factors()).seconds
        self._agenda.at(self.now_s + (1 - attempt.done) * whole_s, lambda: self._answer(ticket))

    def _advance(self) -> None:
        """Update the work done by the devices up to now, at their speed so far."""
        attempt = self._attempt
        if attempt is None:
            return
        cost = self.times(self.log.plans[attempt.plan], self._factors())
        part = (self.now_s - attempt.since_s) / cost.seconds if cost.seconds else 1.0
        for rank, blocks in cost.blocks.items():
            self.samples.busy(rank, Busy(attempt.since_s, self.now_s, part * sum(blocks.values())))
        attempt.done, attempt.since_s = min(1.0, attempt.done + part), self.now_s
        numbers = sorted({block for blocks in cost.blocks.values() for block in blocks})
        over = numbers[attempt.num_reported : int(attempt.done * len(numbers) + 1e-9)]
        attempt.num_reported += len(over)
        for rank, blocks in cost.blocks.items():
            noisy = {block: blocks[block] * math.exp(self._draws.gauss(0.0, self.world.noise)) for block in over if block in blocks}
            if noisy:
                self._served[rank].append(noisy)

    def _answer(self, ticket: int) -> None:
        attempt = self._attempt
        if attempt is None or attempt.ticket != ticket:
            return  # interrupted, or its speed has changed since
        self._advance()
        tokens = self.stream.length or self.log.plans[attempt.plan].length
        self.log.answered(self.now_s, tokens=tokens, plan=attempt.plan)
        self._attempt = None
        self._serve_next()

    def _repeat(self) -> None:
        """Put the request in service back: a device of its plan was lost."""
        attempt = self._attempt
        if attempt is not None:
            self._advance()
            self._attempt = None
            self.log.repeated(self.now_s, attempt.plan)

    # Reports, probes, plans

    def _report(self) -> None:
        self._advance()
        measured = {rank: means(reports) for rank, reports in self._served.items() if reports}
        self._served.clear()
        if measured:
            self._portal.report(self.now_s, self._portal.current, measured)
        for rank in range(self.cluster.world_size):
            self.samples.slowness(rank, self.now_s, self._portal.slowness(rank))
        if self._agenda or self._attempt is not None:  # otherwise no event can follow
            self._agenda.at(self.now_s + self.settings.report_every_s, self._report)

    def _probe(self) -> None:
        for rank in self._portal.due_probes(self.now_s):
            if rank not in self._down:
                slowness = self._factors().get(rank, 1.0) * math.exp(self._draws.gauss(0.0, self.world.noise))
                self._agenda.at(self.now_s + slowness * self.world.probe_s, partial(self._probed, rank, slowness))
        due_s = self._portal.next_probe_s()
        if due_s < math.inf and due_s != self._probes_s:
            self._probes_s = due_s
            self._agenda.at(due_s, lambda: None)

    def _probed(self, rank: int, slowness: float) -> None:
        if rank not in self._down:
            self._portal.probed(self.now_s, rank, slowness)

    def _load(self) -> None:
        """Begin to read the wanted plan's weights, unless that is in progress; serving continues meanwhile."""
        wanted = self._portal.wanted
        if wanted in (-1, self._portal.current, self._loading, self._ready):
            return
        self._loading = wanted
        plan, begin_s = self.log.plans[wanted], self.now_s
        held = {rank: self.log.plans[number] for rank, number in self._held.items()}
        nbytes = {rank: bytes_to_read(held.get(rank), plan, self.profile, rank) for rank in plan.ranks}
        seconds = max(nbytes[rank] / self.cluster.devices[rank].storage_bytes_per_s for rank in plan.ranks) + self.world.join_s
        self._agenda.at(self.now_s + seconds, lambda: self._loaded(wanted, begin_s, sum(nbytes.values())))

    def _loaded(self, plan: int, begin_s: float, nbytes: int) -> None:
        if self._loading != plan:
            return
        self._loading = -1
        if plan != self._portal.wanted or not self._down.isdisjoint(self.log.plans[plan].ranks):
            return
        self.log.add(self.now_s, "loaded", before=self._portal.current, after=plan, value=self.now_s - begin_s, detail=f"{nbytes} bytes")
        self._ready = plan
        self._serve_next()

    # Faults

    def _inject(self) -> None:
        self._advance()
        for fault, begins in self._injected.due(self.now_s):
            if fault.kind != "slow":
                self._end(fault) if begins else self._agenda.at(self.now_s + self.world.restart_s, partial(self._revive, fault.rank))
                continue
            self.samples.load(fault.rank, self.now_s, 1 - 1 / max(1.0, self._injected.factor(fault.rank)))
            self.log.add(self.now_s, "slowed" if begins else "restored", fault.rank, value=fault.factor if begins else 0.0)
            if self._attempt is not None:
                self._schedule_answer()

    def _end(self, fault: Fault) -> None:
        self.log.add(self.now_s, "killed" if fault.kind == "kill" else "frozen", fault.rank)
        self._down.add(fault.rank)
        notice_s = self.world.notice_s if fault.kind == "kill" else self.settings.silence_s
        if self._attempt is not None and fault.rank in self.log.plans[self._attempt.plan].ranks:
            self._attempt.ticket = -1  # it will not end
        self._agenda.at(self.now_s + notice_s, lambda: self._lost(fault.rank))

    def _lost(self, rank: int) -> None:
        if rank not in self._down:
            return  # back already
        if self._attempt is not None and rank in self.log.plans[self._attempt.plan].ranks:
            self._repeat()
        self._held.pop(rank, None)
        self._loading = self._ready = -1  # a half-loaded plan may depend on the device
        self._portal.lost(self.now_s, rank)
        self._serve_next()

    def _revive(self, rank: int) -> None:
        if rank in self._portal.alive:  # its end was not detected yet
            self._lost(rank)
        self._down.discard(rank)
        self.log.add(self.now_s, "revived", rank)
        self._portal.revived(self.now_s, rank)
        self._serve_next()
