"""Find a job's model and data, and settle PAC+'s options."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.ranges import Dropout, NumBytes, Width
from workbench.methods.options import read_options
from workbench.methods.pac_plus.programs import Programs
from workbench.methods.pac_plus.taps import record_layout
from workbench.models.adapter_config import HeadInput, Mix, ParallelAdapterConfig
from workbench.models.loading import ModelFacts, load_tokenizer, model_facts
from workbench.models.loading import require_known as require_known_model
from workbench.models.quantization import resolve_engine
from workbench.models.quantization.config import EmbeddingStorage, Engine, FloatType, QuantizationConfig, StorageType
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.activation_records import RecordLayout
from workbench.tasks import TASKS, load_task, unknown_task
from workbench.tasks.task import Task
from workbench.tasks.text_to_text import as_text_to_text
from workbench.tasks.tokenize import TokenizedSplit, tokenize

Paradigm = Literal["hybrid", "standalone", "data_parallel", "pipeline_parallel"]
Initialization = Literal["fan_in", "gaussian", "zero", "all_zero", "pruned", "torch_pruned", "distilled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusOptions:
    """PAC+'s own settings, given in Job.options.

    reduction: r.  tap_every, mix, head_input: see ParallelAdapterConfig.  target: 'text' lets an encoder-decoder write the label's word.
    initialization: of the side network (section IV-C).  distillation_text: a folder of text files; None takes the embedded sentences.
    backbone_dtype, compute_dtype: in which the backbone's weights are kept, and computed with (section IV-D); quantization_block,
    double_quantization, embedding_dtype, quantization_engine: see QuantizationConfig.  cache_dtype: float32, bfloat16 or int8.
    keep_cache: keep the activations after the run, and use those that an earlier run kept.  disk_budget_bytes: for the cache while
    the run lasts.  order: of the devices, 'given' or 'all' tried.
    objective: the planner's, 'paper' (Eq. 5-7), 'bottleneck' (any stage may be the slowest) or 'simulated' (both are ours).
    paradigm: 'hybrid' runs the planner; 'standalone', 'data_parallel' and 'pipeline_parallel' are the baselines of section VI-A.
    """

    reduction: Width = 8
    tap_every: Width = 1
    mix: Mix = "learned"
    head_input: HeadInput = "sum"
    target: Literal["label", "text"] = "label"
    dropout: Dropout = 0.1
    initialization: Initialization = "fan_in"
    distillation_text: str | None = None
    backbone_dtype: StorageType = "float32"
    compute_dtype: FloatType = "float32"
    quantization_block: Width = 64
    double_quantization: bool = False
    embedding_dtype: EmbeddingStorage | None = None
    quantization_engine: Engine = "auto"
    cache_dtype: str = "bfloat16"
    keep_cache: bool = False
    disk_budget_bytes: NumBytes | None = None
    order: Literal["given", "all"] = "given"
    objective: Literal["paper", "bottleneck", "simulated"] = "simulated"
    paradigm: Paradigm = "hybrid"

    @property
    def quantization(self) -> QuantizationConfig:
        """Return how the backbone's weights are kept and computed with.  Raises ConfigError for what cannot be."""
        return QuantizationConfig(
            storage=self.backbone_dtype,
            compute=self.compute_dtype,
            block_size=self.quantization_block,
            double_quantization=self.double_quantization,
            embeddings=self.embedding_dtype,
            engine=self.quantization_engine,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob:
    """A job with everything that is known before a plan: task, tokens, the model's shape, the adapter's.

    activation_key: under which the activations are kept after the run, '' if they are not.  from_kept: an earlier run kept them, so
    that no epoch needs the backbone.  notes: what is to be told about that.
    """

    job: Job
    options: PacPlusOptions
    task: Task
    train: TokenizedSplit
    validation: TokenizedSplit
    test: TokenizedSplit
    facts: ModelFacts
    adapter: ParallelAdapterConfig
    activation_key: str = ""
    from_kept: bool = False
    notes: tuple[str, ...] = ()

    def programs(self, profile: Profile, cluster: Cluster, plan: Plan) -> Programs:
        """Return the programs of this job under a plan."""
        return Programs(profile, cluster, plan, self.adapter, hidden_dtype=self.options.quantization.compute)

    @property
    def typical_length(self) -> int:
        """Return the padded length that a mini-batch of similar samples has on average, for planning."""
        lengths = self.train.lengths
        mean = sum(lengths) / len(lengths)
        return max(8, round(mean / 8 + 0.5) * 8)

    @property
    def record_layout(self) -> RecordLayout:
        """Return the shape of a sample's record in the activation cache."""
        return record_layout(self.adapter, self.options.cache_dtype)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the whole activation cache: s x h x (l + 1) values a sample (section V-B, storage cost)."""
        return self.record_layout.total_bytes(self.train.lengths)

    def data_digest(self) -> str:
        """Return a digest of tokens and labels in their order."""
        digest = hashlib.sha256()
        digest.update(repr((self.train.words, self.train.start_id)).encode())
        for ids, label in zip(self.train.ids, self.train.labels, strict=True):
            digest.update(repr((ids, label)).encode())
        return digest.hexdigest()


def require_known(job: Job) -> None:
    """Raise ConfigError at once for an option, task or model that does not exist, before anything large is loaded."""
    folder = _options(job).distillation_text
    if folder is not None and not Path(folder).expanduser().is_dir():
        asked = f"The option distillation_text = '{folder}' of pac_plus was asked for."
        raise MissingDataError(asked, "There is no such folder.", "Name a folder of text files, or leave it out.")
    if job.task not in TASKS:
        raise unknown_task(job.task)
    require_known_model(job.model)


def check_shape(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or batch."""
    job, asked = prepared.job, f"The plan {plan.partition()} on {plan.grouping()} was asked for."
    stages = plan.stages + ((plan.cached,) if plan.cached is not None else ())
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    if any(layers != prepared.facts.num_layers for layers in (plan.num_layers, stages[-1].stop)):
        found, todo = f"It has {plan.num_layers} layers; '{job.model}' has {prepared.facts.num_layers}.", "Cut all layers into stages."
    elif max(rank for stage in stages for rank in stage.ranks) >= cluster.world_size or len(ranks) > len(set(ranks)):
        found, todo = f"It uses ranks {ranks}; the cluster has {cluster.world_size} devices.", "Use each device once."
    elif (plan.micro_batch_size, plan.num_micro_batches) != (job.batch_size // job.micro_batches, job.micro_batches):
        found = (
            f"Its mini-batches are {plan.mini_batch_size} in {plan.num_micro_batches}, the job's {job.batch_size} in {job.micro_batches}."
        )
        todo = "Plan for the job's batch_size and micro_batches."
    else:
        return
    raise ConfigError(asked, found, todo)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = _options(job)
    facts = model_facts(job.model)
    if options.tap_every > facts.num_layers:
        asked = f"The option tap_every = {options.tap_every} of pac_plus was asked for."
        raise ConfigError(asked, f"'{job.model}' has {facts.num_layers} layers.", "Lower it.")
    task = load_task(job.task, data=job.data).limited(job.train_samples, job.validation_samples, job.test_samples)
    if options.target == "text":
        task = as_text_to_text(task)
    tokenizer = load_tokenizer(job.model)
    max_length = min(job.max_length, facts.max_length)
    train, validation, test = (
        tokenize(split, tokenizer, max_length=max_length, words=task.words) for split in (task.train, task.validation, task.test)
    )
    adapter = ParallelAdapterConfig(
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        reduction=options.reduction,
        is_causal=facts.is_causal,
        kind=task.kind,
        num_outputs=task.num_outputs,
        num_encoder_layers=facts.num_encoder_layers,
        target_length=train.target_length,
        tap_every=options.tap_every,
        mix=options.mix,
        head_input=options.head_input,
        dropout=options.dropout,
        seed=job.seed,
        label_mean=fmean(train.labels) if task.kind == "regression" else 0.0,
        label_std=(pstdev(train.labels) or 1.0) if task.kind == "regression" else 1.0,
    )
    return PreparedJob(job=job, options=options, task=task, train=train, validation=validation, test=test, facts=facts, adapter=adapter)


def _options(job: Job) -> PacPlusOptions:
    options = read_options("pac_plus", PacPlusOptions, job.options)
    cache_dtype(options.cache_dtype)
    resolve_engine(options.quantization.storage, options.quantization.engine)
    return options
