"""Collect a run's events into one progress state that the terminal and the notebook draw, without torch."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from workbench.core.cluster import Cluster
from workbench.core.job import Job
from workbench.core.methods import declaration_of
from workbench.core.units import duration_words, size_words, three_figures
from workbench.methods.base import DeviceState, Event
from workbench.runs.course import Course, CourseLog

LOSS_DECAY = 0.9
"""The share of the smoothed loss that each step keeps; about the last ten steps count."""
BAR_CHARACTERS, NAME_CHARACTERS = 24, 24
RATE_WINDOW = 30
"""The number of steps over which rates are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """The current state of one device.  epoch, step: the last one finished, counted from 0; -1 before the first.

    busy_share: the share of its last step in which it was busy; None before the first step.  used_bytes: None if
    unknown.
    health: a real device's temperature, free memory, and what slows it down.
    """

    name: str
    phase: str = ""
    epoch: int = -1
    step: int = -1
    num_steps: int = 0
    busy_share: float | None = None
    used_bytes: int | None = None
    budget_bytes: int = 0
    health: str = ""

    @property
    def is_lost(self) -> bool:
        """Return whether the device is lost; its work and memory are then not shown."""
        return self.phase == "lost"

    @property
    def doing(self) -> str:
        """Return the device's current work in words: 'first epoch, step 3 of 50'; of a real device also its health."""
        step = (
            f"{self.phase}, step {self.step + 1} of {self.num_steps}"
            if self.num_steps and self.step >= 0
            else self.phase
        )
        return f"{step} ({self.health})" if self.health and not self.is_lost else step

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Return name, work, share of the last step in which it computed, and the job's memory of its budget, as
        text.
        """
        busy, memory = "" if self.busy_share is None else f"{self.busy_share:.0%} of a step", ""
        if self.used_bytes is not None:
            share = self.used_bytes / self.budget_bytes
            memory = f"{size_words(self.used_bytes)} of {size_words(self.budget_bytes)} ({share:.0%})"
        return self.name, self.doing, busy, memory


@dataclass(slots=True, kw_only=True)
class EpochRow:
    """One epoch.  num_steps: 0 if unknown.  loss: mean over its steps so far.  seconds: since the first device began
    the epoch.

    cached: the epoch is predicted to run from the activation cache.  answers: its steps are inference requests.
    begin_s: its start on the run's clock.  num_losses: how many losses `loss` is the mean of.  ends: when the last
    steps ended, with their samples and generated tokens.
    """

    epoch: int
    done: int = 0
    num_steps: int = 0
    loss: float | None = None
    seconds: float = 0.0
    cached: bool = False
    answers: bool = False
    begin_s: float = 0.0
    num_losses: int = 0
    ends: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))

    @property
    def name(self) -> str:
        """Return the words before its bar."""
        return "requests" if self.answers else f"epoch {self.epoch + 1}{' (from the cache)' * self.cached}"

    @property
    def share(self) -> float:
        """Return the share of its steps that is done."""
        return self.done / self.num_steps if self.num_steps else 0.0

    @property
    def words(self) -> str:
        """Return the words after its bar: steps, seconds, loss."""
        unit = "answered" if self.answers else "steps"
        if not self.done:
            return f"{self.num_steps} {'to answer' if self.answers else unit}" if self.num_steps else ""
        words = f"{self.done} of {self.num_steps} {unit}, {self.seconds:.1f} s"
        return words if self.loss is None else f"{words}, mean loss {self.loss:.4f}"

    @property
    def is_finished(self) -> bool:
        """Return whether every step is finished."""
        return 0 < self.num_steps <= self.done


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRow:
    """How far the present phase is: done of count parts.  name: what the parts are called."""

    name: str
    done: int
    count: int
    cached: bool = False

    @property
    def share(self) -> float:
        """Return the share of the parts that is done."""
        return self.done / self.count if self.count else 0.0

    @property
    def words(self) -> str:
        """Return what stands behind its bar."""
        return f"{self.done:,} of {self.count:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment, ready to draw.

    trains: whether the first epoch has begun.
    phase: the current phase of the whole run.  phases: each phase with the second at which it began.  part: how far it
    is, if it counts.
    smoothed_loss, samples_per_s, tokens_per_s, remaining_s: None if unknown, and where no steps are done.
    answers: whether its samples are inference requests.
    outcome: '' during the run, then 'finished', 'stopped' or 'failed'.
    """

    phase: str
    phases: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]
    devices: tuple[DeviceRow, ...]
    epochs: tuple[EpochRow, ...]
    smoothed_loss: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    elapsed_s: float
    remaining_s: float | None
    outcome: str
    part: PhaseRow | None = None
    trains: bool = False
    answers: bool = False

    @property
    def headline(self) -> str:
        """Return one line: the phase or how it ended, the time, and the facts."""
        if self.outcome == "finished":
            return f"Finished in {duration_words(self.elapsed_s)}"
        if self.outcome:
            return f"{self.outcome.capitalize()} after {duration_words(self.elapsed_s)}: {self.phase}"
        return f"{self.phase} ({duration_words(self.elapsed_s)}){self.facts}"

    @property
    def bars(self) -> tuple[EpochRow | PhaseRow, ...]:
        """Return the bars to draw: all epochs once the first begins, the trained ones when the run is over; and the
        present phase.
        """
        epochs = tuple(epoch for epoch in self.epochs if epoch.done or (self.trains and not self.outcome))
        return (*epochs, self.part) if self.part is not None and not self.outcome else epochs

    @property
    def working(self) -> tuple[DeviceRow, ...]:
        """Return the devices to draw: all, once one has begun, until the run is over."""
        return self.devices if not self.outcome and any(device.phase for device in self.devices) else ()

    def __str__(self) -> str:
        """Return the state as lines: the headline, a bar for each epoch, a row for each device, the notes."""
        return self.lines()

    def lines(self, width: int = 1000) -> str:
        """Return the state as lines whose bars leave room for their words in so many characters."""
        longest = max((len(epoch.words) for epoch in self.bars), default=0)
        count = min(BAR_CHARACTERS, max(4, width - NAME_CHARACTERS - longest - len(" [] ")))
        full = [round(epoch.share * count) for epoch in self.bars]
        parts = [f"[{'#' * done}{'.' * (count - done)}]" for done in full]
        names = [f"{epoch.name:<{NAME_CHARACTERS}}" for epoch in self.bars]
        bars = [f"{name} {bar} {epoch.words}" for name, epoch, bar in zip(names, self.bars, parts, strict=True)]
        cells = [device.cells for device in self.working]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(line.rstrip() for line in (self.headline, *bars, *rows, *self.notes))

    @property
    def facts(self) -> str:
        """Return loss, rate and time left, as far as they are known, each after a comma."""
        words = "" if self.smoothed_loss is None else f", loss {self.smoothed_loss:.4f}"
        if self.samples_per_s is not None:
            words += f", {three_figures(self.samples_per_s)} {'requests' if self.answers else 'samples'}/s"
        if self.tokens_per_s:
            words += f", {three_figures(self.tokens_per_s)} tokens/s"
        if self.remaining_s is not None:
            words += f", {duration_words(self.remaining_s)} left"
        return words


