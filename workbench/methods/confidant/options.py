"""Confidant's declaration: its options in addition to fine-tuning's, its form, and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.effects import Effect, Situation
from workbench.core.methods import JOB_FIELDS, Declaration, FormField
from workbench.core.names import Technique
from workbench.methods.fine_tuning.options import ACTIVATIONS_FIELD, FineTuningOptions
from workbench.methods.option_values import Published
from workbench.methods.training.options import training_calls
from workbench.schedules.pipeline import OrderName

AllocationName = Literal["algorithm1", "optimal"]
NumDevices = Annotated[int, Meta(ge=0, le=10**6)]


def _is_shared(situation: Situation) -> bool:
    """Return whether a device has several processors to share its layers; JAX computes whole layers."""
    return any(len(device.processors) > 1 and device.framework == "torch" for device in situation.cluster.devices)


_SHARED = Effect(
    lambda situation: situation.options.split == "none" or _is_shared(situation),
    "a device with two processors ([[device.processor]])",
    True,
)
_SPLIT = Effect(
    lambda situation: situation.options.split != "none" and _is_shared(situation),
    "a split over a device with two processors",
    True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidantOptions(FineTuningOptions):
    """Settings of Confidant, given in Job.options in addition to fine-tuning's.

    partition: 'memory_aware' solves Eq. 3 with the devices in the cluster's order; 'any_order' finds the best order of
    the best set of devices; 'even' gives each device the same number of layers ('PipeDream' in section 5); 'capacity'
    divides by computing capacity and ignores memory (FTPipeHD).
    devices: number of devices that train: the first available ones.  The others are idle, and replace a device that
    leaves on notice.  0: all.
    split: which parts of a layer the processors of a device share: the heads (section 3.3), the heads and the
    feed-forward's columns (ours), or none.  None: the heads, on devices with several processors.
    heads: how heads are assigned to processors: by Algorithm 1, or optimally.
    """

    published_job = MappingProxyType[str, Published]({})

    technique: Technique = "full"
    schedule: OrderName = "asynchronous_1f1b"
    partition: Literal["memory_aware", "any_order", "even", "capacity"] = "memory_aware"
    devices: NumDevices = 0
    split: Annotated[Literal["heads", "heads_and_columns", "none"], _SHARED] | None = None
    heads: Annotated[AllocationName, _SPLIT] = "algorithm1"


_FAULTS = (
    "",
    "leave:1@step4",
    "kill:1@step4",
    "kill:1@step4; return:1@step12",
    "leave:1@step4; return:1@step14; kill:2@step20",
)
DECLARATION = Declaration(
    options=ConfidantOptions,
    title="Confidant",
    implementation="workbench.methods.confidant.method:Confidant",
    calls=training_calls(
        "workbench.methods.confidant.method:Confidant", "workbench.methods.fine_tuning.phases:FineTuningRankJob"
    ),
    form={name: JOB_FIELDS[name] for name in ("model", "task", "train_samples", "epochs", "batch_size")}
    | {
        "technique": FormField(
            label="Technique",
            tooltip="What is trained",
            values={"all weights": "full", "lora": "lora", "adapters": "adapters", "serial": "serial"},
        ),
        "partition": FormField(
            label="Partition",
            tooltip="Where the model is cut (section 3.2)",
            values={
                "within memory (Eq. 3)": "memory_aware",
                "the same, best order": "any_order",
                "evenly (PipeDream)": "even",
                "by speed (FTPipeHD)": "capacity",
            },
        ),
        "activations": ACTIVATIONS_FIELD,
        "devices": FormField(
            label="Devices", tooltip="How many train, in the cluster's order; the others stand by. 0: all"
        ),
        "window": FormField(label="Window", tooltip="Mini-batches of a window, which is a step of the report"),
        "snapshot_every": FormField(label="Snapshot every", tooltip="Steps between two snapshots; 0: as often as pays"),
        "snapshot_to": FormField(
            label="Snapshot to",
            tooltip="Where snapshots are stored",
            values={"the run's folder": "disk", "the next device's memory": "neighbour"},
        ),
        "faults": FormField(
            label="Faults",
            tooltip="What is done to devices: KIND:DEVICE@stepN, as often as you like",
            is_typed=True,
            values={words: words for words in _FAULTS},
        ),
    },
    runs_jax=True,
    alternatives={
        "all weights, never drained": {"partition": "any_order"},
        "LoRA, never drained": {"technique": "lora", "partition": "any_order"},
    },
)
