"""Find a job's model and data, and validate PAC+'s options; the positions of a stage's taps (PAC+, section IV-A)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.methods.base import require_plan
from workbench.methods.option_values import read_options
from workbench.methods.pac_plus.options import PacPlusOptions
from workbench.methods.training.prepare import (
    PreparedTraining,
    load_samples,
    require_task_and_model,
    technique_settings,
)
from workbench.models.adapter_config import ParallelAdapterConfig
from workbench.models.configuration import model_facts
from workbench.models.initialization import require_torch_pruning
from workbench.models.quantization.config import QuantizationConfig
from workbench.runtime.activation_cache import cache_dtype
from workbench.runtime.activation_records import RecordLayout
from workbench.schedules.costs import Crossing
from workbench.tasks.task import as_text_to_text


class StageTaps(NamedTuple):
    """first: position in a whole record.  num_taps: taps with the input's tokens.  num_target_taps: the decoder's taps,
    with the target's tokens.
    """

    first: int
    num_taps: int
    num_target_taps: int

    @property
    def total(self) -> int:
        """Return all taps of the stage."""
        return self.num_taps + self.num_target_taps


def stage_taps(start: int, stop: int, num_encoder_layers: int | None = None) -> StageTaps:
    """Return the taps of layers [start, stop): b_0 in the first stage, one per layer, and the decoder's embedding
    before its first layer.

    num_encoder_layers: an encoder-decoder's first layers, the others are the decoder's; None for a single stack.
    """
    border = stop if num_encoder_layers is None else num_encoder_layers
    has_embedding = num_encoder_layers is not None and start <= border < stop
    return StageTaps(
        first=0 if start == 0 else start + 1 + (start > border),
        num_taps=max(0, min(stop, border) - start) + (start == 0),
        num_target_taps=max(0, stop - max(start, border)) + has_embedding,
    )


def rank_taps(plan: Plan, num_encoder_layers: int | None = None) -> dict[int, StageTaps]:
    """Return the taps of each rank of a plan; a rank without a stage is left out."""
    return {
        rank: stage_taps(stage.start, stage.stop, num_encoder_layers) for stage in plan.stages for rank in stage.ranks
    }


def whole_taps(config: ParallelAdapterConfig) -> StageTaps:
    """Return all taps of a sample's record."""
    return stage_taps(0, config.num_layers, config.num_encoder_layers)


def record_layout(config: ParallelAdapterConfig, dtype: str, taps: StageTaps | None = None) -> RecordLayout:
    """Return the shape of some taps of a sample's record (default: every tap that the adapter reads), stored as
    `dtype`.
    """
    taps = taps or whole_taps(config)
    return RecordLayout(
        dtype=dtype,
        width=config.hidden_size,
        num_taps=taps.num_taps,
        num_target_taps=taps.num_target_taps,
        target_length=config.target_length,
    )


def crossing_of(config: ParallelAdapterConfig, dtype: str = "float32") -> Crossing:
    """Return the message per token at a stage boundary.  dtype: the dtype of the backbone's hidden state."""
    return Crossing(
        hidden_size=config.hidden_size,
        dtype=dtype,
        side_width=config.width,
        num_encoder_layers=config.num_encoder_layers,
        target_length=config.target_length,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob(PreparedTraining):
    """A PAC+ job with everything known before planning."""

    options: PacPlusOptions
    adapter: ParallelAdapterConfig

    @property
    def quantization(self) -> QuantizationConfig:
        """Return how the backbone's weights are stored and used in computation."""
        return QuantizationConfig(storage=self.options.backbone_dtype, compute=self.options.compute_dtype)


def require_known(job: Job) -> PacPlusOptions:
    """Return the options.  Raises ConfigError at once for an unknown option, task or model, before anything large is
    loaded.
    """
    if "activations" in job.options:
        raise ConfigError(
            f"The option activations = {job.options['activations']!r} of pac_plus was asked for.",
            "Its backward pass runs through the side network alone. What that keeps is mostly the outputs of the "
            "model's layers, and to compute those again takes the pass through the model that PAC+ saves.",
            "Leave it out, or use --method fine_tuning --option technique=lora.",
        )
    options = _options(job)
    require_task_and_model(job)
    return options


def check_plan(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan that was made for another model, cluster or batch."""
    job = prepared.job
    other = (
        (plan.micro_batch_size, plan.num_micro_batches) != (job.batch_size // job.micro_batches, job.micro_batches),
        f"Its mini-batches are {plan.mini_batch_size} in {plan.num_micro_batches}, the job's {job.batch_size} in "
        f"{job.micro_batches}.",
        "Plan for the job's batch_size and micro_batches.",
    )
    require_plan(plan, cluster, model=job.model, num_layers=prepared.facts.num_layers, others=[other])


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    options = _options(job)
    facts = model_facts(job.model)
    samples = load_samples(job, facts, as_text_to_text if options.target == "text" else None)
    adapter = ParallelAdapterConfig(
        reduction=options.reduction,
        is_causal=facts.is_causal,
        num_encoder_layers=facts.num_encoder_layers,
        target_length=samples["train"].target_length,
        **technique_settings(samples, options.dropout),
    )
    if options.initialization == "torch_pruned":
        require_torch_pruning(facts.family, config=adapter, num_heads=facts.num_heads)
    if options.initialization == "distilled" and facts.vocabulary_size == 0:
        request, problem = (
            f"Distilled initial weights for '{job.model}' were asked for.",
            "It reads images, and the unlabelled data is text.",
        )
        raise ConfigError(request, problem, "Choose another initialization.")
    return PreparedJob(options=options, adapter=adapter, **samples)


def _options(job: Job) -> PacPlusOptions:
    options = read_options("pac_plus", PacPlusOptions, job.options)
    if options.schedule == "asynchronous_1f1b":
        raise ConfigError(
            "The option schedule = 'asynchronous_1f1b' of pac_plus was asked for.",
            "PAC+'s side network trains in a pipeline that is drained after each mini-batch, and then from its "
            "cache without a pipeline.",
            "Use method fine_tuning for it, or schedule 1f1b or gpipe.",
        )
    cache_dtype(options.cache_dtype)
    return options
