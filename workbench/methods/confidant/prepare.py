"""Find a Confidant job's model and data, which are those of fine-tuning, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.methods.fine_tuning.prepare import FineTuningOptions, PreparedJob, checked, prepare_by
from workbench.methods.options import read_options
from workbench.models.techniques import Technique
from workbench.planners.heads import AllocationName
from workbench.schedules.pipeline import OrderName

NumDevices = Annotated[int, Meta(ge=0, le=10**6)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidantOptions(FineTuningOptions):
    """Settings of Confidant, given in Job.options besides fine-tuning's.

    partition: 'memory_aware' is Eq. 3, the devices in the cluster's order; 'any_order' the best order of the best set of devices; 'even'
    as many layers for each ('PipeDream' in section 5); 'capacity' by computing capacity without memory (FTPipeHD).
    devices: the first so many that are there train; the others stand by, and take the place of one that leaves on notice.  0: all train.
    split: what the processors of a device share of a layer: its heads (section 3.3), the feed-forward's columns too (ours), or nothing.
    heads: who takes how many, by Algorithm 1 or by the optimum.
    """

    technique: Technique = "full"
    schedule: OrderName = "asynchronous_1f1b"
    partition: Literal["memory_aware", "any_order", "even", "capacity"] = "memory_aware"
    devices: NumDevices = 0
    split: Literal["heads", "heads_and_columns", "none"] = "heads"
    heads: AllocationName = "algorithm1"


def require_known(job: Job) -> ConfidantOptions:
    """Return the options.  Raises ConfigError for an option, task or model that does not exist."""
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
