"""Train a small model by forward passes or by backpropagation in one process, and score it (P-RGE, section 4.1, appendix D.2).

A forward-only training writes each step's seeds and scalars before the next begins; one that is begun again replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from workbench.core.errors import ConfigError
from workbench.core.serial import from_json, to_json, write_text
from workbench.models.loading import load_tokenizer
from workbench.models.zeroth_order import (
    CausalModel,
    LogFile,
    Mezo,
    Prge,
    StepLog,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    replay,
)
from workbench.models.zeroth_order.first_order import FirstOrder
from workbench.reproduce.p_rge.executed_runs import FORWARD_ONLY, Trial, TrialFolder, TrialOutcome
from workbench.tasks.prompts import EncodedPrompts, PromptTask, encode_prompts, evaluate, load_prompt_task, training_batch

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scores:
    """Scores on the way by their steps."""

    points: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What trials of one model and task share: tokenized once."""

    task: PromptTask
    tokenizer: Any
    train: EncodedPrompts

    @classmethod
    def load(cls, trial: Trial) -> Bench:
        """Return it for a trial.  Raises as load_prompt_task and encode_prompts do."""
        counts: dict[str, Any] = dict(zip(("train_samples", "validation_samples", "test_samples"), trial.samples, strict=True))
        task, tokenizer = load_prompt_task(trial.task, **counts), load_tokenizer(trial.model)
        train = encode_prompts(task.train, task.prompt, tokenizer, is_causal=True, max_length=trial.max_length)
        return cls(task=task, tokenizer=tokenizer, train=train)

    def score(self, model: CausalModel, trial: Trial, split: Literal["validation", "test"]) -> float:
        """Return the score on a split in per cent."""
        return (
            100
            * evaluate(
                model.logits_at,
                self.task,
                getattr(self.task, split),
                self.tokenizer,
                is_causal=True,
                max_length=trial.max_length,
                calibration="content_free" if trial.method == "calibrated" else "none",
            ).value
        )


def run_all(trials: Sequence[Trial], folder: TrialFolder, progress: Progress) -> dict[Trial, TrialOutcome]:
    """Return the outcome of each trial: from the folder where it is there, else by running it now."""
    benches: dict[tuple[object, ...], Bench] = {}
    found = {}
    for trial in trials:
        outcome = folder.find(trial)
        if outcome is None:
            key = (trial.model, trial.task, trial.samples, trial.max_length)
            if key not in benches:
                benches[key] = Bench.load(trial)
            outcome = run_trial(trial, benches[key], folder, progress)
            folder.keep(outcome)
        progress(f"{trial.name}: validation {outcome.validation_score:.1f}, test {outcome.test_score:.1f}")
        found[trial] = outcome
    return found


def run_trial(trial: Trial, bench: Bench, folder: TrialFolder, progress: Progress) -> TrialOutcome:
    """Train, score the validation split on the way and both splits at the end."""
    technique: Any = trial.technique
    model = load_causal_model(trial.model, TrainableConfig(technique=technique, rank=trial.rank, alpha=trial.alpha, seed=trial.seed))
    curve = _Curve(folder.curve_path(trial), trial, bench, model, progress)
    losses: list[float] = []
    if trial.steps:
        train = _forward_only if trial.method in FORWARD_ONLY else _by_backpropagation
        train(trial, bench, model, folder, curve, losses)
    curve.at(trial.steps)
    recent = losses[-trial.score_every :]
    return TrialOutcome(
        trial=trial,
        curve=curve.points,
        validation_score=curve.points[-1][1],
        test_score=bench.score(model, trial, "test"),
        loss=fmean(recent) if recent else None,
        trained_values=model.trainables.num_values if trial.steps else 0,
    )


def _forward_only(trial: Trial, bench: Bench, model: CausalModel, folder: TrialFolder, curve: _Curve, losses: list[float]) -> None:
    config = ZerothOrderConfig(queries=trial.queries, epsilon=trial.epsilon, learning_rate=trial.learning_rate, seed=trial.seed)
    in_place = trial.method == "MeZO"
    estimator = Mezo(model, config) if in_place else Prge(model, config)
    with LogFile(folder.steps_path(trial), trial.run_header) as log:
        done: tuple[StepLog, ...] = log.steps[: trial.steps]
        for step, one in enumerate(done):
            curve.on_the_way(step)
            replay(model.trainables, [one], in_place_epsilon=trial.epsilon if in_place else None)
        for step in range(len(done), trial.steps):
            curve.on_the_way(step)
            made = estimator.step(training_batch(bench.train, trial.batch_size, trial.seed, step), step)
            log.append(made.log)
            losses.append(made.loss)


def _by_backpropagation(trial: Trial, bench: Bench, model: CausalModel, folder: TrialFolder, curve: _Curve, losses: list[float]) -> None:
    estimator = FirstOrder(model, "adam" if trial.method == "FO-Adam" else "sgd", trial.learning_rate)
    for step in range(trial.steps):
        curve.on_the_way(step)
        losses.append(estimator.step(training_batch(bench.train, trial.batch_size, trial.seed, step)))


class _Curve:
    """Scores on the way, kept in a file: steps that are replayed are not scored again."""

    def __init__(self, path: Path, trial: Trial, bench: Bench, model: CausalModel, progress: Progress) -> None:
        self._path, self._trial, self._bench, self._model, self._progress = path, trial, bench, model, progress
        self._known: dict[int, float] = {}
        if path.is_file():
            try:
                self._known = dict(from_json(path.read_bytes(), _Scores, source=str(path)).points)
            except ConfigError:  # cut off: score again
                self._known = {}
        if trial.method not in FORWARD_ONLY:
            self._known = {}  # begins anew, and need not find the same to the bit

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Return (step, score), rising."""
        return tuple(sorted(self._known.items()))

    def on_the_way(self, step: int) -> None:
        """Score if it is time to, before a step."""
        if step and step % self._trial.score_every == 0:
            self.at(step)

    def at(self, step: int) -> None:
        """Score after so many steps."""
        if step not in self._known:
            self._known[step] = self._bench.score(self._model, self._trial, "validation")
            write_text(self._path, to_json(_Scores(points=self.points), indent=-1))
            self._progress(f"{self._trial.name}: step {step}, validation {self._known[step]:.1f}")
