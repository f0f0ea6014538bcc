"""One training of an executed comparison, its outcome and score, and significance tests for differences (PAC+, section VI-B)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from scipy.stats import binomtest

from workbench.core.errors import ConfigError
from workbench.core.serial import to_json
from workbench.tasks.metrics import compute
from workbench.tasks.task import Task

SCORES = {"mrpc": ("accuracy", "f1"), "stsb": ("pearson", "spearman"), "sentiment-rating": ("pearson", "spearman")}
"""Tasks whose score is a mean of two metrics, as in Table VI; all others use the accuracy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All inputs of a training's result.

    technique: full, lora, adapters or parallel_adapters.  dropout: in front of the head.
    backbone: storage of the frozen weights.  samples: at most so many in train, validation, test.
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
    backbone: str = "float32"
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
        """Return its name for a progress line, with every setting that is not the default."""
        named = ("reduction", "initialization", "averaging", "backbone")
        usual = {field.name: field.default for field in fields(self)}
        special = [f"{field} {getattr(self, field)}" for field in named if getattr(self, field) != usual[field]]
        return " ".join((self.task, self.technique, *special, f"seed {self.seed}"))

    @property
    def file_name(self) -> str:
        """Return the name of its outcome's file, which differs for each setting."""
        digest = hashlib.sha256(to_json(self).encode()).hexdigest()[:16]
        return f"{self.task}-{self.technique}-{self.seed}-{digest}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a training.

    curve: (step, validation score), rising steps; the last is the end of the training.  best_step: the end of the epoch with the best
    validation score, whose weights scored the test split, once.  *_outputs: logits (samples, outputs) of that step, in the order of the
    sample ids.  losses: mean training loss of each epoch.  seconds: wall-clock time of the training steps, without scoring; meaningless
    on a machine with other load.
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
    """Return the name of a task's score."""
    return {"mrpc": "mean of accuracy and F1", "stsb": "Pearson-Spearman", "sentiment-rating": "Pearson-Spearman"}.get(task, "accuracy")


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
    task: Task, first: Sequence[Sequence[Sequence[float]]], second: Sequence[Sequence[Sequence[float]]], resamples: int = RESAMPLES
) -> Difference:
    """Compare two techniques: test logits, (samples, outputs) for each seed.  The same samples are drawn for both and all seeds."""
    labels = np.asarray(task.test.labels, dtype=np.float64)
    sides = [[np.asarray(answers(task, one)) for one in side] for side in (first, second)]

    def difference(rows: np.ndarray) -> float:
        means = [np.mean([score_answers(task, one[rows], labels[rows]) for one in side]) for side in sides]
        return float(means[0] - means[1])

    generator = np.random.default_rng(0)
    drawn = np.sort([difference(generator.integers(0, len(labels), len(labels))) for _ in range(resamples)])
    other_side = min(float(np.mean(drawn <= 0)), float(np.mean(drawn >= 0)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Difference(
        points=difference(np.arange(len(labels))), low=float(low), high=float(high), p_value=min(1.0, max(2 * other_side, 1 / resamples))
    )


def mcnemar(task: Task, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Return the exact two-sided p-value of McNemar's test of two sets of test logits (samples, outputs); classification only."""
    one, other = (np.asarray(answers(task, side)) == np.asarray(task.test.labels) for side in (first, second))
    only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
    return 1.0 if only_first + only_second == 0 else float(binomtest(only_first, only_first + only_second).pvalue)


def ensemble(outcomes: Sequence[Outcome]) -> tuple[tuple[float, ...], ...]:
    """Return the mean of several seeds' test logits, (samples, outputs)."""
    return tuple(tuple(row) for row in np.mean([one.test_outputs for one in outcomes], axis=0).tolist())


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation (of the sample; 0 for a single value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
