"""PAC+'s declaration: its options (sections IV and V), its form, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from workbench.core.effects import SEVERAL_DEVICES, Effect, only
from workbench.core.methods import JOB_FIELDS, Declaration, FormField
from workbench.core.names import FloatType
from workbench.core.ranges import Dropout, Width
from workbench.methods.option_values import Published
from workbench.methods.training.options import (
    HAS_HEAD,
    PIPELINE_FIELDS,
    PipelineOptions,
    in_every_paradigm,
    training_calls,
)

_SEARCHED = only(paradigm="hybrid")
_CACHED = Effect(lambda settings: settings.job.epochs > 1, "more than one epoch")
Initialization = Literal["fan_in", "gaussian", "zero", "all_zero", "pruned", "torch_pruned", "distilled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PacPlusOptions(PipelineOptions):
    """PAC+'s own settings, given in Job.options in addition to PipelineOptions.

    reduction: r; the side network is r times narrower than the backbone.
    target: with 'text' an encoder-decoder writes the label as a word; with 'label' a head predicts it.
    initialization: initial weights of the side network (section IV-C).  'torch_pruned' is for BERT only.  'zero' sets
    the last matrix of each residual branch to zero.  'all_zero' sets all projections to zero; the branches then never
    learn.
    compute_dtype: dtype in which the backbone computes (section IV-D).
    cache_dtype: dtype of the activation cache (section IV-B): float32, bfloat16 or int8.
    order: with 'all' the planner tries every order of the devices.  With 'given' it keeps the cluster's order, and
    tries others only if no plan fits.
    objective: what the planner minimizes: 'paper' (Eq. 5-7), 'bottleneck' (any stage may be the slowest; ours) or
    'simulated' (the simulated time; ours).
    """

    published_job = MappingProxyType({"batch_size": Published(16, "Fig. 3"), "max_length": Published(128, "Fig. 3")})

    reduction: Width = 8
    target: Literal["label", "text"] = "label"
    dropout: Annotated[Dropout, HAS_HEAD] = 0.1
    initialization: Annotated[Initialization, Published("pruned", "section VI-A")] = "fan_in"
    compute_dtype: FloatType = "float32"
    cache_dtype: Annotated[str, _CACHED, Published("float32", "section VI-A")] = "bfloat16"
    order: Annotated[Literal["given", "all"], _SEARCHED, SEVERAL_DEVICES, Published("given", "Algorithm 1")] = "all"
    objective: Annotated[
        Literal["paper", "bottleneck", "simulated"], _SEARCHED, SEVERAL_DEVICES, Published("paper", "Eq. 7")
    ] = "simulated"


DECLARATION = Declaration(
    options=PacPlusOptions,
    title="PAC+",
    implementation="workbench.methods.pac_plus.method:PacPlus",
    calls=training_calls(
        "workbench.methods.pac_plus.method:PacPlus", "workbench.methods.pac_plus.rank_job:PacPlusRankJob"
    ),
    form=JOB_FIELDS
    | {
        "reduction": FormField(
            label="Reduction r",
            tooltip="The side network is r times narrower than the backbone",
            divides="hidden_size",
        )
    }
    | PIPELINE_FIELDS
    | {
        "initialization": FormField(
            label="Initialization", tooltip="Initial weights of the side network (section IV-C)"
        ),
        "cache_dtype": FormField(
            label="Cache type",
            tooltip="Dtype of the activation cache (section IV-B)",
            values={name: name for name in ("bfloat16", "float32", "int8")},
        ),
    },
    alternatives=in_every_paradigm("Parallel Adapters")
    | {
        "Parallel Adapters, int8 backbone": {"backbone_dtype": "int8"},
        "Parallel Adapters, NF4 backbone": {"backbone_dtype": "nf4"},
    },
)
