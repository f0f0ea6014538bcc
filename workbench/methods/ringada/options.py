"""RingAda's declaration: its options (Algorithm 1), and its abilities."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from msgspec import Meta

from workbench.core.effects import SEVERAL_DEVICES, Effect, only
from workbench.core.methods import JOB_FIELDS, Declaration, FormField
from workbench.core.names import ActivationsChoice
from workbench.core.ranges import Dropout, Text, Width
from workbench.methods.option_values import Published
from workbench.methods.training.options import training_calls

Times = Annotated[int, Meta(ge=1, le=10**6)]
Iterations = Annotated[int, Meta(ge=1, le=1000)]
"""A round is one program: of more mini-batches it would take minutes to build."""
Unfreezing = Literal["steps", "rounds", "all", "plateau", "gradient_norm"]
_RING = only(federated=False)
_RING_CACHE = only(federated=False, is_refused=True)
_GRADUAL = only(unfreezing=("steps", "rounds", "plateau", "gradient_norm"))
_ADAPTIVE = only(unfreezing=("plateau", "gradient_norm"))
_CHANGES = Effect(
    lambda settings: (
        settings.options.unfreezing in ("steps", "rounds")
        or (settings.options.unfreezing == "all" and settings.options.cache)
    ),
    "unfreezing = steps or rounds",
    reads=("unfreezing",),
)
_LATER = Effect(lambda settings: settings.job.epochs > 1, "more than one epoch: in the first nothing is cached yet")


@dataclass(frozen=True, slots=True, kw_only=True)
class RingAdaOptions:
    """RingAda's own settings, given in Job.options.

    technique: 'serial' adapters inside the layers, of width bottleneck (m of Eq. 1), or 'parallel' adapters next to the
    layers, as in PAC+ (ours).  With 'parallel' no gradient passes through the model, and its layers wait for no update.
    reduction: r; parallel adapters are r times narrower than the model.
    dropout: dropout rate of the pooled features.
    data: which device owns which training samples: iid, dirichlet:CONCENTRATION, source, device or sizes:A,B,... (see
    tasks.batching).
    local_iterations: I of Algorithm 1, the mini-batches of an initiator in a round.
    unfreezing: when one more adapter is unfrozen: every unfreeze_every 'steps' (section IV: 40 mini-batches) or
    'rounds' (Algorithm 1, k); on a 'plateau' of the loss or of the 'gradient_norm', by patience and threshold.  'all'
    trains all adapters from the beginning, which is the paper's PipeAdapter without stale weights.
    patience: number of rounds without progress: the mean falls by less than `threshold`, a share of its lowest value.
    depth: d, the number of unfrozen adapters at the beginning.
    in_flight: maximum number of mini-batches on the ring; None: the planner chooses.  cache: whether devices cache the
    outputs of their frozen layers on their disks, so that later rounds skip these layers (ours).  replan: whether
    layers may move between rounds as more of them are trained; they move if that saves time, the move included.
    activations: see FineTuningOptions; frozen layers keep none.
    federated: federated averaging instead of a ring.  Each device trains all adapters of a whole model on its own data,
    and after each round all devices average them (a baseline that the paper leaves out).
    """

    published_job = MappingProxyType({"micro_batches": Published(1, "section IV-B: mini-batches are whole")})

    technique: Literal["serial", "parallel"] = "serial"
    bottleneck: Annotated[Width, only(technique="serial")] = 64
    reduction: Annotated[Width, only(technique="parallel")] = 8
    dropout: Dropout = 0.1
    data: Annotated[Text, SEVERAL_DEVICES] = "iid"
    local_iterations: Iterations = 4
    unfreezing: Annotated[Unfreezing, _RING] = "steps"
    unfreeze_every: Annotated[Times, _RING, _GRADUAL] = 40
    depth: Annotated[Times, _RING, _GRADUAL] = 1
    patience: Annotated[Times, _RING, _ADAPTIVE] = 2
    threshold: Annotated[Dropout, _RING, _ADAPTIVE] = 0.01
    in_flight: Annotated[Times, _RING] | None = None
    cache: Annotated[bool, _RING_CACHE, _LATER] = False
    activations: Annotated[ActivationsChoice, only(technique="serial", is_refused=True)] = "auto"
    replan: Annotated[bool, _RING, _CHANGES, SEVERAL_DEVICES, Published(False, "section IV-B: assigned once")] = True
    federated: bool = False


DECLARATION = Declaration(
    options=RingAdaOptions,
    title="RingAda",
    implementation="workbench.methods.ringada.method:RingAda",
    calls=training_calls("workbench.methods.ringada.method:RingAda", "workbench.methods.ringada.rank_job:RingRankJob"),
    form={name: JOB_FIELDS[name] for name in JOB_FIELDS if name != "micro_batches"}
    | {
        "data": FormField(
            label="Data of a device",
            tooltip="How the training samples are divided among the devices",
            values={
                "equal parts (iid)": "iid",
                "unequal labels (dirichlet:0.5)": "dirichlet:0.5",
                "very unequal (dirichlet:0.1)": "dirichlet:0.1",
            },
        ),
        "local_iterations": FormField(
            label="Local iterations I", tooltip="Mini-batches of an initiator in a round (Algorithm 1)"
        ),
        "unfreezing": FormField(label="Unfreezing", tooltip="When one more adapter is trained (Algorithm 1)"),
        "unfreeze_every": FormField(
            label="Unfreeze every", tooltip="Mini-batches or rounds until one more adapter is trained"
        ),
        "depth": FormField(
            label="Depth d",
            tooltip="Adapters that are trained at the beginning, from the top",
            at_most="num_layers",
        ),
        "micro_batches": JOB_FIELDS["micro_batches"],
    },
    alternatives={
        "adapters on a ring": {},
        "all adapters from the beginning": {"unfreezing": "all"},
        "federated averaging": {"federated": True},
    },
    keeps_data=True,
    schedules="workbench.methods.ringada.named_schedules:SCHEDULES",
)
