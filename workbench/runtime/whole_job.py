"""One job on all engines, emulated or real: its answers, failures, pending ranks and the error to report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.core.errors import DeviceLostError
from workbench.runtime.devices import Service
from workbench.runtime.jobs import error_of, only_peers_blamed, root_cause

_POLL_S = 0.05
GRACE_S = 2.0
"""After the first failure, the other ranks get this long to end on their own, and perhaps to report a better cause."""
FROZEN_S = 20.0
"""An engine that stays stopped (SIGSTOP) for this long is given up."""


class WholeJob:
    """Runs one job; cannot be reused.  names: of the devices.

    request_stop: makes should_stop() true on the job's ranks.  is_frozen(rank): whether its engine lives but is suspended, if known.
    """

    def __init__(
        self,
        service: Service,
        names: Sequence[str],
        function: Callable[..., Any],
        *,
        on_event: Callable[[int, Any], None] | None,
        request_stop: Callable[[], None],
        is_frozen: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self.service, self.names, self.function, self.is_frozen = service, names, function, is_frozen
        self.on_event, self.request_stop = on_event, request_stop
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
                self.request_stop()
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
            if not self.is_frozen(rank):
                self._frozen_since_s.pop(rank, None)
            elif now_s - self._frozen_since_s.setdefault(rank, now_s) > FROZEN_S:
                self.died.add(rank)
                self.service.kill(rank)
                self.failures[rank] = self._lost(rank, f"Its engine has been frozen for {FROZEN_S:g} s.")

    def _blame_the_silent(self) -> None:
        """Name the device that does not answer when all other devices only report an unresponsive peer."""
        if self.pending and not self.died and only_peers_blamed(self.failures):
            frozen = [rank for rank in self.pending if self.is_frozen(rank)]
            raise self._lost((frozen or self.pending)[0], "It fell silent: its peers waited for it until the group's timeout.")

    def _lost(self, rank: int, found: str) -> DeviceLostError:
        """Return the error for a lost engine, with the last step that it reported (both numbers from 1, as in progress reports)."""
        event = self.last_events.get(rank)
        event = event if isinstance(event, Mapping) else {}
        place = ", ".join(f"{name} {event[name] + 1}" for name in ("epoch", "step") if event.get(name) is not None)
        return DeviceLostError(
            f"Device '{self.names[rank]}' (rank {rank}) was running {self.name}, {place or 'before its first step was reported'}.",
            found,
            "Run again: engines restart by themselves.",
        )
