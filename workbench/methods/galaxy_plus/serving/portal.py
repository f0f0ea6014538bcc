"""The portal node of emulated devices: takes requests, has them answered, watches the devices, re-schedules (Galaxy+, section III-E)."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from workbench.core.device_faults import Fault
from workbench.core.errors import RuntimeSetupError
from workbench.core.inference import InferencePlan
from workbench.core.serving import ReschedulingSettings, ServedRequest
from workbench.methods.galaxy_plus.requests import Request
from workbench.methods.galaxy_plus.serving import messages as m
from workbench.methods.galaxy_plus.serving.log import ServingLog
from workbench.methods.galaxy_plus.serving.placement import Placement
from workbench.methods.galaxy_plus.serving.reports import means
from workbench.methods.galaxy_plus.serving.rescheduler import Rescheduler
from workbench.methods.galaxy_plus.serving.samples import Busy, Samples
from workbench.methods.galaxy_plus.serving.stream import RequestQueue, Waiting
from workbench.runtime.commands import Probe, Probed
from workbench.runtime.devices import Fleet, Told
from workbench.runtime.memory import MemoryReading

_TICK_S = 0.05
_MOST_ATTEMPTS = 20
_MEMORY_EVERY_S = 1.0
_WARM_UP = -1
_WARM_UPS = 2
"""Requests before the first that counts: a process does much for the first time then."""

Judge = Callable[[int, Any], bool]
"""(number of the request, its output) -> whether it is the local model's answer."""


@dataclass(slots=True)
class _Attempt:
    """The request in service."""

    request: Waiting
    plan: int
    number: int
    since_s: float


