"""Train a language model with forward passes in this process, step by step, with a log to resume from (P-RGE, Algorithm 1)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from workbench.core.serial import from_json, to_json, write_text
from workbench.models.loading import load_tokenizer, model_facts
from workbench.models.zeroth_order import (
    CausalModel,
    LogFile,
    Prge,
    StepResult,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    replay,
)
from workbench.tasks.prompts import PromptBatch, encode_prompts, evaluate, load_prompt_task, training_batch

Told = Callable[["Curve"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """model, task: names.  queries: q.  batch_size: E, samples of a step.  score_every: steps between two validation scores.

    loss: over the whole vocabulary, as in the paper, or over the label words alone, as in MeZO.
    """

    model: str
    task: str = "sentiment"
    queries: int = 4
    batch_size: int = 4
    epsilon: float = 1e-2
    learning_rate: float = 2e-3
    seed: int = 0
    train_samples: int = 1000
    validation_samples: int = 200
    max_length: int = 64
    score_every: int = 50
    loss: Literal["vocabulary", "label_words"] = "vocabulary"

    @property
    def zeroth_order(self) -> ZerothOrderConfig:
        """Return how a step estimates its gradient.  Raises ConfigError for invalid settings."""
        return ZerothOrderConfig(queries=self.queries, epsilon=self.epsilon, learning_rate=self.learning_rate, seed=self.seed)


@dataclass(slots=True)
class Curve:
    """The measured curve.  losses, scores: (step, value), steps from 1; the score at 0 is the untrained model's.

    steps: number done.  resumed: how many of them the log already had.  seconds: of the steps with a loss in this curve, without scores.
    """

    losses: list[tuple[int, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    resumed: int = 0
    seconds: float = 0.0

    @property
    def step_s(self) -> float:
        """Return a step's mean seconds, 0 if no step was measured."""
        return self.seconds / max(1, len(self.losses))


class QueryTraining:
    """A model, its task and a log of steps.

    log: a file of seeds and scalars.  A log of the same settings is replayed first, so that training resumes where it ended.  Its losses
    and scores are kept in a file next to it.  None: nothing is kept.
    Raises ConfigError or MissingDataError for settings, names and logs that cannot be used.
    """

    def __init__(self, settings: TrainingSettings, log: Path | None = None) -> None:
        config = settings.zeroth_order
        self.settings, self.curve = settings, Curve()
        facts, self._tokenizer = model_facts(settings.model), load_tokenizer(settings.model)
        self._reading: Any = {"is_causal": facts.is_causal, "max_length": min(settings.max_length, facts.max_length)}
        self.task = load_prompt_task(settings.task, train_samples=settings.train_samples, validation_samples=settings.validation_samples)
        encoded = encode_prompts(self.task.train, self.task.prompt, self._tokenizer, **self._reading)
        self.train = encoded.among_label_words() if settings.loss == "label_words" else encoded
        self.model = load_causal_model(settings.model, TrainableConfig(seed=settings.seed))
        self._estimator = Prge(self.model, config)
        self._log, self._seen = None, None
        if log is not None:
            self._log = LogFile(log, {name: value for name, value in asdict(settings).items() if name != "score_every"})
            self._seen = log.with_suffix(".curve.json")
            done = replay(self.model.trainables, self._log.steps)
            if done and self._seen.is_file():
                kept = from_json(self._seen.read_text(encoding="utf-8"), Curve)
                self.curve.losses = [(step, loss) for step, loss in kept.losses if step <= done]
                self.curve.scores = [(step, score) for step, score in kept.scores if step <= done]
                self.curve.baselines, self.curve.seconds = kept.baselines, kept.seconds
            self.curve.steps = self.curve.resumed = done

    def batch(self, step: int, *, samples: int | None = None) -> PromptBatch:
        """Return the samples of a step, counted from 0; another number of samples if given."""
        return training_batch(self.train, samples or self.settings.batch_size, self.settings.seed, step)

    def step(self) -> StepResult:
        """Make the next step and write it to the log.  Raises DivergedError if losses are not finite."""
        at = self.curve.steps
        begin = time.perf_counter()
        result = self._estimator.step(self.batch(at), at)
        if self._log is not None:
            self._log.append(result.log)
        self.curve.seconds += time.perf_counter() - begin
        self.curve.losses.append((at + 1, result.loss))
        self.curve.steps += 1
        return result

    def score(self, calibration: str = "none") -> float:
        """Return the validation score of the current model."""
        found = evaluate(
            self.model.logits_at,
            self.task,
            self.task.validation,
            self._tokenizer,
            calibration=calibration,  # type: ignore[arg-type]
            **self._reading,
        )
        return found.value

    def run(self, steps: int, told: Told = lambda curve: None, stopped: Callable[[], bool] = lambda: False) -> Curve:
        """Train up to `steps` steps, those of the log included.  told: receives the curve after each; stopped: called before each."""
        curve = self.curve
        if not curve.baselines and curve.steps == 0:
            curve.scores.append((0, self.score()))
            curve.baselines = {"zero-shot": curve.scores[0][1], "calibrated": self.score("mean_prior")}
        while curve.steps < steps and not stopped():
            self.step()
            if curve.steps % self.settings.score_every == 0 or curve.steps == steps:
                curve.scores.append((curve.steps, self.score()))
                self._keep()
            told(curve)
        if not curve.scores:
            curve.scores.append((curve.steps, self.score()))
        self._keep()
        return curve

    def _keep(self) -> None:
        if self._seen is not None:
            write_text(self._seen, to_json(self.curve) + "\n")

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def frozen_and_trained(model: CausalModel) -> tuple[int, int]:
    """Return the number of frozen weights and the number of trained weights."""
    unique = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor)}
    trained = model.trainables.num_values
    return sum(unique.values()) - trained, trained
