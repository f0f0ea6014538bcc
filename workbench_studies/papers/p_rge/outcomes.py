"""Trainings of P-RGE's executed tables, and their results, stored in a folder (P-RGE, section 4.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workbench.core.serial import load_or_compute, read_stored
from workbench.trainings.queries import Curve, QueryTraining, Trial
from workbench_studies.papers.result import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The result of a training.

    curve: (step, validation score in %), rising steps, the last is the end.  test_score: the score at the end, in %.
    trained_values: number of values in theta.
    """

    trial: Trial
    curve: tuple[tuple[int, float], ...]
    test_score: float
    trained_values: int

    @property
    def validation_score(self) -> float:
        """Return the validation score of the end, in %."""
        return self.curve[-1][1]


class Runner:
    """Runs trials, or finds their outcomes and steps in a folder, where it also stores them.  progress: called with
    lines.
    """

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self.progress = folder, progress

    def outcome(self, trial: Trial) -> TrialOutcome:
        """Return a trial's outcome: from the folder if it exists, otherwise by running it now."""
        outcome = load_or_compute(trial.path(self.folder), TrialOutcome, lambda: self._run(trial))
        self.progress(f"{trial.name}: validation {outcome.validation_score:.1f}, test {outcome.test_score:.1f}")
        return outcome

    def validation_score(self, trial: Trial) -> float:
        """Return the validation score at a trial's end in per cent, training up to there if it is not stored; nothing
        is tested.
        """
        scores = dict((read_stored(trial.curve_path(self.folder), Curve) or Curve()).scores)
        if trial.steps not in scores:
            scores = dict(QueryTraining(trial, self.folder).run(trial.steps, self._tell(trial)).scores)
        self.progress(f"{trial.name}: validation {100 * scores[trial.steps]:.1f} after {trial.steps} steps")
        return 100 * scores[trial.steps]

    def _run(self, trial: Trial) -> TrialOutcome:
        """Train, score the validation split at intervals and both splits at the end."""
        calibration = "content_free" if trial.method == "calibrated" else "none"
        training = QueryTraining(trial, self.folder if trial.steps else None)
        scores = (
            training.run(trial.steps, self._tell(trial)).scores
            if trial.steps
            else [(0, training.score(calibration=calibration))]
        )
        return TrialOutcome(
            trial=trial,
            curve=tuple(
                (step, 100 * score)
                for step, score in scores
                if step == trial.steps or (0 < step < trial.steps and step % trial.score_every == 0)
            ),
            test_score=100 * training.score("test", calibration),
            trained_values=training.model.trainables.num_values if trial.steps else 0,
        )

    def _tell(self, trial: Trial) -> Callable[[Curve], None]:
        def report_curve(curve: Curve) -> None:
            if curve.scores and curve.scores[-1][0] == curve.steps:
                self.progress(f"{trial.name}: step {curve.steps}, validation {100 * curve.scores[-1][1]:.1f}")

        return report_curve
