"""One job running on all engines: its answers, failures, pending ranks and the error to report."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.core.errors import ConfigError, DeviceLostError, RuntimeSetupError
from workbench.runtime.context import RankContext
from workbench.runtime.engine_session import EngineSession
from workbench.runtime.jobs import DONE, Outcome, error_of, only_peers_blamed, root_cause, run_job

if TYPE_CHECKING:
    import ipyparallel

_POLL_S = 0.05
# After the first failure, the other ranks get this long to end on their own, and perhaps to report a better cause.
_GRACE_S = 2.0
FROZEN_S = 20.0
"""An engine that stays stopped (SIGSTOP) for this long is given up."""


class EngineRun:
    """Runs one job; cannot be reused.  request_stop: makes should_stop() true on the job's ranks."""

    def __init__(
        self,
        session: EngineSession,
        contexts: Sequence[RankContext],
        function: Callable[..., Any],
        *,
        on_event: Callable[[int, Any], None] | None,
        request_stop: Callable[[], None],
    ) -> None:
        self.session = session
        self.contexts = contexts
        self.function = function
        self.request_stop = request_stop
        self.name = getattr(function, "__name__", "the job")
        self.on_event = on_event
        self.replies: dict[int, ipyparallel.AsyncResult] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.failures: dict[int, BaseException] = {}
        self.died: set[int] = set()
        self.done: set[int] = set()
        self.last_events: dict[int, Any] = {}
        self._frozen_since_s: dict[int, float] = {}
        self._looked_s = 0.0

    @property
    def pending(self) -> list[int]:
        """Return the ranks that have neither answered nor failed."""
        return [rank for rank in self.replies if rank not in self.outcomes and rank not in self.failures]

    def results(self, payloads: Sequence[Any], timeout_s: float | None) -> list[Any]:
        """Send the job to all ranks and wait; return their results or raise the root cause of a failure."""
        self._send(payloads)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        grace_s: float | None = None
        while self.pending:
            # A rank that reported completion has already sent its answer: check for it soon.
            self._take_events(0.002 if self.done.intersection(self.pending) else _POLL_S)
            self._take_answers()
            now_s = time.monotonic()
            self._watch_frozen(now_s)
            if self.failures and grace_s is None:
                grace_s = now_s + _GRACE_S
                self.request_stop()
            if grace_s is not None and now_s > grace_s:
                break
            if deadline_s is not None and now_s > deadline_s and not self.failures:
                names = ", ".join(repr(self.contexts[rank].device.name) for rank in self.pending)
                raise RuntimeSetupError(
                    f"The job {self.name} was given {timeout_s:g} s.",
                    f"It had not ended on {names}.",
                    "Raise timeout_s, or look for what these devices wait for.",
                )
        if self.failures:
            self._blame_the_silent()
            raise self.failures[root_cause(self.failures, frozenset(self.died))]
        self._take_last_events()
        client = self.session.client
        assert client is not None
        client.purge_local_results("all")  # otherwise the client keeps every answer
        return [self.outcomes[rank].result for rank in range(len(payloads))]

    def abort(self) -> None:
        """Ask the pending ranks to end and wait briefly.  `over` says whether all of them did."""
        self.request_stop()
        deadline_s = time.monotonic() + (0.0 if self.failures else _GRACE_S)
        while self.pending and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            self._take_answers()

    @property
    def over(self) -> bool:
        """Return whether every engine has ended the job and can accept another."""
        return not self.pending and self.session.healthy

    def _send(self, payloads: Sequence[Any]) -> None:
        function = self._portable_function()
        client = self.session.client
        assert client is not None
        for rank, (context, payload) in enumerate(zip(self.contexts, payloads, strict=True)):
            try:
                request = pickle.dumps((context, payload))
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"A payload for device '{context.device.name}' was given.",
                    f"It cannot be pickled: {error}.",
                    "Send data, not live objects.",
                ) from error
            self.replies[rank] = client[rank].apply_async(run_job, request, function, self.session.events_address)

    def _portable_function(self) -> Any:
        """Return the function pickled by reference.  A function defined in a notebook is returned as it is: ipyparallel sends its code."""
        if getattr(self.function, "__module__", "__main__") == "__main__":
            return self.function
        try:
            return pickle.dumps(self.function)
        except (pickle.PicklingError, AttributeError, TypeError):
            return self.function

    def _take_events(self, timeout_s: float) -> None:
        for rank, generation, kind, event in self.session.receive(timeout_s):
            if generation != self.contexts[rank].generation:
                continue  # from an abandoned job
            if kind == DONE:
                self.done.add(rank)
                continue
            self.last_events[rank] = event
            if self.on_event is not None:
                self.on_event(rank, event)

    def _watch_frozen(self, now_s: float) -> None:
        """Give up an engine that lives but is suspended: its peers may wait for it without a time-out."""
        if now_s < self._looked_s + 0.5:
            return
        self._looked_s = now_s
        for rank in self.pending:
            if not self.session.engines[rank].frozen:
                self._frozen_since_s.pop(rank, None)
            elif now_s - self._frozen_since_s.setdefault(rank, now_s) > FROZEN_S:
                self.died.add(rank)
                self.session.engines[rank].kill()
                self.failures[rank] = self._lost(rank, f"Its engine has been frozen for {FROZEN_S:g} s.")

    def _blame_the_silent(self) -> None:
        """Name the device that does not answer when all other devices only report an unresponsive peer."""
        if self.pending and not self.died and only_peers_blamed(self.failures):
            frozen = [rank for rank in self.pending if self.session.engines[rank].frozen]
            raise self._lost((frozen or self.pending)[0], "It fell silent: its peers waited for it until the group's timeout.")

    def _take_last_events(self) -> None:
        """Receive the last events of the ranks, which travel over a different channel than their answers."""
        deadline_s = time.monotonic() + 0.5
        while len(self.done) < len(self.replies) and time.monotonic() < deadline_s:
            self._take_events(0.01)

    def _take_answers(self) -> None:
        for rank in self.pending:
            device = self.contexts[rank].device
            engine = self.session.engines[rank]
            alive = engine.alive  # checked before the answer: an engine may answer and then end
            if self.replies[rank].ready():
                try:
                    outcome: Outcome = pickle.loads(self.replies[rank].get())
                except Exception as error:
                    self.failures[rank] = RuntimeSetupError(
                        f"The job {self.name} was sent to device '{device.name}'.",
                        f"Its engine could not take it or answer: {error}.",
                        "See the note.",
                    )
                    continue
                if outcome.error is None:
                    self.outcomes[rank] = outcome
                else:
                    self.failures[rank] = error_of(outcome, device.name)
            elif not alive:
                self.died.add(rank)
                self._take_events(0.001)  # its last events may still be queued
                self.failures[rank] = self._lost(rank, f"Its engine (process {engine.pid}) was killed or crashed.")

    def _lost(self, rank: int, found: str) -> DeviceLostError:
        """Return the error for a lost engine, with the last step that it reported (both numbers from 1, as in progress reports)."""
        event = self.last_events.get(rank)
        event = event if isinstance(event, Mapping) else {}
        place = ", ".join(f"{name} {event[name] + 1}" for name in ("epoch", "step") if event.get(name) is not None)
        return DeviceLostError(
            f"Device '{self.contexts[rank].device.name}' (rank {rank}) was running {self.name}, "
            f"{place or 'before its first step was reported'}.",
            found,
            "The devices were stopped and cleaned up; run again: engines restart by themselves.",
        )
