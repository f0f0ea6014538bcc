"""One training of Table 2 or 7, with forward passes only or by backpropagation in one process, and its files (P-RGE, section 4.1, D.2).

A forward-only training writes each step's seeds and scalars before the next step begins; a restarted training replays them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from workbench.core.errors import ConfigError, check_choice
from workbench.core.serial import to_json, write_text
from workbench.models.loading import load_tokenizer
from workbench.models.zeroth_order import (
    CausalModel,
    LogFile,
    Mezo,
    Prge,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    replay,
)
from workbench.models.zeroth_order.estimators import FirstOrder
from workbench.reproduce.result import kept_or_made, read_kept
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, PromptTask, encode_prompts, evaluate, load_prompt_task, training_batch

Method = Literal["zero-shot", "calibrated", "P-RGE", "MeZO", "FO-SGD", "FO-Adam"]
FORWARD_ONLY = ("P-RGE", "MeZO")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All inputs of a training's result.

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
        check_choice("method", self.method, get_args(Method))
        if self.steps < 0 or self.score_every < 1:
            raise ConfigError(f"{self.steps} steps, scored every {self.score_every}, were asked for.", "That cannot be.", "Raise them.")

    @property
    def name(self) -> str:
        """Return its name for a progress line."""
        words = f"{self.method} {self.technique} q={self.queries} E={self.batch_size} lr={self.learning_rate:g} seed {self.seed}"
        words += ", loss among the label words" if self.loss == "label_words" else ""
        return words if self.steps else self.method

    @property
    def run_header(self) -> dict[str, Any]:
        """Return the inputs of its steps: a longer training continues a shorter one's steps."""
        settings = asdict(self) | {"steps": 0, "score_every": 0, "samples": [self.samples[0], 0, 0]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def is_scored(self, step: int) -> bool:
        """Return whether the validation split is scored after so many steps."""
        return step == self.steps or (0 < step < self.steps and step % self.score_every == 0)

    def path(self, folder: Path) -> Path:
        """Return the file of its outcome, named by all inputs: an interrupted table resumes."""
        return folder / f"{self.task}-{self.method}-{self.technique}-{self.queries}-{self.seed}-{_digest(self)}.json"

    def steps_path(self, folder: Path) -> Path:
        """Return the file of a forward-only training's seeds and scalars, which a longer training continues."""
        return self._shared_path(folder, (self.samples[0], 0, 0), "jsonl")

    def curve_path(self, folder: Path) -> Path:
        """Return the file of its intermediate scores, which a longer training reuses."""
        return self._shared_path(folder, (*self.samples[:2], 0), "curve.json")

    def _shared_path(self, folder: Path, samples: tuple[int, int, int], ending: str) -> Path:
        digest = _digest(replace(self, steps=0, score_every=1, samples=samples))
        return folder / "steps" / f"{self.task}-{self.method}-{self.queries}-{self.seed}-{digest}.{ending}"


def _digest(trial: Trial) -> str:
    return hashlib.sha256(to_json(trial).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """The result of a training.

    curve: (step, validation score in %), rising steps, the last is the end.  validation_score, test_score: of the end, in %.
    loss: mean of the last score_every steps that this run made; None if it made none.  trained_values: number of values in theta.
    """

    trial: Trial
    curve: tuple[tuple[int, float], ...]
    validation_score: float
    test_score: float
    loss: float | None
    trained_values: int


Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Intermediate scores by step."""

    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The data and model that trials of one model and task share: tokenized once."""

    task: PromptTask
    tokenizer: Any
    train: EncodedPrompts

    @classmethod
    def load(cls, trial: Trial) -> Bench:
        """Return the bench of a trial.  Raises as load_prompt_task and encode_prompts do."""
        counts: dict[str, Any] = dict(zip(("train_samples", "validation_samples", "test_samples"), trial.samples, strict=True))
        task, tokenizer = load_prompt_task(trial.task, **counts), load_tokenizer(trial.model)
        train = encode_prompts(task.train, task.prompt, tokenizer, is_causal=True, max_length=trial.max_length)
        return cls(task=task, tokenizer=tokenizer, train=train.among_label_words() if trial.loss == "label_words" else train)

    def score(self, model: CausalModel, trial: Trial, split: Literal["validation", "test"]) -> float:
        """Return the score on a split in per cent."""
        samples, calibration = getattr(self.task, split), "content_free" if trial.method == "calibrated" else "none"
        given: dict[str, Any] = {"is_causal": True, "max_length": trial.max_length, "calibration": calibration}
        return 100 * evaluate(model.logits_at, self.task, samples, self.tokenizer, **given).value


class Runner:
    """Runs trials, or finds their outcomes and steps in a folder, where it also stores them."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self.folder, self.progress = folder, progress
        self._benches: dict[tuple[object, ...], Bench] = {}

    def outcome(self, trial: Trial) -> TrialOutcome:
        """Return a trial's outcome: from the folder if it exists, otherwise by running it now."""
        outcome = kept_or_made(trial.path(self.folder), TrialOutcome, lambda: self._run(trial))
        self.progress(f"{trial.name}: validation {outcome.validation_score:.1f}, test {outcome.test_score:.1f}")
        return outcome

    def validation_score(self, trial: Trial) -> float:
        """Return the validation score at a trial's end in per cent, training up to there if it is not stored; nothing is tested."""
        kept = _read_scores(trial.curve_path(self.folder))
        if trial.steps not in kept:
            kept = dict(self._trained(trial)[0].points)
        self.progress(f"{trial.name}: validation {kept[trial.steps]:.1f} after {trial.steps} steps")
        return kept[trial.steps]

    def _run(self, trial: Trial) -> TrialOutcome:
        """Train, score the validation split at intervals and both splits at the end."""
        curve, losses = self._trained(trial)
        recent = losses[-trial.score_every :]
        return TrialOutcome(
            trial=trial,
            curve=curve.points,
            validation_score=curve.points[-1][1],
            test_score=curve.bench.score(curve.model, trial, "test"),
            loss=fmean(recent) if recent else None,
            trained_values=curve.model.trainables.num_values if trial.steps else 0,
        )

    def _trained(self, trial: Trial) -> tuple[_Curve, list[float]]:
        """Return a trained model with its scores, and the losses of the steps that were made now."""
        key = (trial.model, trial.task, trial.samples, trial.max_length, trial.loss)
        if key not in self._benches:
            self._benches[key] = Bench.load(trial)
        technique: Any = trial.technique
        model = load_causal_model(trial.model, TrainableConfig(technique=technique, rank=trial.rank, alpha=trial.alpha, seed=trial.seed))
        curve = _Curve(trial.curve_path(self.folder), trial, self._benches[key], model, self.progress)
        losses: list[float] = []
        if trial.steps:
            losses = _forward_only(curve, trial.steps_path(self.folder)) if trial.method in FORWARD_ONLY else _by_backpropagation(curve)
        curve.at(trial.steps)
        return curve, losses


class _Curve:
    """A trial's model and its intermediate scores, stored in a file: replayed steps are not scored again."""

    def __init__(self, path: Path, trial: Trial, bench: Bench, model: CausalModel, progress: Progress) -> None:
        self.trial, self.bench, self.model = trial, bench, model
        self._path, self._progress = path, progress
        # Backpropagation restarts from the beginning, and may not give bit-identical results.
        self._known = _read_scores(path) if trial.method in FORWARD_ONLY else {}

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Return the trial's own (step, score), rising."""
        return tuple(sorted((step, score) for step, score in self._known.items() if self.trial.is_scored(step)))

    def batch(self, step: int) -> PromptBatch:
        """Return the samples of a step; score before it if that is due."""
        self.on_the_way(step)
        return training_batch(self.bench.train, self.trial.batch_size, self.trial.seed, step)

    def on_the_way(self, step: int) -> None:
        """Score if it is due, before a step."""
        if step and self.trial.is_scored(step):
            self.at(step)

    def at(self, step: int) -> None:
        """Score after so many steps."""
        if step not in self._known:
            self._known[step] = self.bench.score(self.model, self.trial, "validation")
            write_text(self._path, to_json(_Scores(points=tuple(sorted(self._known.items()))), indent=-1))
            self._progress(f"{self.trial.name}: step {step}, validation {self._known[step]:.1f}")


def _forward_only(curve: _Curve, steps_path: Path) -> list[float]:
    """Replay the stored steps and make the missing ones; return the losses of the latter."""
    trial, model, losses = curve.trial, curve.model, list[float]()
    config = ZerothOrderConfig(queries=trial.queries, epsilon=trial.epsilon, learning_rate=trial.learning_rate, seed=trial.seed)
    in_place = trial.method == "MeZO"
    estimator = Mezo(model, config) if in_place else Prge(model, config)
    with LogFile(steps_path, trial.run_header) as log:
        done = log.steps[: trial.steps]
        for step, one in enumerate(done):
            curve.on_the_way(step)
            replay(model.trainables, [one], in_place_epsilon=trial.epsilon if in_place else None)
        for step in range(len(done), trial.steps):
            made = estimator.step(curve.batch(step), step)
            log.append(made.log)
            losses.append(made.loss)
    return losses


def _by_backpropagation(curve: _Curve) -> list[float]:
    trial = curve.trial
    estimator = FirstOrder(curve.model, "adam" if trial.method == "FO-Adam" else "sgd", trial.learning_rate)
    return [estimator.step(curve.batch(step)) for step in range(trial.steps)]


def _read_scores(path: Path) -> dict[int, float]:
    kept = read_kept(path, _Scores)
    return {} if kept is None else dict(kept.points)
