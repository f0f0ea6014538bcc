"""Find a Confidant job's model and data, as in fine-tuning, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.effects import Effect, Situation
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.base import Published, read_options
from workbench.methods.fine_tuning.prepare import FineTuningOptions, PreparedJob, checked, prepare_by
from workbench.models.techniques import Technique
from workbench.planners.heads import AllocationName
from workbench.schedules.pipeline import OrderName

NumDevices = Annotated[int, Meta(ge=0, le=10**6)]


def _is_shared(at: Situation) -> bool:
    """Return whether a device has several processors to share its layers; JAX computes whole layers."""
    return any(len(device.processors) > 1 and device.framework == "torch" for device in at.cluster.devices)


_SHARED = Effect(lambda at: at.options.split == "none" or _is_shared(at), "a device with two processors ([[device.processor]])", True)
_SPLIT = Effect(lambda at: at.options.split != "none" and _is_shared(at), "a split over a device with two processors", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidantOptions(FineTuningOptions):
    """Settings of Confidant, given in Job.options in addition to fine-tuning's.

    partition: 'memory_aware' is Eq. 3, the devices in the cluster's order; 'any_order' the best order of the best set of devices; 'even'
    gives each the same number of layers ('PipeDream' in section 5); 'capacity' divides by computing capacity without memory (FTPipeHD).
    devices: number of devices that train, the first available ones; the others are idle and replace one that leaves on notice.  0: all.
    split: the parts of a layer that a device's processors share: its heads (section 3.3), the feed-forward's columns too (ours), or none;
    None: the heads, of devices with several processors.
    heads: how heads are assigned to processors, by Algorithm 1 or by the optimum.
    """

    published_job = MappingProxyType[str, Published]({})

    technique: Technique = "full"
    schedule: OrderName = "asynchronous_1f1b"
    partition: Literal["memory_aware", "any_order", "even", "capacity"] = "memory_aware"
    devices: NumDevices = 0
    split: Annotated[Literal["heads", "heads_and_columns", "none"], _SHARED] | None = None
    heads: Annotated[AllocationName, _SPLIT] = "algorithm1"


def require_known(job: Job) -> ConfidantOptions:
    """Return the options.  Raises ConfigError for an unknown option, task or model."""
    options = read_options("confidant", ConfidantOptions, job.options)
    if options.schedule != "asynchronous_1f1b" or options.paradigm != "hybrid":
        raise ConfigError(
            f"Confidant with schedule = '{options.schedule}' and paradigm = '{options.paradigm}' was asked for.",
            "Confidant is an asynchronous pipeline.",
            "Leave both out, or use method fine_tuning.",
        )
    return checked(job, options)


def prepare(job: Job) -> PreparedJob:
    """Load and tokenize the task and read the model's shape."""
    return prepare_by(job, require_known(job))
