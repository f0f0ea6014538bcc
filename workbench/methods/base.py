"""What a method is to the rest of the workbench: it prepares, profiles, plans, predicts and executes a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from workbench.core.cluster import Cluster
from workbench.core.device_faults import FaultSchedule
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, Recovery, StepRecord, SweepPoint
from workbench.core.timeline import Timeline
from workbench.profiler.analytic import LayerCost


class DeviceState(NamedTuple):
    """What a device is doing.  phase: such as 'loading' or 'first epoch'.

    step_s: its last step, from the end of the one before; busy_s: the part of it in which it computed; the rest it waited.
    used_bytes: now, above the runtime's own footprint; None where the system does not tell.
    """

    phase: str
    step_s: float | None = None
    busy_s: float | None = None
    used_bytes: int | None = None


class Event(NamedTuple):
    """Something that a user who waits wants to know.  epoch, step: from 0.

    kind: 'phase' (message, and the stage of the run if one begins), 'step' (loss and samples of a mini-batch that all devices have
    done), 'epoch', 'note' (message), 'device' (what the device of `rank` is doing; message says it in words), 'predicted' (the
    steps' simulated seconds), or 'faults' (what is added to them from now on is done to the run's devices).
    """

    kind: str
    rank: int = -1
    epoch: int = -1
    step: int = -1
    num_steps: int = 0
    loss: float | None = None
    seconds: float | None = None
    message: str = ""
    samples: int = 0
    device: DeviceState | None = None
    predicted: tuple[StepRecord, ...] = ()
    stage: str = ""
    faults: FaultSchedule | None = None


Notify = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator says of a whole job.  steps[i].predicted_s is set; phases_s: what happens beside the epochs.

    recoveries, notes: of the job's faults.
    """

    steps: tuple[StepRecord, ...]
    epochs: tuple[EpochRecord, ...]
    timelines: dict[str, Timeline]
    phases_s: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    recoveries: tuple[Recovery, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(kw_only=True)
class Outcome:
    """What came of executing a job: the measured side of a Report.  technique: of what artifacts["adapter"] holds, '' of none."""

    fidelity: Literal["kernel", "paced", "real"]
    steps: tuple[StepRecord, ...] = ()
    epochs: tuple[EpochRecord, ...] = ()
    timelines: dict[str, Timeline] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    chosen_epoch: int = 0
    technique: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    overrun_share: float = 0.0
    notes: tuple[str, ...] = ()
    artifacts: dict[str, str] = field(default_factory=dict)
    recoveries: tuple[Recovery, ...] = ()


class Engines(Protocol):
    """The running devices: runtime.engines.EngineCluster, runtime.torchrun.TorchrunEngines, or a stand-in in tests."""

    @property
    def fidelity(self) -> Any:
        """Return 'kernel' or 'paced' of emulated devices, 'real' of real ones, which are not slowed down."""
        ...

    def run(self, function: Callable[[Any, Any], Any], payloads: Any, *, on_event: Callable[[int, Any], None] | None = None) -> list[Any]:
        """Run function(context, payload) on every device."""
        ...


class Prepared(Protocol):
    """A job with its data and model found; made by Method.prepare."""

    @property
    def job(self) -> Job:
        """Return the job."""
        ...


class Method(Protocol):
    """One published method.  Every folder of workbench.methods has one, named in workbench.methods.METHODS."""

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Raise ConfigError at once, before anything is loaded, for an option, task, model or device that does not exist."""
        ...

    def prepare(self, job: Job, notify: Notify) -> Any:
        """Find model and data.  Raises ConfigError or MissingDataError."""
        ...

    def profile(
        self, prepared: Any, cluster: Cluster, notify: Notify, *, emulated: bool, engines: Engines | None = None, refresh: bool = False
    ) -> Profile:
        """Measure the host and scale to emulated devices, or compute from the catalogue; real engines measure themselves.

        refresh: measure again what was measured before.
        """
        ...

    def layer_costs(self, prepared: Any, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's FLOPs for a batch and its bytes, computed from sizes: to lay beside a profile."""
        ...

    def plan(self, prepared: Any, profile: Profile, cluster: Cluster) -> Plan:
        """Run the method's planner.  Raises PlanError if nothing fits."""
        ...

    def check(self, prepared: Any, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Refuse what would end the run later, before anything starts; folder: None if the run is only simulated.

        Raises ConfigError for a plan of other layers, devices or batches, PlanError if a device's memory is too small, CacheError if
        the disk is.
        """
        ...

    def predict(self, prepared: Any, profile: Profile, cluster: Cluster, plan: Plan) -> Prediction:
        """Simulate every step of the job."""
        ...

    def execute(
        self,
        prepared: Any,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Run the job on the engines and evaluate what was trained.  prediction: what `predict` returned for this plan."""
        ...

    def sweep_point(
        self,
        prepared: Any,
        profile: Profile,
        cluster: Cluster,
        name: str,
        plan: Plan,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
    ) -> SweepPoint:
        """Simulate, and on engines measure, some steps of a plan.  name: what the sweep calls it."""
        ...
