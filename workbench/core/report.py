"""A report: everything a run was and did, as one JSON file.  Figures are made from reports and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.serial import from_json, to_json, write_text
from workbench.core.timeline import Source, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.  predicted_s: simulated seconds of the very same step; measured_s: None if only simulated."""

    epoch: int
    step: int
    samples: int
    cached: bool
    predicted_s: float | None = None
    measured_s: float | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch.  seconds: wall clock of its steps (emulated or real), or the simulated sum.  metrics: on the validation split."""

    epoch: int
    cached: bool
    seconds: float
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One plan of a sweep: the median seconds of its steps, simulated and (if executed) measured."""

    name: str
    plan: Plan
    predicted_s: float
    measured_s: float | None = None
    num_steps: int = 0
    overrun_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """timelines: by name, such as 'first epoch, predicted'.  metrics: the chosen epoch's on the test split.

    valid: False if the host was too busy for its emulated times to mean anything; notes say why.
    phases_s: seconds of what happened beside the epochs (set-up, profiling, redistribution).
    """

    mode: Literal["simulate", "execute"]
    source: Source
    fidelity: Literal["", "kernel", "paced"] = ""
    job: Job
    cluster: Cluster
    plan: Plan
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    timelines: dict[str, Timeline] = field(default_factory=dict)
    sweep: tuple[SweepPoint, ...] = ()
    metrics: dict[str, float] = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    overrun_share: float = 0.0
    valid: bool = True
    notes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    schema_version: int = 1

    @property
    def label(self) -> str:
        """Return what the numbers are: 'simulated', 'emulated, kernel links', 'emulated, paced links' or 'real'."""
        return f"{self.source}, {self.fidelity} links" if self.fidelity else self.source

    def write(self, path: Path | str) -> Path:
        """Write the report as JSON, whole or not at all, and return its path."""
        path = Path(path)
        write_text(path, to_json(self) + "\n")
        return path

    @classmethod
    def read(cls, path: Path | str) -> Report:
        """Read a report.  Raises ConfigError if the file is missing or is not a report."""
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"Asked to read the report '{path}'.", f"{error.strerror}.", "Check the path.") from error
        return from_json(text, cls, source=f"'{path}'")
