"""Run one job on all engines, and report the root cause of its failure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.errors import DeviceLostError, WorkbenchError

if TYPE_CHECKING:
    from workbench.runtime.devices import Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a job on one rank.  error: the exception, None if the job returned; text: the remote traceback."""

    rank: int
    result: Any = None
    error: BaseException | None = None
    text: str = ""


_PEERS_FAULT = 3


def root_cause(failures: Mapping[int, BaseException], died: frozenset[int] = frozenset()) -> int:
    """Return the rank whose error explains the other errors.

    A process that died has priority, then a device's report about itself, then reports about peers.
    """
    return min(failures, key=lambda rank: (rank not in died, _remoteness(failures[rank]), rank))


def only_peers_blamed(failures: Mapping[int, BaseException]) -> bool:
    """Return whether every error reports an unresponsive peer, and none a fault of the reporting device."""
    return all(_remoteness(error) == _PEERS_FAULT for error in failures.values())


def error_of(outcome: Outcome, name: str) -> BaseException:
    """Return a rank's error with the device named: in the first part of a WorkbenchError, otherwise in a note."""
    error = outcome.error
    assert error is not None
    if isinstance(error, WorkbenchError):
        if f"'{name}'" not in str(error):
            named = type(error)(f"On device '{name}': {error.asked}", error.found, error.todo)
            named.add_note(outcome.text)
            return named
        error.add_note(outcome.text)
        return error
    error.add_note(f"On device '{name}' (rank {outcome.rank}):\n{outcome.text}")
    return error


def tells_of_peer(error: BaseException) -> bool:
    """Return whether an error, ours or gloo's, says that another device is lost."""
    if isinstance(error, DeviceLostError):
        return True
    text = f"{type(error).__name__}: {error}".lower()
    from_gloo = any(mark in text for mark in ("gloo", "connection", "peer", "timed out"))
    return not isinstance(error, WorkbenchError) and (from_gloo or text.startswith(("dist", "runtimeerror: dist")))


def _remoteness(error: BaseException) -> int:
    """Rank an error: 1 a WorkbenchError about this device, 2 another exception, 3 a peer's fault."""
    if tells_of_peer(error):
        return _PEERS_FAULT
    return 1 if isinstance(error, WorkbenchError) else 2


_POLL_S = 0.05
GRACE_S = 2.0
"""After the first failure, the other ranks get this long to end on their own, and perhaps to report a better cause."""
FROZEN_S = 20.0
"""An engine that stays stopped (SIGSTOP) for this long is given up."""


class WholeJob:
    """One job on all engines, emulated or real: its answers, failures and pending ranks; cannot be reused.  names: of the devices."""

    def __init__(
        self,
        service: Service,
        names: Sequence[str],
        function: Callable[..., Any],
        on_event: Callable[[int, Any], None] | None,
    ) -> None:
        self.service, self.names, self.function, self.on_event = service, names, function, on_event
        self.name = getattr(function, "__name__", "the job")
        self.results_of: dict[int, Any] = {}
        self.failures: dict[int, BaseException] = {}
        self.died: set[int] = set()
        self.last_events: dict[int, Any] = {}
        self._frozen_since_s: dict[int, float] = {}
        self._looked_s = 0.0

    @property
    def pending(self) -> list[int]:
        """Return the ranks that have neither answered nor failed."""
        return [rank for rank in self.service.running if rank not in self.failures]

    def results(self, payloads: Sequence[Any]) -> list[Any]:
        """Send the job to all ranks and wait; return their results or raise the root cause of a failure."""
        for rank, payload in enumerate(payloads):
            self.service.start(rank, self.function, payload)
        grace_s: float | None = None
        while self.pending:
            self._take_news()
            now_s = time.monotonic()
            self._watch_frozen(now_s)
            if self.failures and grace_s is None:
                grace_s = now_s + GRACE_S
                self.service.request_stop()
            if grace_s is not None and now_s > grace_s:
                break
        if self.failures:
            self._blame_the_silent()
            raise self.failures[root_cause(self.failures, frozenset(self.died))]
        return [self.results_of[rank] for rank in range(len(payloads))]

    def _take_news(self) -> None:
        for rank, kind, content in self.service.news(_POLL_S):
            if kind == "event":
                self.last_events[rank] = content
                if self.on_event is not None:
                    self.on_event(rank, content)
            elif kind == "died":
                self.died.add(rank)
                self.failures.setdefault(rank, self._lost(rank, f"It is lost: {content or 'its engine was killed or crashed.'}"))
            elif content.error is None:
                self.results_of[rank] = content.result
            else:
                self.failures[rank] = error_of(content, self.names[rank])

    def _watch_frozen(self, now_s: float) -> None:
        """Give up an engine that lives but is suspended: its peers may wait for it without a time-out."""
        if now_s < self._looked_s + 0.5:
            return
        self._looked_s = now_s
        for rank in self.pending:
            if not self.service.is_frozen(rank):
                self._frozen_since_s.pop(rank, None)
            elif now_s - self._frozen_since_s.setdefault(rank, now_s) > FROZEN_S:
                self.died.add(rank)
                self.service.kill(rank)
                self.failures[rank] = self._lost(rank, f"Its engine has been frozen for {FROZEN_S:g} s.")

    def _blame_the_silent(self) -> None:
        """Name the device that does not answer when all other devices only report an unresponsive peer."""
        if self.pending and not self.died and only_peers_blamed(self.failures):
            frozen = [rank for rank in self.pending if self.service.is_frozen(rank)]
            raise self._lost((frozen or self.pending)[0], "It fell silent: its peers waited for it until the group's timeout.")

    def _lost(self, rank: int, found: str) -> DeviceLostError:
        """Return the error for a lost engine, with the last step that it reported (both numbers from 1, as in progress reports)."""
        event = self.last_events.get(rank)
        event = event if isinstance(event, Mapping) else {}
        place = ", ".join(f"{name} {event[name] + 1}" for name in ("epoch", "step") if isinstance(event.get(name), int))
        return DeviceLostError(
            f"Device '{self.names[rank]}' (rank {rank}) was running {self.name}, {place or 'before its first step was reported'}.",
            found,
            "Run again: engines restart by themselves.",
        )
