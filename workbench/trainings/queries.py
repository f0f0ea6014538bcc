"""Train a language model with forward passes, or by backpropagation, in this process (P-RGE, Algorithm 1, section 4.1,
D.2).

A forward-only training writes each step's seeds and scalars before the next step begins; a restarted training replays
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from workbench.core.errors import ConfigError, check_choice
from workbench.core.serial import read_stored, text_digest, to_json, write_json
from workbench.methods.common.result import model_encoder
from workbench.methods.p_rge.zeroth_order import (
    FirstOrder,
    LogFile,
    Mezo,
    Prge,
    StepResult,
    TrainableConfig,
    ZerothOrderConfig,
    load_causal_model,
    replay,
)
from workbench.tasks import load_task
from workbench.tasks.prompts import EncodedPrompts, PromptBatch, evaluate, training_batch
from workbench.tasks.task import Task

Method = Literal["zero-shot", "calibrated", "P-RGE", "MeZO", "FO-SGD", "FO-Adam"]
FORWARD_ONLY = ("P-RGE", "MeZO")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All inputs of a training's result.

    P-RGE: both parallelizations.  MeZO: perturbed in place, one pass after another.  zero-shot, calibrated: no steps.
    loss: whether the loss is over the whole vocabulary or only over the label words.
    technique: lora_fa, lora, dora, vera or full.  samples: maximum numbers in train, validation and test.
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
            raise ConfigError(
                f"{self.steps} steps, scored every {self.score_every}, were asked for.",
                "That cannot be.",
                "Raise them.",
            )

    @property
    def name(self) -> str:
        """Return its name for a progress line."""
        words = (
            f"{self.method} {self.technique} q={self.queries} E={self.batch_size} lr={self.learning_rate:g} seed "
            f"{self.seed}"
        )
        words += ", loss among the label words" if self.loss == "label_words" else ""
        return words if self.steps else self.method

    @property
    def zeroth_order(self) -> ZerothOrderConfig:
        """Return how a step estimates its gradient.  Raises ConfigError for invalid settings."""
        return ZerothOrderConfig(
            queries=self.queries, epsilon=self.epsilon, learning_rate=self.learning_rate, seed=self.seed
        )

    @property
    def run_header(self) -> dict[str, Any]:
        """Return the inputs of its steps: a longer training continues a shorter one's steps."""
        settings = asdict(self) | {"steps": 0, "score_every": 0, "samples": [self.samples[0], 0, 0]}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}

    def path(self, folder: Path) -> Path:
        """Return the file of its outcome, named by all inputs: an interrupted table resumes."""
        digest = text_digest(to_json(self))
        return folder / f"{self.task}-{self.method}-{self.technique}-{self.queries}-{self.seed}-{digest}.json"

    def steps_path(self, folder: Path) -> Path:
        """Return the file of a forward-only training's seeds and scalars, which a longer training continues."""
        return self._shared_path(folder, (self.samples[0], 0, 0), "jsonl")

    def curve_path(self, folder: Path) -> Path:
        """Return the file of its curve, which a longer training continues."""
        return self._shared_path(folder, (*self.samples[:2], 0), "curve.json")

    def _shared_path(self, folder: Path, samples: tuple[int, int, int], ending: str) -> Path:
        digest = text_digest(to_json(replace(self, steps=0, score_every=1, samples=samples)))
        return folder / "steps" / f"{self.task}-{self.method}-{self.queries}-{self.seed}-{digest}.{ending}"


