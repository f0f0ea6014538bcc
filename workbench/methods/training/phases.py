"""The phases of a training run, which the driver simulates and every rank executes.

A method describes its run as a RankJob, from which driver and ranks make the same phases. A phase is some epochs with
similar steps: PAC+ has a pipeline phase that fills the activation cache and a data-parallel phase that runs from it;
fine-tuning has one phase.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from torch import Tensor

from workbench.core.cluster import Cluster
from workbench.core.once import once, once_for
from workbench.core.plan import Homes, Plan
from workbench.core.profile import Layers, Profile
from workbench.core.program import Chain, Program, chained
from workbench.core.report import StepRecord
from workbench.core.schedule import STEP, Schedule
from workbench.core.serial import to_json
from workbench.core.timeline import Timeline
from workbench.methods.common.session import SessionJob
from workbench.methods.training.estimates import Points, estimated
from workbench.methods.training.handlers import PlannedStep, StepShape, planned_epoch
from workbench.models.loading import load_stage
from workbench.models.quantization import QuantizationConfig, quantize
from workbench.models.stack import BackboneStage
from workbench.runtime.flat_optimizer import STATE_KINDS, Optimizer
from workbench.runtime.snapshot import Snapshot, weights_after
from workbench.schedules.pipeline import OrderName
from workbench.simulator import ends_s, makespan_s, simulate
from workbench.tasks.tokenize import TokenizedSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Some epochs with similar steps.

    epochs: the epochs; may be empty.  cached: whether they run from an activation cache.  steps: returns all steps of
    an epoch.  program: returns the program of one step.
    last_epoch: the number of steps of the last epoch, if it has fewer than the others.  longest: a step as long as any;
    None: the first epoch has one.
    moves: by name, the programs that run between this phase and the next.  nbytes: by name, the phase's files on the
    disk.
    """

    epochs: range
    cached: bool = False
    steps: Callable[[int], Sequence[PlannedStep]]
    program: Callable[[StepShape], Program]
    last_epoch: int | None = None
    longest: PlannedStep | None = None
    moves: Callable[[], Mapping[str, Iterable[Program]]] = dict
    nbytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of one of its epochs in reports."""
        return "cached epoch" if self.cached else "first epoch"

    @property
    def counts(self) -> list[int]:
        """Return the number of steps of each epoch."""
        if not self.epochs:
            return []
        counts = [len(self.steps(self.epochs.start))] * len(self.epochs)
        return counts if self.last_epoch is None else [*counts[:-1], self.last_epoch]


T = TypeVar("T")


class Predictor:
    """Simulates a phase's steps; equal shapes are simulated once.

    run: the phase's, if all searches that come upon its plan share the seconds (see once_for_plan).
    """

    def __init__(self, phase: Phase, run: PhasedJob | None = None) -> None:
        self._phase = phase
        self._seconds = cache(self._find_seconds if run is None else partial(self._shared_seconds, run))
        self._points: Points = {}
        # By the schedules of consecutive steps, which several shapes have.
        self._chains: dict[tuple[int, ...], tuple[Chain, list[Schedule]]] = {}

    def timeline(self, planned: PlannedStep, *, title: str = "", memory: bool = True) -> Timeline:
        """Return the timeline of a step.  memory: see simulate."""
        return simulate(self._phase.program(planned.shape), title=title, memory=memory)

    def seconds(self, planned: PlannedStep) -> float:
        """Return the seconds of a step."""
        return self._seconds(planned.shape)

    def _shared_seconds(self, run: PhasedJob, shape: StepShape) -> float:
        return once_for_plan(run, (self._phase.name, shape), lambda: self._find_seconds(shape))

    def _find_seconds(self, shape: StepShape) -> float:
        programs, former = [self._phase.program(shape)], shape.continues
        if former is None:
            return makespan_s(programs[0])
        while former is not None:
            programs.insert(0, self._phase.program(former))
            former = former.continues
        before, schedules = f"~{len(programs) - 2}", [program.schedule for program in programs]
        key = tuple(map(id, schedules))
        if key not in self._chains:
            self._chains[key] = Chain.of(schedules), schedules
        ends = ends_s(chained(programs, self._chains[key][0]))
        begun_s = max(end_s for op, end_s in ends if op.kind == STEP and op.writes[0].name.endswith(before))
        return max(end_s for _, end_s in ends) - begun_s

    def seconds_of(self, steps: Sequence[PlannedStep]) -> Callable[[StepShape], float]:
        """Return the seconds of each shape of an epoch's steps."""
        return estimated([step.shape for step in steps], self._seconds, self._points)

    def records(self, epoch: int, steps: Sequence[PlannedStep]) -> tuple[StepRecord, ...]:
        """Return an epoch's steps with their seconds."""
        steps = tuple(steps)  # some sequences build a step at each access
        seconds = self.seconds_of(steps)
        return tuple(
            StepRecord(
                epoch=epoch,
                step=number,
                samples=step.shape.samples,
                cached=self._phase.cached,
                predicted_s=seconds(step.shape),
                lowest_trained=step.shape.lowest_trained,
            )
            for number, step in enumerate(steps)
        )


