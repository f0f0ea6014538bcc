"""The interface of a method: it prepares, profiles, plans, predicts and executes a job; the check of a plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
)

from workbench.core.cluster import Cluster
from workbench.core.device_faults import FaultSchedule
from workbench.core.errors import ConfigError
from workbench.core.job import Job
from workbench.core.plan import Plan
from workbench.core.profile import Profile
from workbench.core.report import EpochRecord, Recovery, StepRecord, SweepPoint
from workbench.core.timeline import Span, Timeline
from workbench.profiler.analytic import LayerCost

if TYPE_CHECKING:  # a declaration, and so the help, needs no engine
    from workbench.runtime.engine_service import Engines


class DeviceState(NamedTuple):
    """The current state of a device.  phase: such as 'loading' or 'first epoch'.

    step_s: duration of its last step, from the end of the step before.  busy_s: the computing part of it; the rest is
    waiting.
    used_bytes: memory in use now, above the runtime's footprint; None if the system does not report it.  health: see
    progress.DeviceRow.  metered_j: joules that the device's own meter has counted since the run began; None without
    one.
    """

    phase: str
    step_s: float | None = None
    busy_s: float | None = None
    used_bytes: int | None = None
    health: str = ""
    metered_j: float | None = None

    @property
    def busy_share(self) -> float | None:
        """Return the share of its last step in which it computed; None before the first step."""
        return min(1.0, self.busy_s / self.step_s) if self.step_s and self.busy_s is not None else None


class Event(NamedTuple):
    """A progress event for a waiting user.  epoch, step: from 0.

    kind:
    'phase': a phase begins.  message names it; stage: the stage of the run, if one begins.
    'step': all devices have finished a mini-batch, with its loss and samples; or an inference request, with its
    seconds, requests as samples, and generated tokens.
    'count': `step` of `num_steps` parts of the phase are done; message names the parts.
    'note': message.
    'device': the state of the device of `rank`; message describes it in words.
    'predicted': the steps' simulated seconds.
    'plan': the plan of the next steps; timelines: one simulated step, by name.
    'spans': the spans of a step that all devices have finished, from its beginning on.
    'scores': metrics on the validation split after an epoch.
    'faults': faults added to this object are injected into the run's devices.
    'watch': call it to receive spans.
    Ranks are the cluster's; a timeline of fewer devices names them.
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
    tokens: int = 0
    device: DeviceState | None = None
    predicted: tuple[StepRecord, ...] = ()
    stage: str = ""
    faults: FaultSchedule | None = None
    plan: Plan | None = None
    timelines: Mapping[str, Timeline] = MappingProxyType({})
    spans: tuple[Span, ...] = ()
    metrics: Mapping[str, float] = MappingProxyType({})
    watch: Callable[[], None] | None = None


Notify = Callable[[Event], None]
CountProgress = Callable[[int, int], None]
"""Called with the number of finished parts of a phase and the number of all parts."""


SCORED, TIMED = "samples scored", "timings"


def counting(notify: Notify, parts: str, *, before: int = 0, rounds: int = 1) -> CountProgress:
    """Return a callback that shows a waiting user the progress of a phase.  before: number of its equally long `rounds`
    that are already finished.
    """

    def report(done: int, count: int) -> None:
        notify(Event("count", message=parts, step=before * count + done, num_steps=rounds * count))

    return report


def counting_steps(notify: Notify, parts: str, num_steps: int) -> Notify:
    """Return a callback for a measurement's events.  It shows a waiting user how many of about `num_steps` steps,
    including warm-up steps, are done, and which devices are still loading.
    """
    done = itertools.count(1)

    def report(event: Event) -> None:
        if event.kind == "step":
            notify(Event("count", message=parts, step=min(next(done), num_steps), num_steps=num_steps))
        elif event.kind == "device" and event.epoch < 0:
            notify(event)

    return report


def ignore(event: Event) -> None:
    """Ignore an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The simulated course of a whole job.  steps[i].predicted_s is set; phases_s: seconds of each phase between
    epochs.

    recoveries, notes: what the job's faults lead to.
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
    """The result of an execution: the measured side of a Report.  technique: the technique of the adapter in
    artifacts["adapter"], '' without one.
    """

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


class Prepared(Protocol):
    """A job with its data and model located; made by Method.prepare."""

    @property
    def job(self) -> Job:
        """Return the job."""

    @property
    def facts(self) -> Any:
        """Return the model's shape (ModelFacts)."""

    @property
    def all_notes(self) -> tuple[str, ...]:
        """Return remarks on the job, for its plan and its report."""


T = TypeVar("T")


class Planned(NamedTuple, Generic[T]):
    """A job whose plan is accepted (see Method.check).  prepared: made by Method.prepare."""

    prepared: T
    profile: Profile
    cluster: Cluster
    plan: Plan


