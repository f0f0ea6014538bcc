"""Find a job's model and data, and validate the technique and the paradigm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from workbench.core.cluster import Cluster
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import KEEP, Plan
from workbench.methods.base import of_batch, require_plan
from workbench.methods.fine_tuning.options import FineTuningOptions
from workbench.methods.option_values import read_options, require_width
from workbench.methods.training.options import ASYNCHRONOUS
from workbench.methods.training.prepare import (
    PreparedTechnique,
    load_samples,
    require_task_and_model,
    technique_settings,
)
from workbench.models.configuration import model_facts
from workbench.models.lora import require_peft
from workbench.models.quantization.config import QuantizationConfig
from workbench.models.techniques import TechniqueConfig

MOST_FULL_RATE = 5e-4
"""Ten times the default for full fine-tuning; with the 2e-3 of adapters a model forgets what it knows."""
AnOptions = TypeVar("AnOptions", bound=FineTuningOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedJob(PreparedTechnique):
    """A fine-tuning job with all data that is known before planning."""

    options: FineTuningOptions

    @property
    def quantization(self) -> QuantizationConfig:
        """Return how the frozen weights are stored."""
        return quantization_of(self.options)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether mini-batches follow each other without a drain."""
        return self.options.schedule == ASYNCHRONOUS

    def steps_on(self, world_size: int) -> int:
        """Return the steps of the whole run; for an asynchronous pipeline they are windows (see PreparedTraining)."""
        if not self.is_asynchronous:
            return self.num_steps
        batches = self.num_steps // self.job.epochs
        return self.job.epochs * -(-batches // (self.options.drain_every or self.options.window or batches))


def quantization_of(options: FineTuningOptions) -> QuantizationConfig:
    """Return how the frozen weights are stored; all computation is in float32.  Raises ConfigError for impossible
    settings.
    """
    if options.technique == "full" and options.backbone_dtype != "float32":
        raise ConfigError(
            f"The option backbone_dtype = '{options.backbone_dtype}' of fine_tuning was asked for with technique "
            "= 'full'.",
            "Full fine-tuning trains these weights, in float32; only weights that stay as they are can be kept "
            "in fewer bits.",
            "Choose technique lora or adapters, or leave backbone_dtype out.",
        )
    return QuantizationConfig(storage=options.backbone_dtype)


def require_known(job: Job) -> FineTuningOptions:
    """Return the options.  Raises ConfigError at once for an unknown option, task or model, or without peft
    for LoRA.
    """
    return checked(job, read_options("fine_tuning", FineTuningOptions, job.options))


def checked(job: Job, options: AnOptions) -> AnOptions:
    """Return options whose values are consistent.  Raises ConfigError (see require_known)."""
    quantization_of(options)
    if options.technique == "lora":
        require_peft()
    require_task_and_model(job)
    return options


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape.  Raises ConfigError or MissingDataError."""
    return prepare_by(job, read_options("fine_tuning", FineTuningOptions, job.options))


def prepare_by(job: Job, options: FineTuningOptions) -> PreparedJob:
    """Load and tokenize the task and read the model's shape, for some options (see prepare)."""
    facts = model_facts(job.model)
    if options.schedule == ASYNCHRONOUS and options.technique == "full" and facts.num_encoder_layers is not None:
        raise ConfigError(
            f"Full fine-tuning of '{job.model}' by schedule = 'asynchronous_1f1b' was asked for.",
            "Stages of an encoder-decoder hold copies of one parameter, and here each stage updates its weights "
            "at another time.",
            f"Choose another technique, such as lora{', or schedule 1f1b' if job.method == 'fine_tuning' else ''}.",
        )
    require_width("fine_tuning", "lora_rank", options.lora_rank, job.model, facts.hidden_size)
    require_width("fine_tuning", "bottleneck", options.bottleneck, job.model, 4 * facts.hidden_size)
    samples = load_samples(job, facts)
    config = TechniqueConfig(
        technique=options.technique,
        lora_rank=options.lora_rank,
        lora_dropout=options.lora_dropout,
        bottleneck=options.bottleneck,
        reduction=options.reduction,
        **technique_settings(samples, options.dropout),
    )
    notes = (
        ["Each device draws its own lora_dropout, so another plan gives other losses."]
        if config.lora_dropout > 0
        else []
    )
    if options.technique == "full" and job.peak_learning_rate > MOST_FULL_RATE:
        notes.append(
            f"A learning rate of {job.peak_learning_rate:g} suits adapters. Full fine-tuning usually takes "
            "--learning-rate 5e-5."
        )
    return PreparedJob(options=options, config=config, notes=tuple(notes), **samples)


def can_recompute(prepared: PreparedJob, cluster: Cluster) -> bool:
    """Return whether the backward pass can compute activations again: it passes through the layers, and torch computes
    them.
    """
    return prepared.options.technique != "parallel" and all(device.framework == "torch" for device in cluster.devices)


def check_plan(prepared: PreparedJob, cluster: Cluster, plan: Plan) -> None:
    """Raise ConfigError for a plan made for another model, cluster or batch; the plan may split a mini-batch into any
    number of micro-batches.
    """
    job = prepared.job
    if prepared.is_asynchronous and (plan.num_micro_batches > 1 or any(len(stage.ranks) > 1 for stage in plan.stages)):
        raise ConfigError(
            f"A run by schedule = 'asynchronous_1f1b' under a plan of {plan.method} was asked for.",
            f"Its stages have {', '.join(str(len(stage.ranks)) for stage in plan.stages)} devices, its mini-batches"
            f" {plan.num_micro_batches} micro-batches.",
            "Give each stage one device and do not split mini-batches, or plan again.",
        )
    if any(stage.activations != KEEP for stage in plan.stages) and not can_recompute(prepared, cluster):
        raise ConfigError(
            f"A plan of {plan.method} whose stages do not keep their activations was asked for.",
            "Parallel Adapters do not backpropagate through the layers, and devices with JAX do not recompute them.",
            "Plan again with activations=memory.",
        )
    require_plan(plan, cluster, model=job.model, num_layers=prepared.facts.num_layers, others=[of_batch(plan, job)])