class Portal:
    """Serves one stream; used once.  Times are seconds since the first request was let in.

    requests: served in turn, all of one length.  answered: told of every answer.  memory: of the devices, and last of the portal.
    read_memory: reads it, None of the dead.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        rescheduler: Rescheduler,
        settings: ReschedulingSettings,
        log: ServingLog,
        samples: Samples,
        queue: RequestQueue,
        requests: Sequence[Request],
        judge: Judge,
        answered: Callable[[ServedRequest], None] = lambda request: None,
        read_memory: Callable[[], Sequence[MemoryReading | None]] = tuple,
    ) -> None:
        self._clock, self._read_memory = fleet.now_s, read_memory
        self._fleet, self._placement, self._rescheduler = fleet, placement, rescheduler
        self._settings, self._log, self._samples = settings, log, samples
        self._queue, self._requests, self._judge, self._answered = queue, requests, judge, answered
        self._begin_s = math.inf
        self._num_warm = 0
        self._attempt: _Attempt | None = None
        self._starts: dict[int, float] = {}
        self._num_attempts: dict[int, int] = defaultdict(int)
        self._reports: dict[int, list[Mapping[int, float]]] = defaultdict(list)
        self._reported_s = 0.0
        self._decisions: deque[Callable[[], None]] = deque()
        self._deciding: Future[None] | None = None
        self.memory: list[tuple[float, tuple[int, ...]]] = []
        self.late_s = self.paced_s = 0.0

    def run(self, is_over: Callable[[float], bool] = lambda now_s: False) -> None:
        """Serve until every request was answered, no plan can ever fit again, or is_over (at so many seconds) says so."""
        self._fleet.start()
        with ThreadPoolExecutor(1, thread_name_prefix="re-scheduling") as planning:
            while self._queue.num_left or self._attempt is not None:
                if self._begin_s < math.inf:
                    for fault, begins in self._fleet.inject(self.now_s):
                        self._injected(fault, begins)
                for told in self._fleet.news(self._patience_s()):
                    self._take(told)
                self._decide(planning)
                self._watch()
                self._prepare()
                self._serve()
                if self._is_stuck() or is_over(self.now_s):
                    break
        self._fleet.stop()

    @property
    def now_s(self) -> float:
        """Return the seconds of the service, 0 before it begins."""
        return max(0.0, self._clock() - self._begin_s)

    @property
    def _is_undecided(self) -> bool:
        return self._deciding is not None or bool(self._decisions)

    def _patience_s(self) -> float:
        if self._begin_s == math.inf:
            return _TICK_S
        arrival_s = self._queue.next_arrival_s() if self._attempt is None and self._placement.group.is_whole else None
        soonest_s = min(self._fleet.faults.next_s, math.inf if arrival_s is None else arrival_s)
        return min(_TICK_S, max(0.0005, soonest_s - self.now_s))

    def _is_stuck(self) -> bool:
        return self._rescheduler.wanted < 0 and self._attempt is None and not self._is_undecided and not self._fleet.may_grow

    def _injected(self, fault: Fault, begins: bool) -> None:
        """Note a fault; a device that comes back is noted when it is there."""
        rank, now_s = fault.rank, self.now_s
        if fault.kind == "slow":
            factor = self._fleet.faults.factor(rank)
            self._log.add(now_s, "slowed" if begins else "restored", rank, value=factor)
            self._samples.load(rank, now_s, 1 - 1 / max(1.0, factor))
        elif begins:
            self._log.add(now_s, "killed" if fault.kind == "kill" else "frozen", rank)

    def _take(self, told: Told) -> None:
        rank, now_s = told.rank, self.now_s
        if told.what == "back":
            self._log.add(now_s, "revived", rank)
            self._decisions.append(lambda: self._rescheduler.revived(now_s, rank))
        elif told.what == "lost":
            if rank in self._placement.group.members:
                self._repeat()
            self._placement.was_lost(rank)
            self._decisions.append(lambda: self._rescheduler.lost(now_s, rank))
        elif told.what == "said":
            self._hear(rank, told.content, now_s)

    def _hear(self, rank: int, said: Any, now_s: float) -> None:
        match said:
            case m.Loaded():
                loaded = self._placement.was_loaded(rank, said)
                if loaded is not None:
                    before, detail = self._rescheduler.current, f"{loaded.read_bytes} bytes"
                    self._log.add(now_s, "loaded", before=before, after=loaded.plan, value=loaded.seconds, detail=detail)
            case m.Joined():
                self._placement.has_joined(rank, said)
            case m.Served():
                self._was_served(rank, said, now_s)
            case m.Failed():
                if not said.is_peers:
                    raise RuntimeSetupError(
                        f"Device '{self._fleet.name(rank)}' was serving request {said.number}.", said.error, "See above."
                    )
                if said.epoch == self._placement.group.epoch:
                    self._repeat()
            case m.BlockReport():
                if said.plan == self._rescheduler.current and said.number != _WARM_UP:
                    self._reports[rank].append(said.blocks)
            case Probed():
                slowness = said.slowness
                self._decisions.append(lambda: self._rescheduler.probed(now_s, rank, slowness))

    # What the devices do.

    def _decide(self, planning: ThreadPoolExecutor) -> None:
        """Let the re-scheduler decide, one thing after the other, beside the requests: a plan may take a while."""
        if self._deciding is not None and self._deciding.done():
            self._deciding.result()
            self._deciding = None
        if self._deciding is None and self._decisions:
            self._deciding = planning.submit(self._decisions.popleft())
        if self._deciding is None and self._begin_s < math.inf:
            for rank in self._rescheduler.due_probes(self.now_s):
                self._fleet.command((rank,), Probe(sum(self._requests[0].lengths)))

    def _watch(self) -> None:
        """Listen for signs of life, sample memory, and hand the reports of a period in."""
        now_s, attempt = self.now_s, self._attempt
        if attempt is not None and self._clock() - attempt.since_s > self._settings.request_timeout_s:
            self._repeat()
        self._fleet.listen()
        if not self.memory or now_s - self.memory[-1][0] > _MEMORY_EVERY_S:
            resident = (0 if reading is None else reading.rss_bytes for reading in self._read_memory())
            self.memory.append((now_s, (*resident, psutil.Process().memory_info().rss)))
        if now_s - self._reported_s > self._settings.report_every_s:
            self._hand_in(now_s)

    def _hand_in(self, now_s: float) -> None:
        plan, index = self._rescheduler.plan, self._rescheduler.current
        if self._is_undecided or plan is None or not set(self._reports).issuperset(_computing(plan)):
            return
        self._reported_s = now_s
        # In the middle of a request some devices are a block ahead: what not all have reported is compared among those that have.
        measured = {rank: means(reports) for rank, reports in self._reports.items()}
        self._reports.clear()

        def report() -> None:
            self._rescheduler.report(now_s, index, measured)
            for rank in measured:
                self._samples.slowness(rank, now_s, self._rescheduler.slowness(rank))

        self._decisions.append(report)

    def _prepare(self) -> None:
        """Have the wanted plan's weights read while requests are served; between two requests form its group and switch to it.

        Where a device has no room for the weights of both plans, nothing is served while they are read.
        """
        if self._is_undecided:
            return
        wanted, current = self._rescheduler.wanted, self._rescheduler.current
        if wanted not in (-1, current) and not self._placement.is_loading(wanted, self._log.plans[wanted]):
            in_place = self._placement.is_tight(self._log.plans[wanted])
            if in_place and current >= 0:
                if self._attempt is not None:
                    return
                self._rescheduler.paused(self.now_s)
                current = -1
            self._placement.load(wanted, self._log.plans[wanted], in_place=in_place)
        if self._attempt is not None or self._placement.group.is_forming:
            return
        is_loaded = self._placement.loaded == wanted not in (-1, current)
        if not is_loaded and current < 0:
            return
        ranks = self._log.plans[wanted if is_loaded else current].ranks
        if not self._placement.suits(ranks):
            self._placement.form(ranks)
        elif is_loaded:
            self._rescheduler.switched(self.now_s)
            self._placement.switch()
            self._reports.clear()

    # Requests.

    def _serve(self) -> None:
        current = self._rescheduler.current
        if self._attempt is not None or current < 0:
            return
        plan = self._log.plans[current]
        is_switching = not self._is_undecided and self._placement.loaded == self._rescheduler.wanted != -1
        if is_switching or not self._placement.suits(plan.ranks):
            return
        request = Waiting(_WARM_UP, 0.0) if self._begin_s == math.inf else self._queue.take(self.now_s)
        if request is None:
            return
        self._num_attempts[request.number] += 1
        if self._num_attempts[request.number] > _MOST_ATTEMPTS:
            raise RuntimeSetupError(
                f"Request {request.number} was to be served.", f"{_MOST_ATTEMPTS} attempts failed.", "Look at the events for the reason."
            )
        self._starts.setdefault(request.number, self.now_s)
        self._attempt = attempt = _Attempt(request, current, self._num_attempts[request.number], self._clock())
        content = self._requests[request.number % len(self._requests)]
        for rank in plan.ranks:
            own = content if rank == plan.ranks[0] else content._replace(ids=None, decoder_ids=None)
            self._fleet.command((rank,), m.Serve(request.number, attempt.number, current, self._placement.group.epoch, own))

    def _repeat(self) -> None:
        """Give up the group and the request that it was serving, which is served again."""
        self._placement.break_up()
        attempt, self._attempt = self._attempt, None
        if attempt is not None and attempt.request.number != _WARM_UP:
            self._queue.put_back(attempt.request)
            self._log.add(self.now_s, "repeated", before=attempt.plan, value=attempt.request.number)

    def _was_served(self, rank: int, told: m.Served, now_s: float) -> None:
        attempt = self._attempt
        is_answer = (
            told.output is not None and attempt is not None and (attempt.request.number, attempt.number) == (told.number, told.attempt)
        )
        if is_answer:
            self._attempt = None
        if told.number == _WARM_UP:
            self._num_warm += is_answer
            if self._num_warm == _WARM_UPS and self._begin_s == math.inf:
                self._begin_s = self._clock()
            return
        self._samples.busy(rank, Busy(told.start_s - self._begin_s, told.end_s - self._begin_s, told.busy_s))
        self.late_s += told.late_s
        self.paced_s += told.paced_s
        if not is_answer or attempt is None:
            return
        self._queue.answered(now_s)
        served = ServedRequest(
            number=told.number,
            arrival_s=attempt.request.arrival_s,
            start_s=self._starts.pop(told.number),
            end_s=now_s,
            tokens=self._requests[told.number % len(self._requests)].length,
            plan=told.plan,
            attempts=self._num_attempts.pop(told.number),
            is_right=self._judge(told.number, told.output),
        )
        self._log.requests.append(served)
        self._answered(served)


def _computing(plan: InferencePlan) -> set[int]:
    """Return the devices of a plan that have something to compute, and so to report."""
    parts = [part for part in (plan.units, plan.columns, plan.shares, plan.layers) if part]
    return {rank for position, rank in enumerate(plan.ranks) if any(part[position] for part in parts)}
