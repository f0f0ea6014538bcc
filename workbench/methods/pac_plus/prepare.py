"""Find a job's model and data, and settle PAC+'s options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.loading import ModelFacts, load_tokenizer, model_facts
from workbench.runtime.activation_cache import cache_dtype
from workbench.tasks import load_task
from workbench.tasks.task import Task
from workbench.tasks.tokenize import TokenizedSplit, tokenize

Initialization = Literal["fan_in", "gaussian", "zero", "pruned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusOptions:
    """PAC+'s own settings, given in Job.options.

    reduction: r.  initialization: of the side network (section IV-C).  cache_dtype: float32 or bfloat16.
    keep_cache: leave the activation cache on the disk after the run.  order: of the devices, 'given' or 'all' tried.
    objective: the planner's, 'paper' (Eq. 5-7) or 'bottleneck' (ours: any stage may be the slowest).
    """

    reduction: int = 8
    dropout: float = 0.1
    initialization: Initialization = "fan_in"
    cache_dtype: str = "bfloat16"
    keep_cache: bool = False
    order: Literal["given", "all"] = "given"
    objective: Literal["paper", "bottleneck", "simulated"] = "simulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with everything that is known before a plan: task, tokens, the model's shape, the adapter's."""

    job: Job
    options: PacPlusOptions
    task: Task
    train: TokenizedSplit
    validation: TokenizedSplit
    test: TokenizedSplit
    facts: ModelFacts
    adapter: ParallelAdapterConfig

    @property
    def typical_length(self) -> int:
        """Return the padded length that a mini-batch of similar samples has on average, for planning."""
        lengths = self.train.lengths
        mean = sum(lengths) / len(lengths)
        return max(8, round(mean / 8 + 0.5) * 8)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the whole activation cache: s x h x (l + 1) values a sample (section V-B, storage cost)."""
        tokens = sum(self.train.lengths)
        return tokens * (self.facts.num_layers + 1) * self.facts.hidden_size * cache_dtype(self.options.cache_dtype).itemsize

    def data_digest(self) -> str:
        """Return a digest of tokens and labels in their order."""
        digest = hashlib.sha256()
        for ids, label in zip(self.train.ids, self.train.labels, strict=True):
            digest.update(repr((ids, label)).encode())
        return digest.hexdigest()


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = _options(job)
    facts = model_facts(job.model)
    task = load_task(job.task, data=job.data).limited(job.train_samples, job.validation_samples, job.test_samples)
    tokenizer = load_tokenizer(job.model)
    max_length = min(job.max_length, facts.max_length)
    adapter = ParallelAdapterConfig(
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        reduction=options.reduction,
        is_causal=facts.is_causal,
        kind=task.kind,
        num_outputs=task.num_outputs,
        dropout=options.dropout,
        seed=job.seed,
    )
    train, validation, test = (tokenize(split, tokenizer, max_length=max_length) for split in (task.train, task.validation, task.test))
    return PreparedJob(job=job, options=options, task=task, train=train, validation=validation, test=test, facts=facts, adapter=adapter)


def _options(job: Job) -> PacPlusOptions:
    import msgspec

    known = PacPlusOptions.__dataclass_fields__
    for name in job.options:
        if name not in known:
            raise ConfigError(f"The option '{name}' of pac_plus was asked for.", f"Known: {', '.join(known)}.", "Choose one of these.")
    try:
        options = msgspec.convert(job.options, PacPlusOptions, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"The options {job.options} of pac_plus were asked for.", f"{error}.", "Change that option.") from error
    cache_dtype(options.cache_dtype)
    return options
