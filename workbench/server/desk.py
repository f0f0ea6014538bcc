"""The desk: some requests are answered at a time, others wait in a short queue; each gets its text piece by piece."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field

import psutil

from workbench.core.errors import WorkbenchError
from workbench.core.spread import percentile
from workbench.core.threads import in_background
from workbench.methods.common.text_model import TextModel
from workbench.models.text import Piece, TextSettings
from workbench.models.text_batch import Passes

KEPT_TIMES = 512
"""Number of newest requests whose times are stored for the percentiles."""
RATE_WINDOW_S = 5.0
_LOG = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is not answered.  status: the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a server takes on.

    together: requests that are answered at a time.  waiting: those in the queue behind them.  request_s: seconds of a
    request, waiting included.
    """

    body_bytes: int = 1 << 20
    tokens: int = 1024
    together: int = 16
    waiting: int = 16
    request_s: float = 300.0


@dataclass(slots=True)
class Metrics:
    """Counts of a server: requests by outcome, tokens, and the seconds of the newest requests.

    passes: counts of a draft's passes, None without a draft.
    """

    passes: Passes | None = None
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4 * KEPT_TIMES))

    def wrote(self, tokens: int) -> None:
        """Count new tokens."""
        self.tokens += tokens
        self._recent.append((time.monotonic(), tokens))

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens a second of the last seconds."""
        since = time.monotonic() - RATE_WINDOW_S
        return sum(tokens for time_s, tokens in self._recent if time_s > since) / RATE_WINDOW_S

    def text(self, waiting: int) -> str:
        """Return the metrics as Prometheus reads them."""
        lines = ["# TYPE workbench_requests_total counter"]
        lines += [f'workbench_requests_total{{outcome="{name}"}} {count}' for name, count in self.outcomes.items()]
        lines += ["# TYPE workbench_tokens_total counter", f"workbench_tokens_total {self.tokens}"]
        for name, values in (("request", self.seconds), ("first_token", self.first_token_s)):
            lines.append(f"# TYPE workbench_{name}_seconds summary")
            for share in (0.5, 0.95, 0.99) if values else ():
                lines.append(f'workbench_{name}_seconds{{quantile="{share}"}} {percentile(values, share):.6f}')
        for name, gauge in (
            ("workbench_requests_waiting", waiting),
            ("workbench_tokens_per_second", round(self.tokens_per_s, 3)),
            ("process_resident_memory_bytes", psutil.Process().memory_info().rss),
        ):
            lines += [f"# TYPE {name} gauge", f"{name} {gauge}"]
        return "\n".join(lines + ([] if self.passes is None else _draft_lines(self.passes))) + "\n"


def _draft_lines(passes: Passes) -> list[str]:
    lines = ["# TYPE workbench_draft_passes_total counter", f"workbench_draft_passes_total {passes.count}"]
    lines += ["# TYPE workbench_draft_tokens_total counter", f"workbench_draft_tokens_total {passes.tokens}"]
    lines.append("# TYPE workbench_draft_guesses_total counter")
    for outcome, count in (("right", passes.right), ("wrong", passes.wrong)):
        lines.append(f'workbench_draft_guesses_total{{outcome="{outcome}"}} {count}')
    gauges = [("tokens_per_pass", passes.mean)] if passes.count else []
    gauges += [] if passes.acceptance is None else [("accepted_share", passes.acceptance)]
    for name, value in gauges:
        lines += [f"# TYPE workbench_draft_{name} gauge", f"workbench_draft_{name} {value:.6f}"]
    return lines


@dataclass(slots=True, kw_only=True)
class _Ticket:
    ids: Sequence[int]
    settings: TextSettings
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | WorkbenchError | Refusal] = field(default_factory=asyncio.Queue)
    is_wanted: threading.Event = field(default_factory=threading.Event)  # set while the client waits

    def put(self, content: Piece | WorkbenchError | Refusal) -> None:
        with suppress(RuntimeError):  # the server has ended, and its loop is closed
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, content)


class Desk:
    """Passes requests to a model, whose writer joins those of several threads.  A context manager: it owns threads."""

    def __init__(self, model: TextModel, limits: Limits, metrics: Metrics) -> None:
        self._model, self.limits, self.metrics = model, limits, metrics
        self._tickets: queue.Queue[_Ticket | None] = queue.Queue()
        self._waiting, self._lock = 0, threading.Lock()

    def __enter__(self) -> Desk:
        for _ in range(self.limits.together):
            in_background(self._work, name="desk")
        return self

    def __exit__(self, *exc: object) -> None:
        for _ in range(self.limits.together):
            self._tickets.put(None)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait or are being answered."""
        return self._waiting

    def ask(self, ids: Sequence[int], settings: TextSettings) -> AsyncIterator[Piece]:
        """Return the pieces of the text after some ids.  Closing the iterator ends the text.

        Raises Refusal (429) if the queue is full; the iterator raises Refusal (400, 500, 503) for a text that cannot be
        written.
        """
        if self._waiting >= self.limits.together + self.limits.waiting:
            self.metrics.outcomes["refused"] += 1
            waiting = f"{self.limits.waiting} wait" if self.limits.waiting else "none may wait"
            raise Refusal(429, f"{self.limits.together} requests are being answered, {waiting}. Ask again later.")
        ticket = _Ticket(ids=ids, settings=settings, loop=asyncio.get_running_loop())
        ticket.is_wanted.set()
        with self._lock:
            self._waiting += 1
        self._tickets.put(ticket)
        return self._pieces(ticket)

    async def _pieces(self, ticket: _Ticket) -> AsyncIterator[Piece]:
        begin_s, outcome, number = time.monotonic(), "dropped", 0
        try:
            while True:
                left_s = begin_s + self.limits.request_s - time.monotonic()
                try:
                    piece = await asyncio.wait_for(ticket.pieces.get(), max(0.0, left_s))
                except TimeoutError:
                    outcome = "late"
                    raise Refusal(503, f"The text was not written within {self.limits.request_s:g} s.") from None
                if isinstance(piece, WorkbenchError | Refusal):
                    outcome = "failed"
                    raise piece if isinstance(piece, Refusal) else Refusal(400, str(piece))
                if not number:
                    self.metrics.first_token_s.append(time.monotonic() - begin_s)
                number += 1
                self.metrics.wrote(piece.tokens)
                if piece.finish:
                    outcome = "answered"
                    self.metrics.seconds.append(time.monotonic() - begin_s)
                yield piece
                if piece.finish:
                    return
        finally:
            ticket.is_wanted.clear()
            self.metrics.outcomes[outcome] += 1

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            end = None
            try:
                if ticket.is_wanted.is_set():
                    end = self._write(ticket)
            finally:
                with self._lock:
                    self._waiting -= 1
            if end is not None:  # not before: whoever has it may ask again at once
                ticket.put(end)

    def _write(self, ticket: _Ticket) -> Piece | WorkbenchError | Refusal | None:
        """Write a text, and return what ends it; None for one that nobody wants any longer."""
        try:
            with closing(self._model.continued(ticket.ids, ticket.settings)) as pieces:
                for piece in pieces:
                    if piece.finish:
                        return piece
                    ticket.put(piece)
                    if not ticket.is_wanted.is_set():
                        break
        except WorkbenchError as error:
            return error
        except Exception as error:  # a fault of ours: this text fails, and the next one finds its thread
            _LOG.exception("A text could not be written")
            problem = f"The server failed at this text: {type(error).__name__}: {error}."
            return Refusal(500, f"{problem} Please report it, with what the server printed.")
        return None
