"""Tests for differences between trainings' scores (PAC+, section VI-B, Table VI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.tasks.task import Task
from workbench.trainings.techniques import Outcome, answers, score_answers

RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """First minus second in points of the score, the mean over the seeds, with a 95 % interval of resampled test sets.

    p_value: two-sided: twice the share of resamples on the other side of zero.
    """

    points: float
    low: float
    high: float
    p_value: float

    @property
    def is_significant(self) -> bool:
        """Return whether the interval excludes zero."""
        return not self.low <= 0 <= self.high

    @property
    def text(self) -> str:
        """Return it as a cell of a table."""
        return f"{self.points:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def paired_bootstrap(
    task: Task,
    first: Sequence[Sequence[Sequence[float]]],
    second: Sequence[Sequence[Sequence[float]]],
    resamples: int = RESAMPLES,
) -> Difference:
    """Compare two techniques: test logits, (samples, outputs) for each seed.  The same samples are drawn for both and
    all seeds.
    """
    labels = np.asarray(task.test.labels, dtype=np.float64)
    sides = [[np.asarray(answers(task, outputs)) for outputs in side] for side in (first, second)]

    def difference(rows: np.ndarray) -> float:
        means = [
            np.mean([score_answers(task, predictions[rows], labels[rows]) for predictions in side]) for side in sides
        ]
        return float(means[0] - means[1])

    generator = np.random.default_rng(0)
    drawn = np.sort([difference(generator.integers(0, len(labels), len(labels))) for _ in range(resamples)])
    other_side = min(float(np.mean(drawn <= 0)), float(np.mean(drawn >= 0)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Difference(
        points=difference(np.arange(len(labels))),
        low=float(low),
        high=float(high),
        p_value=min(1.0, max(2 * other_side, 1 / resamples)),
    )


def ensemble(outcomes: Sequence[Outcome]) -> tuple[tuple[float, ...], ...]:
    """Return the mean of several seeds' test logits, (samples, outputs)."""
    return tuple(tuple(row) for row in np.mean([outcome.test_outputs for outcome in outcomes], axis=0).tolist())