class RunState:
    """Collects a run's events.  Any thread may add events while another draws `snapshot()`."""

    def __init__(self, job: Job, cluster: Cluster, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._answers = not declaration_of(job.method).trains
        self._clock, self._num_epochs = clock, 1 if self._answers else job.epochs
        self._lock = threading.Lock()
        self._begin_s = clock()
        self._end_s: float | None = None
        self._outcome = ""
        self._phases: list[tuple[str, float]] = []
        self._notes: list[str] = []
        self._rows = [DeviceRow(name=device.name, budget_bytes=device.memory_bytes) for device in cluster.devices]
        self._epochs: dict[int, EpochRow] = {}
        self._training_s: dict[int, float] = {}
        self._position = (-1, -1)
        self._smoothed, self._smoothed_weight = 0.0, 0.0
        self._in_steps = self._trains = False
        self._part: PhaseRow | None = None
        self._log = CourseLog(cluster, answers=self._answers)

    @property
    def course(self) -> Course:
        """Return what the run's charts show now."""
        with self._lock:
            return self._log.course

    def update(self, event: Event) -> None:
        """Process one event; unknown kinds are ignored."""
        with self._lock:
            self._log.update(event)
            now_s = self._elapsed_s()
            if event.kind == "step":
                self._in_steps = self._trains = True
                self._take_step(event, now_s)
            elif event.kind == "count":
                self._part = PhaseRow(name=event.message, done=event.step, count=event.num_steps)
            elif event.kind == "device" and 0 <= event.rank < len(self._rows):
                self._take_device(event, now_s)
            elif event.kind == "note" and event.message:
                self._notes.append(event.message)
            elif event.kind == "phase" and event.message:
                self._phases.append((event.message, now_s))
                self._in_steps, self._part = False, None
                self._trains = self._trains or event.stage in ("train", "answer")
                if event.stage == "sweep":  # it measures steps of several plans, and trains no epoch
                    self._num_epochs = 0

    def finish(self, error: type[BaseException] | None = None) -> None:
        """Stop the clock.  error: the class of the exception that ended the run; KeyboardInterrupt stopped it."""
        with self._lock:
            self._outcome = (
                "finished" if error is None else "stopped" if issubclass(error, KeyboardInterrupt) else "failed"
            )
            self._end_s = self._clock()

    def snapshot(self) -> Snapshot:
        """Return the current state of the run."""
        with self._lock:
            now = self._epochs.get(self._position[0])
            return Snapshot(
                phase=self._phases[-1][0] if self._phases else "Starting",
                phases=tuple(self._phases),
                notes=tuple(self._notes),
                devices=tuple(self._rows),
                epochs=tuple(
                    self._epoch_row(number)
                    for number in range(max([self._num_epochs, *(epoch + 1 for epoch in self._epochs)]))
                ),
                smoothed_loss=self._smoothed / self._smoothed_weight if self._smoothed_weight else None,
                samples_per_s=_rate(now, 1) if now and self._in_steps else None,
                tokens_per_s=_rate(now, 2) if now and self._in_steps else None,
                elapsed_s=self._elapsed_s(),
                remaining_s=self._remaining_s(),
                outcome=self._outcome,
                part=self._part,
                trains=self._trains,
                answers=self._answers,
            )

    def _elapsed_s(self) -> float:
        return (self._clock() if self._end_s is None else self._end_s) - self._begin_s

    def _take_step(self, event: Event, now_s: float) -> None:
        epoch = self._epochs.get(event.epoch)
        if epoch is None:
            begin_s = self._training_s.get(event.epoch, now_s)
            epoch = self._epochs[event.epoch] = EpochRow(epoch=event.epoch, begin_s=begin_s, answers=self._answers)
        epoch.done = max(epoch.done, event.step + 1)
        epoch.num_steps, epoch.seconds = event.num_steps, now_s - epoch.begin_s
        epoch.ends.append((now_s, event.samples, event.tokens))
        self._position = max(self._position, (event.epoch, event.step))
        if event.loss is not None:
            epoch.num_losses += 1
            epoch.loss = event.loss if epoch.loss is None else epoch.loss + (event.loss - epoch.loss) / epoch.num_losses
            self._smoothed = LOSS_DECAY * self._smoothed + (1 - LOSS_DECAY) * event.loss
            self._smoothed_weight = LOSS_DECAY * self._smoothed_weight + 1 - LOSS_DECAY

    def _take_device(self, event: Event, now_s: float) -> None:
        state = event.device or DeviceState(event.message)
        row = replace(
            self._rows[event.rank], phase=state.phase, epoch=event.epoch, step=event.step, num_steps=event.num_steps
        )
        # Between two phases, keep showing the values of its last step.
        if row.is_lost:
            row = replace(row, busy_share=None, used_bytes=None)
        elif state.busy_share is not None:
            row = replace(row, busy_share=state.busy_share)
        if state.used_bytes is not None:
            row = replace(row, used_bytes=state.used_bytes)
        self._rows[event.rank] = replace(row, health=state.health or row.health)
        if event.epoch >= 0:
            self._training_s.setdefault(event.epoch, now_s)

    def _epoch_row(self, number: int) -> EpochRow:
        num_steps = sum(1 for epoch, _ in self._log.predicted_s if epoch == number)
        row = self._epochs.get(number) or EpochRow(epoch=number, num_steps=num_steps, answers=self._answers)
        return replace(row, cached=number in self._log.cached)

    def _remaining_s(self) -> float | None:
        """Predict the seconds of the remaining steps: the prediction corrected by measurements; None without a
        prediction.
        """
        if self._outcome or not self._in_steps or self._position[0] < 0 or not self._log.predicted_s:
            return None
        first, later = self._ratio(0), self._ratio(1)
        ratio = {0: first or later or 1.0, 1: later or first or 1.0}
        left = sum(
            seconds * ratio[min(epoch, 1)]
            for (epoch, step), seconds in self._log.predicted_s.items()
            if (epoch, step) > self._position
        )
        return left if left > 0 else None  # after the last step, whatever follows has no prediction

    def _ratio(self, kind: int) -> float | None:
        """Return the ratio of measured to predicted seconds for the first epoch's steps (kind 0) or for later ones
        (kind 1).
        """
        measured_s = predicted_s = 0.0
        for number, epoch in self._epochs.items():
            if min(number, 1) == kind and len(epoch.ends) > 1:
                measured_s += epoch.ends[-1][0] - epoch.ends[0][0]
                counted = range(epoch.done - len(epoch.ends) + 1, epoch.done)
                predicted_s += sum(self._log.predicted_s.get((number, step), 0.0) for step in counted)
        return measured_s / predicted_s if measured_s > 0 and predicted_s > 0 else None


def _rate(epoch: EpochRow, of: int) -> float | None:
    """Return the rate over the last steps; the first of them only starts the clock.  of: the place in EpochRow.ends."""
    if len(epoch.ends) < 2:
        return None
    seconds = epoch.ends[-1][0] - epoch.ends[0][0]
    return sum(end[of] for end in list(epoch.ends)[1:]) / seconds if seconds > 0 else None
