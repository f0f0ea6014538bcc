"""Run jobs on the engines of a cluster, emulated or real: one job on all devices, or a separate long-lived one on each.

The slots start, reach and end the engines (see engine_slots.EngineSlot).
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, DeviceLostError, GroupNotFormedError, RuntimeSetupError
from workbench.core.threads import in_background
from workbench.runtime import commands as c
from workbench.runtime.context import RankContext
from workbench.runtime.devices import News
from workbench.runtime.engine_slots import EngineSlot, Inbox
from workbench.runtime.jobs import error_of, only_peers_blamed, root_cause
from workbench.runtime.memory import MemoryReading
from workbench.runtime.messages import Call, CallMessage, CallTable, encode, encode_message
from workbench.runtime.own_calls import Own, outcome_of, run_own
from workbench.runtime.watch import SILENCE_S, Watch

R = TypeVar("R")
P = TypeVar("P")

_CLOSE_S = 10.0
"""Time-out for jobs that were told to end."""
_POLL_S = 0.05
GRACE_S = 2.0
"""After the first failure of a call, the other devices get this long to end by themselves, and perhaps to report a
better cause."""
FROZEN_S = 20.0
"""A device that is silent for so long during a call is given up: its peers may wait for it without a time-out."""


class Engines(ABC):
    """The engines of a cluster, one for each device.  `run` and `service` may be used any number of times, one at a
    time.

    patience_s: after a failed run, how long to wait for its jobs before their engines are ended.
    silence_s: a device that does not reply to its coordinator for longer counts as lost.  timeout_s: the shortest
    time-out of its jobs.
    loses_devices: whether a run continues without a lost device.
    fidelity: 'kernel' or 'paced' for emulated devices, 'real' for real ones, which are not slowed down.
    slots: the devices by rank; empty if no engine runs.
    table: the functions that the engines may call.  is_watched: see RankContext; from the next job on.
    """

    patience_s = _CLOSE_S
    silence_s = SILENCE_S
    timeout_s = 0.0
    loses_devices = True
    is_watched = False
    fidelity: Any
    slots: Sequence[EngineSlot] = ()
    table: CallTable

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.inbox = Inbox(cluster.world_size)
        self.number = 0  # of jobs
        self._busy = threading.Lock()

    def call(self, function: Callable[..., Any], payload: Any) -> tuple[Call, Any]:
        """Return a function's entry in the call table, and its payload.  Raises RuntimeSetupError for a function that
        these engines may not call.
        """
        return self.table.call(function), payload

    @abstractmethod
    def context(self, rank: int) -> RankContext:
        """Return the context of a rank's next job."""

    @abstractmethod
    def now_s(self) -> float:
        """Return the monotonic clock in the devices' seconds."""

    def slowed(self, rank: int, slow: c.Slow) -> c.Slow:
        """Slow a rank's messages to a device as far as its links can; return the rest, which the device must do: by
        default everything.
        """
        return slow

    @abstractmethod
    def _prepare(self) -> None:
        """Make sure that every device has an idle engine.  Raises RuntimeSetupError."""

    @abstractmethod
    def _finish(self, busy: Sequence[int]) -> None:
        """Clean up after a service.  busy: the ranks whose engines did not end their jobs."""

    @abstractmethod
    def _give_up(self) -> None:
        """Replace the engines before the next job."""

    def run(
        self,
        function: Callable[[RankContext, P], R],
        payloads: Sequence[P],
        *,
        on_event: Callable[[int, Any], None] | None = None,
    ) -> list[R]:
        """Run function(context, payloads[rank]) on every device at once; return the results by rank.

        on_event(rank, event): called in this process with the events that ranks publish.
        Raises the device's own WorkbenchError, DeviceLostError when a device or its engine is lost, RuntimeSetupError,
        or another error of the function with a note that names the device.
        If the job's process group does not form before any rank has published an event, the job runs once more on new
        engines.
        """
        if len(payloads) != self.cluster.world_size:
            raise ConfigError(
                f"A job with {len(payloads)} payloads was asked for.",
                f"The cluster has {self.cluster.in_words}.",
                "Give one each.",
            )
        is_again = False
        while True:
            try:
                with self.service(function, payloads) as service:
                    calls = Calls(service, self.cluster.names, getattr(function, "__name__", "the job"), on_event)
                    return calls.results()
            except GroupNotFormedError:
                if is_again or calls.last_events:
                    raise
            # Seen on busy machines: gloo's connections hang in one process, and then in every later group of that
            # process.
            self._give_up()
            is_again = True

    @contextlib.contextmanager
    def service(self, function: Callable[..., Any], payloads: Sequence[Any] = ()) -> Iterator[EngineService]:
        """Lend the engines to a service: a separate job on each engine, which may die and be restarted while the others
        continue.

        The job is function(context, payloads[rank]); without payloads each is None.

        Afterwards the engines can be used as before.  Engines that do not end their jobs are restarted.
        Raises RuntimeSetupError while another job runs.
        """
        if not self._busy.acquire(blocking=False):
            raise RuntimeSetupError(
                "A job was asked for.",
                "These engines are running another.",
                "Wait for it.",
            )
        try:
            self._prepare()
            self.inbox.renew()
            service = EngineService(self, function, payloads)
            patience_s = self.patience_s
            try:
                yield service
                patience_s = _CLOSE_S
            finally:
                try:
                    service.close(patience_s)
                finally:
                    self._finish(sorted(service.running))
        finally:
            self._busy.release()


