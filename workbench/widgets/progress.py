"""What a run is doing, put together from its events, and drawn as HTML or text: one state for the panel and for a cell's output."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.methods.base import Event

BAR_CHARACTERS = 24
_BLUE, _ORANGE, _GREY, _RED = "#0072B2", "#E69F00", "#E8E8E8", "#B00020"


@dataclass(kw_only=True)
class EpochProgress:
    """How far an epoch is.  begin_s, end_s: of the run's clock."""

    num_steps: int
    done: int = 0
    loss: float | None = None
    begin_s: float = 0.0
    end_s: float = 0.0
    first_step_s: float = 0.0


@dataclass(kw_only=True)
class PhaseProgress:
    """A phase and when it began."""

    message: str
    begin_s: float


@dataclass(kw_only=True)
class RunProgress:
    """The state of a run.  Any thread may update it while another draws it.

    outcome: '' while it runs, then 'finished', 'stopped' or 'failed'.
    """

    job: Job
    cluster: Cluster
    clock: Callable[[], float] = time.monotonic
    epochs: dict[int, EpochProgress] = field(default_factory=dict)
    phases: list[PhaseProgress] = field(default_factory=list)
    doing: dict[int, str] = field(default_factory=dict)
    outcome: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._begin_s = self.clock()
        self._end_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since the run began, or that it took."""
        return (self.clock() if self._end_s is None else self._end_s) - self._begin_s

    def update(self, event: Event) -> None:
        """Take one of the run's events."""
        with self._lock:
            now = self.elapsed_s
            if event.kind == "step":
                self._step(event, now)
            elif event.rank >= 0:
                self.doing[event.rank] = event.message
            elif event.kind == "phase" and event.message:
                self.phases.append(PhaseProgress(message=event.message, begin_s=now))

    def finish(self, outcome: str) -> None:
        """Stop the clock."""
        with self._lock:
            self._end_s = self.clock()
            self.outcome = outcome

    def _step(self, event: Event, now: float) -> None:
        epoch = self.epochs.get(event.epoch)
        if epoch is None:
            before = self.epochs.get(event.epoch - 1)
            begin = before.end_s if before else self.phases[-1].begin_s if self.phases else 0.0
            epoch = self.epochs[event.epoch] = EpochProgress(num_steps=event.num_steps, begin_s=begin, first_step_s=now)
        epoch.done = max(epoch.done, event.step + 1)
        epoch.end_s = now
        if event.loss is not None:
            epoch.loss = event.loss

    def rate(self, epoch: EpochProgress) -> float | None:
        """Return the epoch's samples per second so far, without its first step, which also waited for the engines."""
        seconds = epoch.end_s - epoch.first_step_s
        return (epoch.done - 1) * self.job.batch_size / seconds if epoch.done > 1 and seconds > 0 else None

    def remaining_s(self, epoch: EpochProgress) -> float | None:
        """Return the seconds that the epoch is expected to take still."""
        rate = self.rate(epoch)
        return (epoch.num_steps - epoch.done) * self.job.batch_size / rate if rate else None

    def rows(self) -> list[tuple[str, float, str]]:
        """Return for each epoch its name, the share that is done, and what is to say about it."""
        with self._lock:
            rows = []
            for number in range(self.job.epochs):
                epoch = self.epochs.get(number)
                name = f"epoch {number + 1}" + (" (from the cache)" if number else "")
                if epoch is None:
                    rows.append((name, 0.0, ""))
                    continue
                words = [f"{epoch.done} of {epoch.num_steps} steps"]
                if epoch.loss is not None:
                    words.append(f"loss {epoch.loss:.3f}")
                rate, remaining = self.rate(epoch), self.remaining_s(epoch)
                if rate:
                    words.append(f"{rate:.0f} samples/s")
                if remaining and not self.outcome:
                    words.append(f"{remaining:.0f} s left")
                rows.append((name, epoch.done / epoch.num_steps, ", ".join(words)))
            return rows

    def head(self) -> str:
        """Return one line: the phase or how it ended, and the time."""
        with self._lock:
            doing = self.phases[-1].message if self.phases else "Starting"
            if self.outcome == "finished":
                return f"Finished in {self.elapsed_s:.0f} s"
            if self.outcome:
                return f"{self.outcome.capitalize()} after {self.elapsed_s:.0f} s: {doing}"
            return f"{doing} ({self.elapsed_s:.0f} s)"

    def text(self) -> str:
        """Return the state as plain lines."""
        lines = [self.head()]
        for name, share, words in self.rows():
            if words or not self.outcome:
                full = round(share * BAR_CHARACTERS)
                lines.append(f"{name:<24} [{'#' * full}{'.' * (BAR_CHARACTERS - full)}] {words}".rstrip())
        return "\n".join(lines)

    def html(self) -> str:
        """Return the state with a bar for each epoch, and what each device says it is doing."""
        colour = _RED if self.outcome in ("stopped", "failed") else "inherit"
        parts = [f"<div style='font-weight:bold;color:{colour};margin-bottom:4px' role='status'>{html.escape(self.head())}</div>"]
        if self.epochs or not self.outcome:
            parts.append("<div style='display:grid;grid-template-columns:max-content 14em 1fr;gap:2px 12px;align-items:center'>")
            for number, (name, share, words) in enumerate(self.rows()):
                fill = f"width:{share:.1%};background:{_ORANGE if number else _BLUE};height:100%"
                described = (
                    f"role='progressbar' aria-label='{name}' aria-valuenow='{share * 100:.0f}' aria-valuemin='0' aria-valuemax='100'"
                )
                bar = f"<div {described} style='background:{_GREY};height:14px'><div style='{fill}'></div></div>"
                parts.append(f"<span>{name}</span>{bar}<span>{html.escape(words)}</span>")
            parts.append("</div>")
        if self.doing and not self.outcome:
            said = "".join(
                f"<span>{html.escape(device.name)}</span><span>{html.escape(self.doing.get(rank, ''))}</span>"
                for rank, device in enumerate(self.cluster.devices)
            )
            parts.append(f"<div style='display:grid;grid-template-columns:max-content 1fr;gap:0 12px;margin-top:6px'>{said}</div>")
        if len(self.phases) > 1:
            ends = [phase.begin_s for phase in self.phases[1:]] + [self.elapsed_s]
            past = "; ".join(
                f"{html.escape(phase.message)} {end - phase.begin_s:.1f} s" for phase, end in zip(self.phases, ends, strict=True)
            )
            parts.append(f"<div style='margin-top:6px;font-size:smaller;opacity:.75'>{past}</div>")
        return f"<div style='line-height:1.4'>{''.join(parts)}</div>"
