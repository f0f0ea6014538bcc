"""One training of an executed comparison, what it gave, and a folder that keeps what was given (PAC+, section VI-B, Table VI and VII)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json, write_text
from workbench.tasks.metrics import compute
from workbench.tasks.task import Task

SCORES = {"mrpc": ("accuracy", "f1"), "stsb": ("pearson", "spearman"), "sentiment-rating": ("pearson", "spearman")}
"""Tasks whose score is a mean of two metrics, as in Table VI; that of all others is the accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All that a training's result depends on.

    technique: full, lora, adapters or parallel_adapters.  dropout: in front of the head.  backbone_dropout: whether the backbone's own is
    on where a technique trains through it.  compute: float32, or bfloat16 by autocast in the backbone.
    backbone: storage of the frozen weights.  taps: storage of the cached activations.  samples: at most so many in train, validation, test.
    averaging: decay of an exponential moving average of the weights that is scored in their place, 0 for none.
    score_every: score on validation after so many steps as well as after each epoch; 0 for epochs only.
    """

    task: str
    model: str
    technique: str
    seed: int
    learning_rate: float
    epochs: int = 3
    batch_size: int = 32
    max_length: int = 128
    weight_decay: float = 0.01
    warmup_fraction: float = 0.06
    dropout: float = 0.1
    backbone_dropout: bool = False
    compute: str = "float32"
    backbone: str = "float32"
    taps: str = "bfloat16"
    reduction: int = 8
    initialization: str = "fan_in"
    averaging: float = 0.0
    score_every: int = 0
    samples: tuple[int | None, int | None, int | None] = (None, None, None)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ConfigError(f"{self.epochs} epochs of {self.batch_size} samples were asked for.", "That trains nothing.", "Raise them.")

    @property
    def name(self) -> str:
        """Return it in words, for a progress line: what is not as usual is named."""
        named = ("reduction", "initialization", "averaging", "backbone", "taps", "compute")
        usual = {field.name: field.default for field in fields(self)}
        special = [f"{field} {getattr(self, field)}" for field in named if getattr(self, field) != usual[field]]
        return " ".join((self.task, self.technique, *special, f"seed {self.seed}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a training gave.

    curve: (step, validation score), rising steps; the last is the end of the training.  best_step: the end of the epoch with the best
    validation score, whose weights scored the test split, once.  *_outputs: logits (samples, outputs) of that step, in the order of the
    sample ids.  losses: mean training loss of each epoch.  seconds: wall-clock time of the training steps, scoring not counted; says
    nothing on a machine that is busy otherwise.
    """

    training: Training
    curve: tuple[tuple[int, float], ...]
    best_step: int
    validation_score: float
    test_score: float
    validation_outputs: tuple[tuple[float, ...], ...]
    test_outputs: tuple[tuple[float, ...], ...]
    losses: tuple[float, ...]
    trainable_parameters: int
    seconds: float


class RunFolder:
    """Outcomes as JSON files, found by all that they depend on: an interrupted comparison goes on where it was.

    folder: None keeps them in memory only.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[Training, Outcome] = {}

    def find(self, training: Training) -> Outcome | None:
        """Return the outcome of a training that was run before, None if there is none that reads."""
        if training not in self._memory and self.folder is not None:
            path = self._path(self.folder, training)
            if path.is_file():
                try:
                    outcome = from_json(path.read_bytes(), Outcome, source=str(path))
                except ConfigError:  # written by another version, or cut off: run it again
                    return None
                if outcome.training == training:
                    self._memory[training] = outcome
        return self._memory.get(training)

    def keep(self, outcome: Outcome) -> None:
        """Keep an outcome."""
        self._memory[outcome.training] = outcome
        if self.folder is not None:
            write_text(self._path(self.folder, outcome.training), to_json(outcome, indent=-1))

    @staticmethod
    def _path(folder: Path, training: Training) -> Path:
        digest = hashlib.sha256(to_json(training).encode()).hexdigest()[:16]
        return folder / f"{training.task}-{training.technique}-{training.seed}-{digest}.json"


def score(task: Task, outputs: Sequence[Sequence[float]], labels: Sequence[float]) -> float:
    """Return a task's score in per cent, as Table VI reports it, of logits (samples, outputs) against labels (samples,)."""
    return score_answers(task, answers(task, outputs), labels)


def score_answers(task: Task, predictions: Sequence[float], labels: Sequence[float]) -> float:
    """Return the score of predicted classes or numbers (samples,)."""
    names = SCORES.get(task.name, ("accuracy",))
    return 100.0 * sum(compute(names, predictions, labels).values()) / len(names)


def answers(task: Task, outputs: Sequence[Sequence[float]]) -> list[float]:
    """Return the predicted classes of logits (samples, outputs), or the numbers in regression."""
    if task.kind == "regression":
        return [row[0] for row in outputs]
    return [float(max(range(len(row)), key=row.__getitem__)) for row in outputs]


def score_name(task: str) -> str:
    """Return what a task's score is called."""
    return {"mrpc": "mean of accuracy and F1", "stsb": "Pearson-Spearman", "sentiment-rating": "Pearson-Spearman"}.get(task, "accuracy")