def once_for_plan(run: PhasedJob, what: object, compute: Callable[[], T]) -> T:
    """Return what `compute` finds out about the seconds and bytes of a run's plan, once for all searches that come upon
    the plan (see core.once).  The memory of its devices plays no part in it.
    """

    def key() -> tuple[object, ...]:
        plan = replace(run.plan, predicted_s={}, notes=())
        return what, run.job, run.profile, _without_memory(run.cluster), to_json(plan, indent=0)

    return once_for(key, compute)


@once
def _without_memory(cluster: Cluster) -> str:
    """Return a cluster as text, but for the memory of its devices."""
    return to_json(cluster.with_devices(memory_bytes=1), indent=0)


class Loaded(NamedTuple):
    """A rank's layers, and the optimizer of its trainable parameters.  layers: [start, stop)."""

    layers: tuple[int, int]
    compute: Any
    optimizer: Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasedJob(SessionJob, ABC):
    """The steps of a run in phases, described for a rank, however a step trains.

    fingerprint: identifies the run's files on the disk.
    sweep: the numbers of some steps of the first phase's first epoch to time; then nothing else runs.
    """

    fingerprint: str = ""
    sweep: tuple[int, ...] = ()

    @property
    def layers(self) -> Layers:
        """Return the bytes of every layer, which are the same on all devices."""
        return self.profile.layers[0]

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Return the phases of the run in order, at least one."""

    def predictor(self, phase: Phase) -> Predictor:
        """Return what simulates the steps of one of the phases."""
        return Predictor(phase)

    def on_rank(self, rank: int) -> Self:
        """Return the job for one device: by default the same for all."""
        return self

    @property
    def snapshot(self) -> Snapshot:
        """Return when a snapshot is taken, and where it is stored: by default after each step, in its log."""
        return Snapshot(every=1)

    def writers(self, *, cached: bool) -> dict[int, tuple[int, int]]:
        """Return the ranks that write a snapshot to their disks, with the layers of each: by default none.

        cached: in epochs from an activation cache.
        """
        return {}

    @property
    def present(self) -> Plan:
        """Return the plan of the steps that this job does before `until`."""
        return self.plan

    @property
    def until(self) -> float:
        """Return the step, counted through the run, before which all devices pause together to change stages."""
        return math.inf

    @property
    def changes_s(self) -> float:
        """Return the seconds that the run pauses to move layers between its steps."""
        return 0.0

    @property
    def missing(self) -> str:
        """Describe in words what a run lacks, besides compute, while some devices are away; '' if nothing."""
        return ""

    def handed_on(self, prepared: Any) -> Any:
        """Return a prepared job for plans of fewer devices, with the data that they cannot know themselves: by default
        the same.
        """
        return prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob(PhasedJob):
    """The description of a run that trains by backpropagation, for a rank; a method adds its settings.

    split: the training samples.  schedule: the order of a pipeline's micro-batches.  quantization: how the frozen
    backbone is stored.
    start_epoch, start_step: 0, or the step at which a resumed run continues.  state: the files with the trainable state
    so far.
    homes: the ranks that have each tensor of that state in memory, if state has no files.
    is_same: whether the same devices did the steps before, under the same plan.
    small_bytes: if a stage's state is larger, by default no snapshot is taken between the ends of epochs but at a
    pause.
    """

    small_bytes: ClassVar[float] = math.inf

    split: TokenizedSplit
    schedule: OrderName = "1f1b"
    quantization: QuantizationConfig = field(default_factory=lambda: QuantizationConfig(storage="float32"))
    start_epoch: int = 0
    start_step: int = 0
    state: tuple[Path, ...] = ()
    homes: Homes = field(default_factory=dict)
    is_same: bool = True

    @classmethod
    def of(cls, prepared: Any, profile: Profile, cluster: Cluster, plan: Plan, **more: Any) -> Self:
        """Return the job of a run under a plan, for every rank.  prepared: a PreparedTraining.  more: the method's own
        settings.
        """
        return cls(
            job=prepared.job,
            cluster=cluster,
            plan=plan,
            profile=profile,
            split=prepared.train,
            quantization=prepared.quantization,
            **more,
        )

    def predictor(self, phase: Phase) -> Predictor:
        """Return what simulates the steps of one of the phases, once for all searches (see PhasedJob)."""
        return Predictor(phase, self)

    @property
    def begins_at(self) -> tuple[int, int]:
        """Return the epoch and the step at which these devices begin."""
        return self.start_epoch, self.start_step

    @property
    def snapshot(self) -> Snapshot:
        """Return when a snapshot is taken, and where it is stored (see PhasedJob)."""
        job, stages = self.job, self.plan.stages
        trained = max(sum(layer.trainable_bytes for layer in self.layers[stage.start : stage.stop]) for stage in stages)
        is_small = len(STATE_KINDS) * trained <= self.small_bytes
        return Snapshot(every=job.snapshot_every or int(is_small), to=job.snapshot_to, is_small=is_small)

    def writers(self, *, cached: bool) -> dict[int, tuple[int, int]]:
        """Return the first rank of each stage (see PhasedJob); from a cache one rank has the whole state."""
        if cached and self.plan.cached is not None:
            return {self.plan.cached.ranks[0]: (0, self.plan.num_layers)}
        return {stage.ranks[0]: (stage.start, stage.stop) for stage in self.present.stages}

    def planned_epoch(self, epoch: int) -> tuple[PlannedStep, ...]:
        """Return an epoch's mini-batches, split as the plan says."""
        plan = self.plan
        return planned_epoch(
            self.split.lengths, plan.mini_batch_size, plan.num_micro_batches, seed=self.job.seed, epoch=epoch
        )

    def going_on(self, former: Self) -> Self:
        """Return this job as the continuation of one on the same devices without a loss: their files on the disks are
        present.
        """
        return self

    def load_backbone(
        self, start: int, stop: int, *, with_head: bool = False, with_embedding: bool = False
    ) -> BackboneStage:
        """Return layers [start, stop), stored as the job says; at most one layer is at full size at a time.  with_head,
        with_embedding: see load_stage.

        In a sweep, whose steps are only timed, large layers of equal cost share one layer's weights.
        """
        store, layers = partial(quantize, config=self.quantization), self.layers
        equal = (lambda index: layers.index(layers[index])) if self.sweep else None
        stage = load_stage(
            self.job.model,
            start,
            stop,
            after_layer=store,
            with_head=with_head,
            with_embedding=with_embedding,
            stands_for=equal,
        )
        return store(stage)

    def loaded(self, rank: int) -> Loaded | None:
        """Return what a rank must load before it can take part; None if that is not known in advance."""
        return None

    def trained(self, epoch: int) -> dict[str, Tensor]:
        """Return the trained parameters after an epoch, by name (see weights_after)."""
        return weights_after(self.folder, self.fingerprint, epoch, self.plan.num_layers)

    def taken_over(self, former: RankJob, places: Mapping[int, int]) -> Iterable[Program]:
        """Return the programs that run before the first step of start_epoch when devices of a former job continue.

        places: this job's rank of each device that still has its former state, by its former rank.
        """
        return ()

    def begins_with(self) -> tuple[Path, ...]:
        """Return the files that must be complete to resume a run."""
        return ()


class Plans:
    """How a method that trains plans a run, and plans it again for fewer or slower devices.

    plan, check: see Method.  rank_job: makes a PhasedJob.
    """

    plan: Callable[[Any, Profile, Cluster], Plan]
    check: Callable[..., None]
    rank_job: Callable[[Any, Profile, Cluster, Plan], Any]

    def stand_in(
        self,
        prepared: Any,
        profile: Profile,
        cluster: Cluster,
        plan: Plan,
        rank: int,
        idle: Sequence[int],
        remaining_share: float,
    ) -> int | None:
        """Return the idle device that takes over the part of one that leaves on notice; None: re-plan for the remaining
        devices.

        plan: the whole cluster's plan, with devices as slow as measured.  remaining_share: fraction of the run that
        remains, from 1 to 0.
        """
        return None


APhasedJob = TypeVar("APhasedJob", bound=PhasedJob)
AJob = TypeVar("AJob", bound=RankJob)