class EngineService:
    """The devices.Devices of engines, each with its job (see Engines.service).  Used from one thread.

    running: the ranks whose job has neither ended nor died, as far as `news` has reported.
    """

    def __init__(self, engines: Engines, function: Callable[..., Any], payloads: Sequence[Any]) -> None:
        self._engines, self._inbox = engines, engines.inbox
        self._function, self._payloads = function, payloads
        self.silence_s, self.timeout_s, self.is_real = engines.silence_s, engines.timeout_s, engines.fidelity == "real"
        self.now_s = engines.now_s
        self.running: set[int] = set()
        self._restarts: set[int] = set()
        self._closing = threading.Event()

    def start(self, rank: int) -> None:
        """Start the job of one engine, which must be idle.  Raises ConfigError for a payload that is not plain data."""
        slot = self._engines.slots[rank]
        call, content = self._engines.call(self._function, self._payloads[rank] if self._payloads else None)
        paths: list[Any] = []
        encoded = encode(content, paths)
        self._engines.number += 1
        context = self._engines.context(rank)
        slot.call, slot.number = call, context.generation
        self.running.add(rank)
        if slot.why:  # lost since it was looked at
            self._inbox.put(rank, "died", slot.why)
        slot.bring(paths)
        slot.send("call", encode(CallMessage(function=call.name, context=context, payload=encoded)), slot.number)

    def command(self, rank: int, content: Any) -> bool:
        """Send the files that a command names and then the command to a rank's job.  Returns False if the rank has no
        job.

        A ping would wait behind files.  So while files are being sent, the connection itself detects a silent device.
        """
        slot = self._engines.slots[rank]
        if rank not in self.running or slot.call is None or not slot.is_connected:
            return False
        if isinstance(content, c.Ping) and slot.is_sending:
            self._inbox.put(rank, "event", slot.pong)
            return True
        if isinstance(content, c.Slow) and content.to:
            content = self._engines.slowed(rank, content)
        paths: list[Any] = []
        is_own = slot.call.function is run_own and not isinstance(content, c.Ping)  # which the engine itself answers
        data = encode_message(Own.of(content) if is_own else content, paths)
        if isinstance(content, c.Train):
            slot.bring(paths)
        slot.send("command", data, slot.number)
        return True

    def news(self, timeout_s: float) -> list[News]:
        """Return the events since the last call.  Waits up to timeout_s for the first one."""
        for slot in self._engines.slots:
            slot.look()
        news = []
        for rank, kind, content in self._inbox.take(timeout_s):
            if kind == "restarted":
                self._restarts.discard(rank)
                news.append(News(rank, "restarted", content))
            elif rank not in self.running:
                continue
            elif kind == "event":
                news.append(News(rank, "event", content.value() if isinstance(content, Own) else content))
            elif kind == "died":
                self.running.discard(rank)
                news.append(News(rank, "died", content))
            else:
                self.running.discard(rank)
                news.append(News(rank, "ended", outcome_of(content)))
        return news

    def kill(self, rank: int) -> None:
        """End a rank's engine at once."""
        self._engines.slots[rank].kill()

    def freeze(self, rank: int) -> None:
        """Suspend a rank's engine without ending it.  It stops answering."""
        self._engines.slots[rank].freeze()

    def restart(self, rank: int) -> None:
        """Restart a rank's engine in the background, ending any remains of it.  `news` reports when it is up.

        A real device that cannot be reached is tried again for a while.
        """
        if rank in self._restarts:
            return
        self._restarts.add(rank)
        self.running.discard(rank)
        slot = self._engines.slots[rank]

        def work() -> None:
            deadline_s = time.monotonic() + slot.return_s
            while True:
                error: BaseException | None = None
                try:
                    slot.open()
                    slot.wait()
                except BaseException as failure:  # reported by `news`
                    error = failure
                if error is None or time.monotonic() > deadline_s or self._closing.wait(1.0):
                    break
            self._inbox.put(rank, "restarted", error)

        in_background(work, name=f"restart {rank}")

    def cpu_s(self, rank: int) -> float:
        """Return the processor seconds used by a rank's engine.  0 if unknown."""
        return self._engines.slots[rank].cpu_s

    def memory(self) -> tuple[MemoryReading | None, ...]:
        """Return the engines' memory by rank.  None for lost devices."""
        return tuple(slot.memory for slot in self._engines.slots)

    def request_stop(self) -> None:
        """Make should_stop() true on every rank that has a job.  May be called from any thread."""
        for rank in tuple(self.running):
            slot = self._engines.slots[rank]
            slot.send("stop", number=slot.number)

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Ask the jobs to end, give up restarts, and wait for both.  Afterwards `running` has the ranks whose jobs have
        not ended.
        """
        deadline_s = time.monotonic() + timeout_s
        self._closing.set()
        for rank in tuple(self._restarts):
            self._engines.slots[rank].close()
        self.request_stop()
        while (self.running or self._restarts) and time.monotonic() < deadline_s:
            self.news(0.02)


class Calls(Watch):
    """One call on each device, all at once (see Engines.run).

    purpose: the function's name.  last_events: the last event of each device.
    """

    def __init__(
        self, service: EngineService, names: Sequence[str], purpose: str, on_event: Callable[[int, Any], None] | None
    ) -> None:
        super().__init__(service, names, FROZEN_S)
        self._service, self._what, self._on_event = service, purpose, on_event
        self._results: dict[int, Any] = {}
        self._failures: dict[int, BaseException] = {}
        self._died: set[int] = set()
        self.last_events: dict[int, Any] = {}

    def results(self) -> list[Any]:
        """Wait for all devices; return what they return, or raise the error that explains the others."""
        for rank in range(len(self._names)):
            self._service.start(rank)
        grace_s: float | None = None
        while (pending := self._pending) and (grace_s is None or time.monotonic() < grace_s):
            for news in self._service.news(_POLL_S):
                self._take(news)
            self.ping(self._pending)
            if self._failures and grace_s is None:
                grace_s = time.monotonic() + GRACE_S
                self._service.request_stop()
        if pending and not self._died and only_peers_blamed(self._failures):
            raise self._lost(self.silent(pending), "It fell silent: its peers waited for it until the group's timeout.")
        if self._failures:
            raise self._failures[root_cause(self._failures, frozenset(self._died))]
        return [self._results[rank] for rank in range(len(self._names))]

    @property
    def _pending(self) -> list[int]:
        """Return the ranks that have neither answered nor failed."""
        return [rank for rank in range(len(self._names)) if rank not in self._results and rank not in self._failures]

    def _take(self, news: News) -> None:
        rank, kind, content = news
        if kind == "event" and isinstance(content, c.Pong):
            self.replied(rank, content)
        elif kind == "event":
            self.last_events[rank] = content
            if self._on_event is not None:
                self._on_event(rank, content)
        elif kind == "died":
            self._died.add(rank)
            self.forget(rank, content)
            why = self.reasons.get(rank, "its engine was killed or crashed").rstrip(".")
            self._failures.setdefault(rank, self._lost(rank, f"It is lost: {why}."))
        elif content.error is None:
            self.forget(rank, None)
            self._results[rank] = content.result
        else:
            self.forget(rank, None)
            self._failures[rank] = error_of(content, self._names[rank])

    def _lost(self, rank: int, problem: str) -> DeviceLostError:
        """Return the error for a lost engine, with the last step that it reported (both numbers from 1, as in progress
        reports).
        """
        event = self.last_events.get(rank)
        event = event if isinstance(event, Mapping) else {}
        place = ", ".join(f"{name} {event[name] + 1}" for name in ("epoch", "step") if isinstance(event.get(name), int))
        return DeviceLostError(
            f"Device '{self._names[rank]}' (rank {rank}) was running {self._what}, "
            f"{place or 'before its first step was reported'}.",
            problem,
            "Run again: engines restart by themselves.",
        )
