"""A report: the settings and results of a run in one JSON file.  Figures are drawn from reports only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.serial import LARGEST_TEXT, read_json, shown
from workbench.core.step_parts import StepParts
from workbench.core.timeline import BUSY_OVERRUN_SHARE, INVALID_MARK, SourcedReport, Timeline
from workbench.core.units import counted

Time = Annotated[float, Meta(ge=0)]
"""Seconds."""
Index = Annotated[int, Meta(ge=0)]
"""A number counted from 0."""
TRAINED_WEIGHTS, ALL_WEIGHTS = "trained weights", "weights"
"""Names of bytes in a report, as float32: the weights trained once all layers are, and all weights.  The
number of all weights is computed from sizes, without small parts such as some norms and biases."""


def dilation_note(dilation: float) -> str:
    """Return a note for the reader of a run whose devices were emulated slower than real speed."""
    return (
        f"Time dilation {dilation:g}x: every second of the emulated devices took {dilation:g} s here, so that this "
        "host keeps pace."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.  predicted_s: simulated seconds of the same step; measured_s: None if only simulated.

    lowest_trained: the lowest layer that is trained at its end, counted from 0; None if the method unfreezes no layers.
    """

    epoch: Index
    step: Index
    samples: Index
    cached: bool
    predicted_s: Time | None = None
    measured_s: Time | None = None
    loss: float | None = None
    lowest_trained: int | None = None

    @property
    def seconds(self) -> float | None:
        """Return the measured seconds, or else the simulated ones."""
        return self.predicted_s if self.measured_s is None else self.measured_s


