"""The facts of a training job before there is a plan: task, tokens, the model's shape, the labels' scale."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.common.scaling import profiled_length
from workbench.methods.training.handlers import PlannedStep, planned_epoch, typical_steps
from workbench.models.configuration import ModelFacts
from workbench.models.configuration import require_known as require_known_model
from workbench.models.loading import load_tokenizer
from workbench.models.quantization.config import QuantizationConfig
from workbench.models.techniques import TechniqueConfig
from workbench.tasks import TASKS, load_task, unknown_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, tokenize

SMALLEST_SPREAD, SMALLEST_SPREAD_OF_MEAN = 1e-15, 1e-6
"""The least standard deviation of a regression's labels, and its least share of their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTraining:
    """A job with all data that is known before planning; a method adds its own settings.

    notes: notes for the report.
    """

    job: Job
    task: Task
    train: TokenizedSplit
    validation: TokenizedSplit
    test: TokenizedSplit
    facts: ModelFacts
    notes: tuple[str, ...] = ()

    @property
    def quantization(self) -> QuantizationConfig:
        """Return how the frozen weights are stored."""
        return QuantizationConfig(storage="float32")

    @property
    def predicts_words(self) -> bool:
        """Return whether a decoder-only model's own head is needed."""
        return self.task.kind == "text_generation"

    @property
    def typical_length(self) -> int:
        """Return the average padded length of a mini-batch with samples of similar length, for planning."""
        lengths = self.train.lengths
        mean = sum(lengths) / len(lengths)
        return max(8, round(mean / 8 + 0.5) * 8)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest training sample."""
        return max(self.train.lengths)

    @property
    def profiled_length(self) -> int:
        """Return the largest sequence length to measure; all pictures have the same length."""
        return (
            self.longest if self.task.train.images is not None else profiled_length(self.longest, self.facts.max_length)
        )

    @property
    def num_steps(self) -> int:
        """Return the steps of the whole run."""
        return self.job.epochs * math.ceil(len(self.train) / self.job.batch_size)

    def steps_on(self, world_size: int) -> int:
        """Return the number of steps of the whole run on this many devices, as counted by faults and progress."""
        return self.num_steps

    def typical_step(self, micro_batches: int) -> PlannedStep:
        """Return the mini-batch of the first epoch that is closest to the typical length, to compare plans."""
        job = self.job
        steps = planned_epoch(self.train.lengths, job.batch_size, micro_batches, seed=job.seed, epoch=0)
        [step] = typical_steps(steps, job.batch_size, self.typical_length, 1).values()
        return step

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return the notes for a report: the method's, and how much of the training data is left out."""
        if not self.train.left_out:
            return self.notes
        cut_off = {"token_classification": "words beyond", "text_generation": "an answer that ends beyond"}.get(
            self.task.kind, "an answer that is longer than a window of"
        )
        note = (
            f"{self.train.left_out} of {len(self.task.train)} training samples have {cut_off} max_length tokens, which "
            "is not learnt."
        )
        return (*self.notes, note)

    def data_digest(self) -> str:
        """Return a digest of tokens and labels in order."""
        digest = hashlib.sha256()
        digest.update(repr((self.train.words, self.train.start_id)).encode())
        for ids, label in zip(self.train.ids, self.train.windows or self.train.labels, strict=True):
            digest.update(repr((ids, label)).encode())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTechnique(PreparedTraining):
    """A job that backpropagates through the backbone.  config: the technique's configuration."""

    config: TechniqueConfig


def require_task_and_model(job: Job) -> None:
    """Raise ConfigError for an unknown task or model, before anything large is loaded."""
    if job.task not in TASKS:
        raise unknown_task(job.task)
    require_known_model(job.model)


def load_samples(job: Job, facts: ModelFacts, change: Callable[[Task], Task] | None = None) -> dict[str, Any]:
    """Return the task and its tokenized splits as fields of PreparedTraining.  change: the method's change of
    the task.
    """
    task = load_task(
        job.task,
        data=job.data,
        columns=job.columns,
        train_samples=job.train_samples,
        validation_samples=job.validation_samples,
        test_samples=job.test_samples,
    )
    if change is not None:
        task = change(task)
    if task.kind == "text_generation" and not facts.is_causal:
        raise ConfigError(
            f"The task '{job.task}' was asked for with the model '{job.model}'.",
            "That does not predict the next word of a text.",
            "Choose a decoder-only model, such as SmolLM2-135M.",
        )
    tokenizer = load_tokenizer(job.model)
    splits = {
        name: tokenize(
            getattr(task, name), tokenizer, max_length=min(job.max_length, facts.max_length), words=tuple(task.words)
        )
        for name in ("train", "validation", "test")
    }
    return {"job": job, "facts": facts, "task": task} | splits


def technique_settings(samples: Mapping[str, Any], dropout: float) -> dict[str, Any]:
    """Return the settings that every technique has from its model, its task and the job.  samples: see load_samples.

    Raises ConfigError for labels that hardly differ in float32, in which heads compute.
    """
    job, facts, task = samples["job"], samples["facts"], samples["task"]
    return {
        "hidden_size": facts.hidden_size,
        "num_layers": facts.num_layers,
        "kind": task.kind,
        "num_outputs": task.num_outputs,
        "dropout": dropout,
        "seed": job.seed,
        **_label_scale(task, samples["train"]),
    }


def _label_scale(task: Task, train: TokenizedSplit) -> dict[str, float]:
    """Return the mean and standard deviation of a regression's labels; neutral values for other tasks."""
    if task.kind != "regression":
        return {"label_mean": 0.0, "label_std": 1.0}
    mean, std = fmean(train.labels), pstdev(train.labels)
    if 0 < std < max(SMALLEST_SPREAD, SMALLEST_SPREAD_OF_MEAN * abs(mean)):
        problem = f"They are {mean:.9g} with a standard deviation of {std:.3g}, which float32 cannot tell apart."
        raise ConfigError(
            f"The numbers of the task '{task.name}' were to be learnt.", problem, "Subtract their mean, or scale them."
        )
    return {"label_mean": mean, "label_std": std or 1.0}