@dataclass(slots=True)
class Curve:
    """The measured curve.

    losses, scores: (step, value), steps from 1; the score at 0 is the untrained model's.

    baselines: scores of the untrained model, by name.  steps: number done.  resumed: how many of them were replayed
    from the log.
    seconds: seconds of the steps with a loss in this curve, without scoring.
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


@lru_cache(maxsize=4)
def _data(
    model: str, task: str, samples: tuple[int, int, int], max_length: int, loss: str
) -> tuple[Task, EncodedPrompts]:
    """Return the task, and its training samples as tokens.  Raises as load_task and PromptEncoder do."""
    counts: dict[str, Any] = dict(zip(("train_samples", "validation_samples", "test_samples"), samples, strict=True))
    loaded = load_task(task, prompted=True, **counts)
    train = model_encoder(loaded.template, model, max_length).split(loaded.train.prompts)
    return loaded, train.among_label_words() if loss == "label_words" else train


class QueryTraining:
    """A trial's model, task and steps.

    curve: the curve so far.

    folder: folder with a log of the seeds and scalars of forward-only steps, and the curve.  A log of the same settings
    is replayed first, so that training continues from its end, and replayed steps are not scored again.  None: nothing
    is stored.
    Raises ConfigError or MissingDataError for settings, names and logs that cannot be used.
    """

    def __init__(self, trial: Trial, folder: Path | None = None) -> None:
        self.settings, self.curve = trial, Curve()
        self.task, self.train = _data(trial.model, trial.task, trial.samples, trial.max_length, trial.loss)
        technique: Any = trial.technique
        self.model = load_causal_model(
            trial.model, TrainableConfig(technique=technique, rank=trial.rank, alpha=trial.alpha, seed=trial.seed)
        )
        self._estimator: Prge | Mezo | FirstOrder
        if trial.method.startswith("FO"):
            self._estimator = FirstOrder(
                self.model, "adam" if trial.method == "FO-Adam" else "sgd", trial.learning_rate
            )
        else:
            self._estimator = (Mezo if trial.method == "MeZO" else Prge)(self.model, trial.zeroth_order)
        self._curve_path = None if folder is None else trial.curve_path(folder)
        self._log: LogFile | None = None
        # Backpropagation restarts from the beginning, and may not give bit-identical results.
        if folder is not None and trial.method in FORWARD_ONLY:
            self._log = LogFile(trial.steps_path(folder), trial.run_header)
            stored, logged = read_stored(trial.curve_path(folder), Curve) or Curve(), len(self._log.steps)
            losses, scores = (
                [(step, value) for step, value in each if step <= logged] for each in (stored.losses, stored.scores)
            )
            self.curve = replace(stored, losses=losses, scores=scores, steps=0, resumed=0)

    def batch(self, step: int, *, samples: int | None = None) -> PromptBatch:
        """Return the samples of a step, counted from 0.  samples: number of samples, if it differs from the trial's."""
        return training_batch(self.train, samples or self.settings.batch_size, self.settings.seed, step)

    def step(self) -> StepResult | float:
        """Run the next step and write it to the log; return its result, or its loss if it is first-order.

        Raises DivergedError if losses are not finite.
        """
        curve, begin = self.curve, time.perf_counter()
        result = self._estimator.step(self.batch(curve.steps), curve.steps)
        if self._log is not None:
            assert isinstance(result, StepResult)
            self._log.append(result.log)
        curve.seconds += time.perf_counter() - begin
        curve.steps += 1
        curve.losses.append((curve.steps, result if isinstance(result, float) else result.loss))
        return result

    def score(self, split: Literal["validation", "test"] = "validation", calibration: Any = "none") -> float:
        """Return the current model's score on a split."""
        encoder = model_encoder(self.task.template, self.settings.model, self.settings.max_length)
        samples = (self.task.validation if split == "validation" else self.task.test).prompts
        unlabelled = self.task.train.prompts
        return evaluate(self.model.logits_at, samples, encoder, calibration=calibration, unlabelled=unlabelled).value

    def score_untrained(self) -> None:
        """Score the model before its first step, with and without calibration, unless the curve has these baselines."""
        curve = self.curve
        if not curve.baselines and curve.steps == 0:
            curve.scores.insert(0, (0, self.score()))
            curve.baselines = {"zero-shot": curve.scores[0][1], "calibrated": self.score(calibration="mean_prior")}

    def run(
        self,
        steps: int,
        report: Callable[[Curve], None] = lambda curve: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Curve:
        """Train up to `steps` steps, those of the log included, and score at intervals and at the end.

        report: receives the curve after each new step or score; stopped: called before each step.
        """
        curve = self.curve
        logged = () if self._log is None else self._log.steps[:steps]
        in_place = self.settings.zeroth_order if self.settings.method == "MeZO" else None
        for step_log in logged[curve.steps :]:
            replay(self.model.trainables, [step_log], in_place=in_place)
            curve.steps, curve.resumed = curve.steps + 1, curve.resumed + 1
            if self._score_if_due(steps):
                report(curve)
        while curve.steps < steps and not stopped():
            self.step()
            self._score_if_due(steps)
            report(curve)
        self._keep()
        return curve

    def _score_if_due(self, steps: int) -> bool:
        step = self.curve.steps
        is_due = (step == steps or step % self.settings.score_every == 0) and step not in dict(self.curve.scores)
        if is_due:
            self.curve.scores = sorted([*self.curve.scores, (step, self.score())])
            self._keep()
        return is_due

    def _keep(self) -> None:
        if self._curve_path is not None:
            write_json(self._curve_path, self.curve)
