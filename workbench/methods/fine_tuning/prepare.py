"""Find a job's model and data, and settle the technique and the paradigm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.ranges import Dropout, Positive, Width
from workbench.methods.options import read_options, require_width
from workbench.models.loading import ModelFacts, load_tokenizer, model_facts
from workbench.models.loading import require_known as require_known_model
from workbench.models.lora import require_peft
from workbench.models.techniques import Technique, TechniqueConfig
from workbench.tasks import TASKS, load_task, unknown_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, tokenize

Paradigm = Literal["hybrid", "standalone", "data_parallel", "pipeline_parallel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningOptions:
    """Settings of fine-tuning, given in Job.options.

    technique: 'full', 'lora' or 'adapters'; lora_rank to dropout: see TechniqueConfig.
    paradigm: 'standalone' is one device and 'data_parallel' (EDDL) the whole model on each, both without micro-batches (section VI-B);
    'pipeline_parallel' (Eco-FL) has one device for each stage, 'hybrid' (as Asteroid) groups of them, fitted to unequal devices.
    """

    technique: Technique = "lora"
    paradigm: Paradigm = "hybrid"
    lora_rank: Width = 8
    lora_alpha: Positive = 16.0
    lora_dropout: Dropout = 0.0
    bottleneck: Width = 64
    train_norms: bool = True
    dropout: Dropout = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with everything that is known before a plan: task, tokens, the model's shape, what is trained."""

    job: Job
    options: FineTuningOptions
    task: Task
    train: TokenizedSplit
    validation: TokenizedSplit
    test: TokenizedSplit
    facts: ModelFacts
    config: TechniqueConfig

    @property
    def typical_length(self) -> int:
        """Return the padded length that a mini-batch of similar samples has on average, for planning."""
        lengths = self.train.lengths
        mean = sum(lengths) / len(lengths)
        return max(8, round(mean / 8 + 0.5) * 8)

    def data_digest(self) -> str:
        """Return a digest of tokens and labels in their order."""
        digest = hashlib.sha256()
        for ids, label in zip(self.train.ids, self.train.labels, strict=True):
            digest.update(repr((ids, label)).encode())
        return digest.hexdigest()


def require_known(job: Job) -> None:
    """Raise ConfigError at once for an option, task or model that does not exist, or without peft for LoRA."""
    options = read_options("fine_tuning", FineTuningOptions, job.options)
    if options.technique == "lora":
        require_peft()
    if job.task not in TASKS:
        raise unknown_task(job.task)
    require_known_model(job.model)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = read_options("fine_tuning", FineTuningOptions, job.options)
    facts = model_facts(job.model)
    require_width("fine_tuning", "lora_rank", options.lora_rank, job.model, facts.hidden_size)
    require_width("fine_tuning", "bottleneck", options.bottleneck, job.model, 4 * facts.hidden_size)
    task = load_task(job.task, data=job.data).limited(job.train_samples, job.validation_samples, job.test_samples)
    tokenizer = load_tokenizer(job.model)
    max_length = min(job.max_length, facts.max_length)
    train, validation, test = (tokenize(split, tokenizer, max_length=max_length) for split in (task.train, task.validation, task.test))
    config = TechniqueConfig(
        technique=options.technique,
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        kind=task.kind,
        num_outputs=task.num_outputs,
        lora_rank=options.lora_rank,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        bottleneck=options.bottleneck,
        train_norms=options.train_norms,
        dropout=options.dropout,
        seed=job.seed,
        label_mean=fmean(train.labels) if task.kind == "regression" else 0.0,
        label_std=(pstdev(train.labels) or 1.0) if task.kind == "regression" else 1.0,
    )
    return PreparedJob(job=job, options=options, task=task, train=train, validation=validation, test=test, facts=facts, config=config)


def check_shape(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or batch; how finely it cuts a mini-batch is its own."""
    job, asked = prepared.job, f"The plan {plan.partition()} on {plan.grouping()} was asked for."
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if plan.num_layers != prepared.facts.num_layers:
        found, todo = f"It has {plan.num_layers} layers; '{job.model}' has {prepared.facts.num_layers}.", "Cut all layers into stages."
    elif max(ranks) >= cluster.world_size or len(ranks) > len(set(ranks)):
        found, todo = f"It uses ranks {ranks}; the cluster has {cluster.world_size} devices.", "Use each device once."
    elif plan.mini_batch_size != job.batch_size:
        found, todo = f"Its mini-batches are {plan.mini_batch_size}, the job's {job.batch_size}.", "Plan for the job's batch_size."
    else:
        return
    raise ConfigError(asked, found, todo)
