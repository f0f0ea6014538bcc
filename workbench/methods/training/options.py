"""Declarations shared by all methods that train by backpropagation: the options of a pipeline, and the functions that
devices call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from workbench.core.effects import Effect, only, prepared
from workbench.core.methods import FormField, Parts
from workbench.core.names import StorageType
from workbench.schedules.pipeline import OrderName

Paradigm = Literal["hybrid", "standalone", "data_parallel", "pipeline_parallel"]
ASYNCHRONOUS = "asynchronous_1f1b"
_DEVICES = Effect(
    lambda situation: situation.cluster.world_size > 1 or situation.options.paradigm == "standalone",
    "two or more devices",
)
_PIPELINE = only(paradigm=("hybrid", "pipeline_parallel"), is_refused=True)
_ORDERED = Effect(
    lambda situation: (
        situation.plan is None
        or situation.options.schedule == ASYNCHRONOUS
        or (len(situation.plan.stages) > 1 and situation.plan.num_micro_batches > 1)
    ),
    "a plan of several stages, with micro-batches",
)
HAS_HEAD = prepared("a task with a head of its own", lambda job: job.task.kind != "text_generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Settings, in Job.options, of every method that trains by backpropagation through a pipeline of devices.

    paradigm: 'hybrid' runs the method's planner; 'standalone', 'data_parallel' and 'pipeline_parallel' are section
    VI-A's baselines.
    schedule: order of a pipeline's micro-batches, '1f1b' or 'gpipe'; 'asynchronous_1f1b' orders whole mini-batches.
    backbone_dtype: dtype of the frozen backbone's stored weights (section IV-D).
    """

    paradigm: Annotated[Paradigm, _DEVICES] = "hybrid"
    schedule: Annotated[OrderName, _PIPELINE, _ORDERED] = "1f1b"
    backbone_dtype: StorageType = "float32"


PIPELINE_FIELDS = {
    "paradigm": FormField(label="Paradigm", tooltip="How the devices share the work (section VI-A)"),
    "backbone_dtype": FormField(
        label="Backbone type", tooltip="In what the backbone's weights are kept (section IV-D)"
    ),
}


def in_every_paradigm(name: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Return options as alternatives, by words: as the planner divides the work, and as its baselines do."""
    words: dict[str, Paradigm] = {
        "": "hybrid",
        ", one device": "standalone",
        ", data parallel": "data_parallel",
        ", a stage for each device": "pipeline_parallel",
    }
    return {
        f"{name}{word}": options | ({} if paradigm == "hybrid" else {"paradigm": paradigm})
        for word, paradigm in words.items()
    }


def training_calls(
    method: str,
    rank_job: str,
    *,
    result: str = "workbench.methods.common.rank_results:RankResult",
    done: str = "builtins:float",
) -> dict[str, str | Parts]:
    """Return the functions of a training.method.TrainingMethod that devices call.

    method, rank_job: the method and its phases.PhasedJob as 'module:class'.  result, done: in the same form, the result
    of a device, and what it says of a step, by default its part of the loss.
    """
    parts = Parts(rank_job, result, done=done)
    return {f"{method}.measure_rank": "", f"{method}.serve_rank": parts}
