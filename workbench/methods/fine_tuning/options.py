"""The declaration of fine-tuning through the backbone: its options, its form, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from workbench.core.effects import SEVERAL_STAGES, only
from workbench.core.methods import JOB_FIELDS, Declaration, FormField
from workbench.core.names import ActivationsChoice, Technique
from workbench.core.ranges import Dropout, Tokens, Width
from workbench.core.virtual_workers import VersionRule
from workbench.methods.training.options import (
    ASYNCHRONOUS,
    HAS_HEAD,
    PIPELINE_FIELDS,
    PipelineOptions,
    in_every_paradigm,
    training_calls,
)

_LORA, _BOTTLENECK, _PARALLEL = (
    only(technique="lora"),
    only(technique=("adapters", "serial")),
    only(technique="parallel"),
)
_ASYNCHRONOUS = only(schedule=ASYNCHRONOUS)
_THROUGH = only(technique=("full", "lora", "adapters", "serial"), is_refused=True)
_NOT_DRAINED = only(drain_every=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningOptions(PipelineOptions):
    """Settings of fine-tuning, given in Job.options in addition to PipelineOptions.

    technique: 'full', 'lora', 'adapters', 'serial' (RingAda's adapters) or 'parallel' (PAC+'s adapters); lora_rank to
    dropout: see TechniqueConfig.
    paradigm: 'standalone' uses one device; 'data_parallel' (EDDL) puts the whole model on each device.  Both have no
    micro-batches (section VI-B).  'pipeline_parallel' (Eco-FL) has one device per stage; 'hybrid' (as Asteroid) has
    groups of devices, fitted to their speeds.
    activations: 'memory' keeps them from the forward to the backward pass.  With 'recompute' each layer keeps only its
    input, and the backward pass computes the layer again.  'auto' recomputes in the stages whose activations do not
    fit.  With 'disk' the forward pass writes them to the device's disk, and the backward pass reads them.
    Under schedule 'asynchronous_1f1b' every stage has one device; 'hybrid' chooses devices and order,
    'pipeline_parallel' uses all in their order.  window: number of mini-batches in a step of the report; the state is
    saved after each window.  0: one window per epoch, after which the pipeline drains.
    drain_every: number of mini-batches after which the pipeline drains; 0: it does not drain between windows.
    versions: how old the weights are with which stage i of N computes.  'stashing': N - i - 1 updates, and the stage
    keeps as many versions.  'vertical_sync': N - 1 updates on all stages (PipeDream's option).  'two': one update, and
    a mini-batch has N micro-batches (PipeDream-2BW).
    """

    technique: Technique = "lora"
    lora_rank: Annotated[Width, _LORA] = 8
    lora_dropout: Annotated[Dropout, _LORA] = 0.0
    bottleneck: Annotated[Width, _BOTTLENECK] = 64
    reduction: Annotated[Width, _PARALLEL] = 8
    dropout: Annotated[Dropout, HAS_HEAD] = 0.1
    activations: Annotated[ActivationsChoice, _THROUGH] = "auto"
    window: Annotated[Tokens, _ASYNCHRONOUS, _NOT_DRAINED] = 32
    drain_every: Annotated[Tokens, _ASYNCHRONOUS] = 0
    versions: Annotated[VersionRule, _ASYNCHRONOUS, SEVERAL_STAGES] = "stashing"


ACTIVATIONS_FIELD = FormField(
    label="Activations",
    tooltip="Kept in memory for the backward pass; or computed again or read from the disk: less memory, more time",
    values={"where they fit": "auto", "in memory": "memory", "computed again": "recompute", "on the disk": "disk"},
)
DECLARATION = Declaration(
    options=FineTuningOptions,
    title="Fine-tuning",
    implementation="workbench.methods.fine_tuning.method:FineTuning",
    calls=training_calls(
        "workbench.methods.fine_tuning.method:FineTuning", "workbench.methods.fine_tuning.phases:FineTuningRankJob"
    ),
    form=JOB_FIELDS
    | {
        "technique": FormField(label="Technique", tooltip="What is trained in or next to the backbone"),
        "lora_rank": FormField(label="LoRA rank", tooltip="Rank of LoRA's matrices", at_most="hidden_size"),
        "reduction": FormField(
            label="Reduction r",
            tooltip="Parallel Adapters are r times narrower than the backbone",
            divides="hidden_size",
        ),
    }
    | PIPELINE_FIELDS
    | {
        "activations": ACTIVATIONS_FIELD,
        "schedule": FormField(
            label="Schedule",
            tooltip="The order of a pipeline's micro-batches, or of whole mini-batches",
            values={"1F1B": "1f1b", "GPipe": "gpipe", "asynchronous 1F1B": ASYNCHRONOUS},
        ),
    },
    runs_jax=True,
    alternatives=in_every_paradigm("LoRA", technique="lora")
    | {
        "LoRA, activations computed again": {"technique": "lora", "activations": "recompute"},
        "LoRA, activations on the disk": {"technique": "lora", "activations": "disk"},
        "LoRA, int8 backbone": {"technique": "lora", "backbone_dtype": "int8"},
        "adapters in the layers": {"technique": "adapters"},
        "all weights": {"technique": "full"},
    },
)
