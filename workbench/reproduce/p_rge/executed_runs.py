"""One training of Table 2 or 7, what it gave, and a folder that keeps both outcomes and steps (P-RGE, section 4.1, appendix D)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json, write_text

Method = Literal["zero-shot", "calibrated", "P-RGE", "MeZO", "FO-SGD", "FO-Adam"]
FORWARD_ONLY = ("P-RGE", "MeZO")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that a training's result depends on.

    P-RGE: both parallelizations.  MeZO: perturbed in place, one pass after another.  zero-shot, calibrated: no steps.
    loss: over the whole vocabulary, or among the label words.
    technique: lora_fa, lora, dora, vera or full.  samples: at most so many in train, validation and test.
    score_every: steps between scores on the validation split.
    """

    model: str
    method: Method
    seed: int = 0
    task: str = "sentiment"
    technique: str = "lora_fa"
    queries: int = 1
    batch_size: int = 16
    steps: int = 0
    learning_rate: float = 1e-3
    epsilon: float = 1e-2
    rank: int = 16
    alpha: float = 32.0
    max_length: int = 256
    score_every: int = 150
    samples: tuple[int, int, int] = (1000, 500, 1000)
    loss: Literal["vocabulary", "label_words"] = "vocabulary"

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"The method '{self.method}' was asked for.", f"There are {', '.join(get_args(Method))}.", "Choose one.")
        if self.steps < 0 or self.score_every < 1:
            raise ConfigError(f"{self.steps} steps, scored every {self.score_every}, were asked for.", "That cannot be.", "Raise them.")

    @property
    def name(self) -> str:
        """Return it in words, for a progress line."""
        words = f"{self.method} {self.technique} q={self.queries} E={self.batch_size} lr={self.learning_rate:g} seed {self.seed}"
        words += ", loss among the label words" if self.loss == "label_words" else ""
        return words if self.steps else self.method

    @property
    def digest(self) -> str:
        """Return what tells trials apart in a folder."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()[:16]

    @property
    def run_header(self) -> dict[str, Any]:
        """Return what its steps depend on: a longer training goes on from a shorter one's."""
        settings = asdict(self) | {"steps": 0, "score_every": 0, "samples": [self.samples[0], 0, 0]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    @property
    def run_digest(self) -> str:
        """Return what tells the steps of trials apart in a folder."""
        return replace(self, steps=0, score_every=1, samples=(self.samples[0], 0, 0)).digest

    @property
    def curve_digest(self) -> str:
        """Return what tells the scores on the way of trials apart in a folder: a shorter training's are a longer one's."""
        return replace(self, steps=0, score_every=1, samples=(*self.samples[:2], 0)).digest

    def is_scored(self, step: int) -> bool:
        """Return whether the validation split is scored after so many steps."""
        return step == self.steps or (0 < step < self.steps and step % self.score_every == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What a training gave.

    curve: (step, validation score in %), rising steps, the last is the end.  validation_score, test_score: of the end, in %.
    loss: mean of the last score_every steps that this run made; None if none was made.  trained_values: theta's.
    """

    trial: Trial
    curve: tuple[tuple[int, float], ...]
    validation_score: float
    test_score: float
    loss: float | None
    trained_values: int


class TrialFolder:
    """Outcomes and steps as files, found by all that they depend on: an interrupted table goes on where it was, in mid-training.

    folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, trial: Trial) -> TrialOutcome | None:
        """Return the outcome of a trial that was run before, None if there is none that reads."""
        path = self._path(trial)
        if not path.is_file():
            return None
        try:
            outcome = from_json(path.read_bytes(), TrialOutcome, source=str(path))
        except ConfigError:  # written by another version, or cut off: run it again
            return None
        return outcome if outcome.trial == trial else None

    def keep(self, outcome: TrialOutcome) -> None:
        """Keep an outcome."""
        write_text(self._path(outcome.trial), to_json(outcome, indent=-1))

    def steps_path(self, trial: Trial) -> Path:
        """Return the file of a forward-only training's seeds and scalars."""
        return self.folder / "steps" / f"{trial.task}-{trial.method}-{trial.queries}-{trial.seed}-{trial.run_digest}.jsonl"

    def curve_path(self, trial: Trial) -> Path:
        """Return the file of a training's scores on the way."""
        return self.folder / "steps" / f"{trial.task}-{trial.method}-{trial.queries}-{trial.seed}-{trial.curve_digest}.curve.json"

    def _path(self, trial: Trial) -> Path:
        return self.folder / f"{trial.task}-{trial.method}-{trial.technique}-{trial.queries}-{trial.seed}-{trial.digest}.json"