class Method(Protocol):
    """A published method; its folder's options.py names it (see core.methods.Declaration)."""

    def require_known(self, job: Job, cluster: Cluster) -> None:
        """Raise ConfigError for an unknown option, task, model or device, or an idle option, before anything
        is loaded.
        """

    def prepare(self, job: Job, notify: Notify) -> Any:
        """Find the model and the data.  Raises ConfigError or MissingDataError."""

    def profile(
        self,
        prepared: Any,
        cluster: Cluster,
        notify: Notify,
        *,
        emulated: bool,
        engines: Engines | None = None,
        refresh: bool = False,
    ) -> Profile:
        """Measure the host and scale to emulated devices, or compute from the catalogue.  Real engines measure
        themselves.

        refresh: repeat earlier measurements.
        """

    def layer_costs(self, prepared: Any, *, batch: int, sequence_length: int) -> tuple[LayerCost, ...]:
        """Return every layer's FLOPs for a batch and its bytes, computed from sizes, to compare with a profile."""

    def num_trained(self, prepared: Any) -> int:
        """Return the number of weights that are trained once all layers are; 0 for a method that does not say it."""

    def holds_whole_model(self, prepared: Any) -> bool:
        """Return whether the machine that commands a run has all layers in memory at once, in float32."""

    def plan(self, prepared: Any, profile: Profile, cluster: Cluster) -> Plan:
        """Run the method's planner.  Raises PlanError if nothing fits."""

    def check(self, prepared: Any, profile: Profile, cluster: Cluster, plan: Plan, *, folder: Path | None) -> None:
        """Check for errors that would end the run later, before anything starts.  folder: None if the run is only
        simulated.

        Raises ConfigError if the plan is for other layers, devices or batches, PlanError if a device has too little
        memory, CacheError if the disk has too little space.
        """

    def notes(self, planned: Planned[Any]) -> tuple[str, ...]:
        """Return the notes of the job under its plan, whether it is simulated or executed: settings without an
        effect first.
        """

    def predict(self, planned: Planned[Any]) -> Prediction:
        """Simulate every step of the job."""

    def execute(
        self,
        planned: Planned[Any],
        prediction: Prediction,
        engines: Engines,
        *,
        folder: Path,
        resume: bool,
        notify: Notify,
    ) -> Outcome:
        """Run the job on the engines and evaluate the trained model.  prediction: the result of `predict`."""

    def sweep_point(
        self,
        planned: Planned[Any],
        name: str,
        engines: Engines | None,
        *,
        num_steps: int,
        folder: Path,
        notify: Notify = ignore,
    ) -> SweepPoint:
        """Simulate some steps, and measure them if engines are given.  name: the sweep's name for the plan, which it
        checks itself.  notify: receives the steps' events.
        """

    def typical_step(self, planned: Planned[Any]) -> Timeline:
        """Simulate one step of typical length (Galaxy+: a request)."""


SILENT_AFTER_STEPS = 10
"""A peer counts as silent when a step takes this multiple of its expected time."""

REAL_TIMEOUT_S = 300.0
"""How long a real device waits for a silent one, which may need this time to load its layers.  A lost connection is
detected at once."""

MAX_SIMULATIONS = 200
"""Maximum number of steps that the refinement of a plan may simulate: a second or two."""


def of_batch(plan: Plan, job: Job) -> tuple[bool, str, str]:
    """Return the check of require_plan that a plan is for the job's mini-batches."""
    problem = f"Its mini-batches are {plan.mini_batch_size}, the job's {job.batch_size}."
    return plan.mini_batch_size != job.batch_size, problem, "Plan for the job's batch_size."


def require_plan(
    plan: Plan, cluster: Cluster, *, model: str, num_layers: int, others: Iterable[tuple[bool, str, str]] = ()
) -> None:
    """Raise ConfigError for a plan with other layers or devices.  others: further checks as (is wrong,
    problem, advice).
    """
    stages = plan.stages + ((plan.cached,) if plan.cached is not None else ())
    ranks = [rank for stage in plan.stages for rank in stage.ranks]
    outside = max(rank for stage in stages for rank in stage.ranks) >= cluster.world_size
    for is_wrong, problem, todo in (
        (
            any(layers != num_layers for layers in (plan.num_layers, stages[-1].stop)),
            f"It has {plan.num_layers} layers; '{model}' has {num_layers}.",
            "Cut all layers into stages.",
        ),
        (
            outside or len(ranks) > len(set(ranks)),
            f"It uses ranks {ranks}; the cluster has {cluster.in_words}.",
            "Use each device once.",
        ),
        *others,
    ):
        if is_wrong:
            raise ConfigError(f"The plan {plan.partition()} on {plan.grouping()} was asked for.", problem, todo)
