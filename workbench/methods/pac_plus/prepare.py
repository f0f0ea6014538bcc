"""Find a job's model and data, and settle PAC+'s options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError, MissingDataError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.ranges import Dropout, NumBytes, Width
from workbench.methods.common.plans import require_plan
from workbench.methods.options import read_options
from workbench.methods.pac_plus.taps import record_layout
from workbench.methods.training.prepare import PipelineOptions, PreparedTraining, label_scale, load_samples, require_task_and_model
from workbench.models.adapter_config import HeadInput, Mix, ParallelAdapterConfig
from workbench.models.loading import model_facts
from workbench.models.quantization import resolve_engine
from workbench.models.quantization.config import EmbeddingStorage, Engine, FloatType, QuantizationConfig
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.activation_records import RecordLayout
from workbench.tasks.text_to_text import as_text_to_text

Initialization = Literal["fan_in", "gaussian", "zero", "all_zero", "pruned", "torch_pruned", "distilled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusOptions(PipelineOptions):
    """PAC+'s own settings, given in Job.options besides PipelineOptions.

    reduction: r.  tap_every, mix, head_input: see ParallelAdapterConfig.  target: 'text' lets an encoder-decoder write the label's word.
    initialization: of the side network (section IV-C).  distillation_text: a folder of text files; None takes the embedded sentences.
    compute_dtype: in which the backbone is computed with; embedding_dtype, quantization_engine: see QuantizationConfig.
    cache_dtype: float32, bfloat16 or int8.
    keep_cache: keep the activations after the run, and use those that an earlier run kept.  disk_budget_bytes: for the cache while
    the run lasts.  order: of the devices, 'given' or 'all' tried.
    objective: the planner's, 'paper' (Eq. 5-7), 'bottleneck' (any stage may be the slowest) or 'simulated' (both are ours).
    """

    reduction: Width = 8
    tap_every: Width = 1
    mix: Mix = "learned"
    head_input: HeadInput = "sum"
    target: Literal["label", "text"] = "label"
    dropout: Dropout = 0.1
    initialization: Initialization = "fan_in"
    distillation_text: str | None = None
    compute_dtype: FloatType = "float32"
    embedding_dtype: EmbeddingStorage | None = None
    quantization_engine: Engine = "auto"
    cache_dtype: str = "bfloat16"
    keep_cache: bool = False
    disk_budget_bytes: NumBytes | None = None
    order: Literal["given", "all"] = "given"
    objective: Literal["paper", "bottleneck", "simulated"] = "simulated"

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
class PreparedJob(PreparedTraining):
    """A PAC+ job with everything that is known before a plan.

    activation_key: under which the activations are kept after the run, '' if they are not.  from_kept: an earlier run kept them, so
    that no epoch needs the backbone.
    """

    options: PacPlusOptions
    adapter: ParallelAdapterConfig
    activation_key: str = ""
    from_kept: bool = False

    @property
    def record_layout(self) -> RecordLayout:
        """Return the shape of a sample's record in the activation cache."""
        return record_layout(self.adapter, self.options.cache_dtype)

    @property
    def cache_bytes(self) -> int:
        """Return the bytes of the whole activation cache: s x h x (l + 1) values a sample (section V-B, storage cost)."""
        return self.record_layout.total_bytes(self.train.lengths)


def require_known(job: Job) -> None:
    """Raise ConfigError at once for an option, task or model that does not exist, before anything large is loaded."""
    folder = _options(job).distillation_text
    if folder is not None and not Path(folder).expanduser().is_dir():
        asked = f"The option distillation_text = '{folder}' of pac_plus was asked for."
        raise MissingDataError(asked, "There is no such folder.", "Name a folder of text files, or leave it out.")
    require_task_and_model(job)


def check_plan(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or batch."""
    job = prepared.job
    other = (
        (plan.micro_batch_size, plan.num_micro_batches) != (job.batch_size // job.micro_batches, job.micro_batches),
        f"Its mini-batches are {plan.mini_batch_size} in {plan.num_micro_batches}, the job's {job.batch_size} in {job.micro_batches}.",
        "Plan for the job's batch_size and micro_batches.",
    )
    require_plan(plan, cluster, model=job.model, num_layers=prepared.facts.num_layers, others=[other])


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = _options(job)
    facts = model_facts(job.model)
    if options.tap_every > facts.num_layers:
        asked = f"The option tap_every = {options.tap_every} of pac_plus was asked for."
        raise ConfigError(asked, f"'{job.model}' has {facts.num_layers} layers.", "Lower it.")
    samples = load_samples(job, facts, as_text_to_text if options.target == "text" else None)
    task, train = samples["task"], samples["train"]
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
        **label_scale(task, train),
    )
    return PreparedJob(options=options, adapter=adapter, **samples)


def _options(job: Job) -> PacPlusOptions:
    options = read_options("pac_plus", PacPlusOptions, job.options)
    options.require_pipeline()
    cache_dtype(options.cache_dtype)
    resolve_engine(options.quantization.storage, options.quantization.engine)
    return options