def median_s(steps: Iterable[StepRecord], which: Literal["predicted_s", "measured_s", "seconds"]) -> float | None:
    """Return the median of some steps' seconds, without steps that have none; None without any."""
    values = [seconds for step in steps if (seconds := getattr(step, which)) is not None]
    return median(values) if values else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch.

    seconds: wall clock of its steps (emulated or real), or the simulated sum.  metrics: metrics on the validation
    split.
    """

    epoch: Index
    cached: bool
    seconds: Time
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One plan of a sweep: the median seconds of its steps, simulated and (if executed) measured.  dilation: see
    Report.
    """

    name: str
    plan: Plan
    predicted_s: Annotated[float, Meta(gt=0)]
    measured_s: Time | None = None
    num_steps: int = 0
    overrun_share: float = 0.0
    dilation: float = 1.0

    @property
    def mark(self) -> str:
        """Return the mark after its measured number: empty if the host kept pace."""
        return f" {INVALID_MARK}" if self.overrun_share > BUSY_OVERRUN_SHARE else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The cost of losing or regaining a device during a run, in seconds of the devices' clock.

    what: the change, such as 'kill beta'.  step: the number of steps finished before it.
    noticed_s: time until it was detected.  planned_s: time from then until all devices had stopped their current work
    and there was a new plan.
    resumed_s: time from then until the first step was finished, including moving state and loading layers.  step_s: the
    expected time of that step.
    stood_still_s: time from the last step before to the first step after it, minus the time of a step.  repeated:
    number of steps computed again.
    noticed_steps: number of steps finished until it was detected.  predicted_s: simulated seconds to the end of the
    first step after it.
    parts_s: what the devices did from the detection on, by name and in this order, each until the slowest device began
    with the next; the last one is the first step.
    """

    what: str
    step: int
    noticed_s: Time
    planned_s: Time
    resumed_s: Time
    step_s: Time = 0.0
    stood_still_s: float = 0.0
    repeated: int = 0
    noticed_steps: int = 0
    predicted_s: float | None = None
    parts_s: dict[str, Time] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the seconds to the end of the first step after it."""
        return self.noticed_s + self.planned_s + self.resumed_s

    @property
    def described(self) -> str:
        """Describe the recovery in words."""
        simulated = "" if self.predicted_s is None else f" ({self.predicted_s:.2f} s simulated)"
        again = f", {counted(self.repeated, 'step')} done again" if self.repeated else ""
        return (
            f"{self.seconds:.2f} s{simulated} from '{self.what}' to the end of the next step: noticed after "
            f"{self.noticed_s:.2f} s, "
            f"stopped and planned again in {self.planned_s:.2f} s, loaded and done in {self.resumed_s:.2f} s{again}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(SourcedReport):
    """timelines: timelines by name, such as 'first epoch, predicted'.

    metrics: metrics on the test split, after chosen_epoch (from 1; 0 for no epoch).

    phases_s: seconds outside of the epochs (redistribution, snapshots).  spent_s: seconds of this host's clock, by
    stage of the run.
    plan: the first plan of the run; recoveries list devices lost or regained, and notes describe the later plans.
    step_parts: the simulated parts of a typical first-epoch step under this plan.
    """

    mode: Literal["simulate", "execute"]
    job: Job
    cluster: Cluster
    plan: Plan
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    timelines: dict[str, Timeline] = field(default_factory=dict)
    sweep: tuple[SweepPoint, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    chosen_epoch: Index = 0
    recoveries: tuple[Recovery, ...] = ()
    phases_s: dict[str, Time] = field(default_factory=dict)
    spent_s: dict[str, Time] = field(default_factory=dict)
    bytes: dict[str, Annotated[int, Meta(ge=0)]] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    step_parts: StepParts | None = None

    @property
    def predicted_s(self) -> float:
        """Return the simulated seconds of its steps."""
        return sum(step.predicted_s or 0.0 for step in self.steps)

    @property
    def measured_s(self) -> float:
        """Return the measured seconds of its steps."""
        return sum(step.measured_s or 0.0 for step in self.steps)

    @classmethod
    def read(cls, path: Path | str, *, most_bytes: int = LARGEST_TEXT) -> Report:
        """Read a report.  Raises ConfigError if the file is missing or too large, is no report, or contradicts itself
        (see faults).
        """
        report = read_json(path, cls, "the report", most_bytes=most_bytes)
        if fault := next(report.faults(), None):
            raise ConfigError(
                f"Asked to read the report '{shown(str(path))}'.", f"{fault}.", "Take a copy of it, or run again."
            )
        return report

    def faults(self) -> Iterator[str]:
        """Yield contradictions: devices that the cluster does not have, an epoch that was not run, and impossible
        spans.
        """
        size, plan = self.cluster.world_size, self.plan
        ranks = {rank for stage in (*plan.stages, *([plan.cached] if plan.cached else [])) for rank in stage.ranks}
        ranks |= {rank for point in self.sweep for stage in point.plan.stages for rank in stage.ranks}
        ranks |= set(plan.inference.ranks) if plan.inference else set()
        yield from (
            f"Its plan names device {rank}; the cluster has {size}" for rank in sorted(ranks) if not 0 <= rank < size
        )
        last = 1 + max((record.epoch for record in self.epochs), default=-1)
        if self.chosen_epoch > last:
            yield f"It chose epoch {self.chosen_epoch} of {last}"
        for name, timeline in self.timelines.items():
            yield from (f"{fault} in its timeline '{name}'" for fault in timeline.faults())
            if timeline.world_size > size:
                yield f"Its timeline '{name}' has {timeline.world_size} devices; the cluster has {size}"


def metrics_text(report: Report) -> str:
    """Return a run's metrics as text, such as 'accuracy 0.823, f1 0.821 (after epoch 2)'."""
    epoch = f" (after epoch {report.chosen_epoch})" if report.chosen_epoch else ""
    return ", ".join(f"{name} {value:.3f}" for name, value in sorted(report.metrics.items())) + epoch


def busy_note(report: SourcedReport) -> str:
    """Return the note for an invalid run's figures and summary, which also explains its mark; '' for a valid run."""
    if report.valid:
        return ""
    busy_notes = [note for note in report.notes if note.startswith("Host too busy")]
    usual = f"Host too busy: {report.overrun_share:.0%} of the paced time was overrun, so these times mean little."
    return f"{INVALID_MARK} {busy_notes[0] if busy_notes else usual}"


def sweep_note(report: Report) -> str:
    """Return the note for a figure of a sweep's plans, which also explains their marks; '' if the host kept pace for
    all.
    """
    late = [point.overrun_share for point in report.sweep if point.mark]
    if not late:
        return ""
    plans = f"{len(late)} of {len(report.sweep)} plans" if len(report.sweep) > 1 else "the plan"
    return (
        f"{INVALID_MARK} Host too busy during {plans}: up to {max(late):.0%} of the paced time was overrun. Their "
        "times mean little."
    )


def all_notes(report: Report) -> list[str]:
    """Return the notes of a report and of its plan; the note of an invalid run comes first."""
    every = dict.fromkeys((busy_note(report), *report.plan.notes, *report.notes))
    return [note for note in every if note and not note.startswith("Host too busy")]
