"""Measured learning curves: how the validation metric rose over the epochs of executed runs.

A distributed run learns as one process does, so a curve holds for every plan.  data/curves.json has them, each with the
command that made it; there is none for what nobody has run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from workbench.core.catalogue import data_folder
from workbench.core.job import Job
from workbench.core.serial import read_records


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A metric on the validation split, before the first epoch and after each.

    model, task, method, options, batch_size, train_samples: the job's; DIVIDING's options are left out.
    scores: the mean over `seeds`.  command: what made it.
    """

    model: str
    task: str
    method: str
    options: dict[str, Any] = field(default_factory=dict)
    batch_size: int
    train_samples: int
    metric: str
    scores: tuple[float, ...]
    seeds: tuple[int, ...]
    command: str

    def steps_to(self, score: float) -> float | None:
        """Return after how many steps the metric first reaches a score, between two epochs linearly; None: never."""
        best = [max(self.scores[: index + 1]) for index in range(len(self.scores))]
        if best[0] >= score:
            return 0.0
        for index, (before, after) in enumerate(pairwise(best)):
            if after >= score:
                return (index + (score - before) / (after - before)) * math.ceil(self.train_samples / self.batch_size)
        return None


def curves_in(path: Path) -> tuple[Curve, ...]:
    """Return the curves of a file; none if there is no such file."""
    return read_records(path, Curve, "the learning curves")


DIVIDING = ("paradigm", "partition", "schedule", "activations")
"""Options for how devices share and do the work; they do not change the learning."""


def curves_of(job: Job) -> Iterator[Curve]:
    """Yield the curves that hold for a job: the same model, task, batch and method, and at least as many samples, so
    that none is seen more often than in the run that was measured.
    """
    options = {name: value for name, value in job.options.items() if name not in DIVIDING}
    for curve in curves_in(data_folder() / "curves.json"):
        same = (curve.model, curve.task, curve.method, curve.options) == (job.model, job.task, job.method, options)
        if (
            same
            and curve.batch_size == job.batch_size
            and (job.train_samples or curve.train_samples) >= curve.train_samples
        ):
            yield curve
