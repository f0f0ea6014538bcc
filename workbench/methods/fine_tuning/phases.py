"""The single phase of a fine-tuning run: every epoch forward and back through a pipeline's stages.

Asynchronous 1F1B with weight stashing (Confidant, section 2.2; PipeDream, Narayanan et al., 2019): every mini-batch
updates a stage's weights as soon as its backward pass there is finished, and uses the same weight version in its
backward pass as in its forward pass.
A step of the trainer is a window: consecutive mini-batches.  It ends on every stage with the update by the same
mini-batch: this state is used for snapshots and for the next generation.  The pipeline does not drain there, because
the forward passes of the next mini-batches have begun, and the next window continues them.  After a pause they are
computed again, with the newest weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import ClassVar

from torch import Tensor

from workbench.core.cluster import Device
from workbench.core.division import Division
from workbench.core.errors import ConfigError
from workbench.core.plan import Stage
from workbench.core.schedule import STEP, Op
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.methods.common.session import LOADING, RankResult, RankSession
from workbench.methods.fine_tuning.compute import StageCompute
from workbench.methods.fine_tuning.divided import divided_or_whole
from workbench.methods.fine_tuning.handlers import (
    BackpropagationHandlers,
    Programs,
    SharedParameter,
    WindowShape,
    shared_parameters,
)
from workbench.methods.fine_tuning.jax_stage import JaxStageCompute, activation_of
from workbench.methods.training.handlers import PlannedStep, StepShape, cut_mini_batch, named
from workbench.methods.training.phases import Loaded, Phase, RankJob, StagePhase, make_optimizer
from workbench.models.configuration import ModelFacts, import_family
from workbench.models.cross_framework import require_jax
from workbench.models.lora import import_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.executor import Contents, Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.memory import read_memory
from workbench.runtime.snapshot import SMALL_BYTES
from workbench.schedules.recomputation import AGAIN
from workbench.schedules.tensor import BEGIN, END, stream_of
from workbench.tasks.batching import epoch_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRankJob(RankJob):
    """The description of a fine-tuning run for a rank.

    config: the technique's configuration.  facts: the model's shape.  window to drain_every: only for an asynchronous
    pipeline (see FineTuningOptions).
    divisions: see Programs.
    """

    small_bytes: ClassVar[float] = SMALL_BYTES

    config: TechniqueConfig
    facts: ModelFacts
    window: int = 0
    drain_every: int = 0
    versions: VersionRule = "stashing"
    divisions: dict[int, Division] = field(default_factory=dict)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether mini-batches follow each other without a drain."""
        return self.schedule == "asynchronous_1f1b"

    def planned_windows(self, epoch: int) -> tuple[PlannedStep, ...]:
        """Return an epoch's steps if they are windows."""
        ahead = len(self.plan.stages) - 1 if self.window >= len(self.plan.stages) and not self.drain_every else 0
        size, job = self.drain_every or self.window, self.job
        return windows(
            self.split.lengths,
            self.plan.mini_batch_size,
            size,
            seed=job.seed,
            epochs=job.epochs,
            ahead=ahead,
            parts=self.per_update,
        )[epoch]

    @property
    def per_update(self) -> int:
        """Return the number of micro-batches in a mini-batch, if a window has any."""
        return len(self.plan.stages) if self.versions == "two" else 1

    @property
    def least(self) -> int:
        """Return the number of micro-batches that a window needs to begin with an empty pipeline and not drain."""
        return self.per_update * len(self.plan.stages)

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters with copies on several stages."""
        return shared_parameters(self.facts, self.config.technique, self.plan)

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        settings = self.shared, self.schedule, self.divisions, self.versions, self.config.side_width
        programs = Programs(self.profile, self.cluster, self.plan, self.facts, *settings)
        steps = self.planned_windows if self.is_asynchronous else self.planned_epoch
        return (Phase(epochs=range(self.job.epochs), steps=steps, program=programs.step),)

    def loaded(self, rank: int) -> Loaded | None:
        """Return a rank's stage before the first step (see RankJob); None if the rank has no stage."""
        index = self.plan.stage_of(rank)
        if index is None:
            return None
        stage, steps = self.plan.stages[index], self.phases()[0].steps(0)
        with_head = self.config.kind == "text_generation" and stage.stop == self.plan.num_layers
        model = TechniqueStage(self.load_backbone(stage.start, stage.stop, with_head=with_head), self.config)
        num_batches = (
            sum(len(step.samples) for step in steps) // self.per_update if self.is_asynchronous else len(steps)
        )
        optimizer = make_optimizer(self, model, num_batches)
        size = self.drain_every or self.window
        windowed = WindowOptimizer(optimizer, num_batches, size) if self.is_asynchronous else optimizer
        return Loaded((stage.start, stage.stop), self._compute(rank, stage, model), windowed)

    def _compute(self, rank: int, stage: Stage, model: TechniqueStage) -> StageCompute:
        if self.cluster.devices[rank].framework == "torch":
            return StageCompute(model)
        sizes: set[tuple[int, int]] = set()
        for shape in {step.shape for epoch in range(self.job.epochs) for step in self.phases()[0].steps(epoch)}:
            shares = [stage.split(size)[stage.ranks.index(rank)] for size in shape.sizes]
            sizes |= {
                (end - first, length) for (first, end), length in zip(shares, shape.lengths, strict=True) if end > first
            }
        return JaxStageCompute(
            model, activation=activation_of(self.job.model), heads=self.facts.num_heads, sizes=sorted(sizes)
        )

    def streams(self, rank: int) -> dict[str, str]:
        """Return the processor of each stream (see SessionJob)."""
        return (
            {stream_of(number): name for number, name in enumerate(self.divisions[rank].names)}
            if rank in self.divisions
            else {}
        )

    def prepare_imports(self, device: Device) -> None:
        """Import the libraries of the model, the technique and the device's framework (see SessionJob)."""
        import_family(self.job.model)
        if device.framework == "jax":
            require_jax()
            import_module("workbench.models.jax_blocks").load_compiler()
        if self.config.technique == "lora":
            import_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with the technique's trainable modules."""

    _begun: tuple[
        tuple[int, ...], ...
    ] = ()  # the samples of the mini-batches whose forward passes the last window has begun

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        loaded = self.rank_job.loaded(self.session.rank)
        if loaded is not None:
            self.take(loaded)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def take(self, loaded: Loaded) -> bool:
        """Use a loaded stage (see RankPhase)."""
        if self.index is None or loaded.layers != self.layers:
            return False
        self.compute, self.optimizer = loaded.compute, loaded.optimizer
        return True

    def hand_on(self) -> Loaded | None:
        """Return the stage (see RankPhase)."""
        return None if self.optimizer is None else Loaded(self.layers, self.compute, self.optimizer)

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        if not isinstance(self.optimizer, WindowOptimizer):
            return BackpropagationHandlers(shared=self.rank_job.shared, **self.own(planned, epoch)).table()
        division, shape = self.rank_job.divisions.get(self.session.rank), self.shape(planned)
        arguments = self.own(all_parts(planned), epoch) | {
            "optimizer": self.optimizer.inner,
            "total": planned.shape.samples,
        }
        self._begun = (
            planned.ahead
            if isinstance(planned, Window) and isinstance(shape, WindowShape) and shape.ahead.sizes
            else ()
        )
        job = self.rank_job
        num_versions = 0 if job.versions == "stashing" else delay_of(job.versions, 0, len(job.plan.stages))
        return StashingHandlers(
            each=divided_or_whole(division, **arguments),
            begins=shape.continues is None,
            kept=num_versions,
            per_update=job.per_update,
        ).table()

    def shape(self, planned: PlannedStep) -> StepShape:
        """Return the shape of the next step (see RankPhase).

        A window that does not follow the last one begins with an empty pipeline.  It drains if it is shorter than that.
        """
        shape = planned.shape
        follows = bool(self._begun) and all_parts(planned).samples[: len(self._begun)] == self._begun
        if follows or not isinstance(shape, WindowShape):
            return shape
        ahead = shape.ahead if len(shape.sizes) >= self.rank_job.least else StepShape(sizes=(), lengths=())
        return replace(shape, continues=None, ahead=ahead)


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase on this rank."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)


ALIKE = 32
"""Number of mini-batches that are sorted by length together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(PlannedStep):
    """A step of an asynchronous pipeline.  ahead: the samples of the mini-batches after it that begin in it (see
    WindowShape).
    """

    ahead: tuple[tuple[int, ...], ...] = ()


def all_parts(planned: PlannedStep) -> PlannedStep:
    """Return a step with the mini-batches ahead as additional parts."""
    if not isinstance(planned, Window):
        return planned
    assert isinstance(planned.shape, WindowShape)
    return PlannedStep(samples=planned.samples + planned.ahead, shape=planned.shape.all_parts)


@lru_cache(maxsize=4)
def windows(
    lengths: tuple[int, ...], batch_size: int, size: int, *, seed: int, epochs: int, ahead: int = 0, parts: int = 1
) -> tuple[tuple[PlannedStep, ...], ...]:
    """Return every epoch's windows; their parts are mini-batches.

    lengths: tokens of each sample.  size: number of mini-batches in a window; 0 is an epoch.

    ahead: number of parts whose forward passes begin in the window before theirs; 0: the pipeline drains after each
    window.  It also drains after a window that begins with an empty pipeline and is shorter than that.  parts: number
    of parts of a mini-batch.
    Raises ConfigError if a mini-batch has fewer samples than parts.
    Runs of mini-batches are sorted by length, because stages that compute mini-batches of unequal length at the same
    time wait for each other.
    """
    counts: list[list[int]] = []  # every epoch's windows, in mini-batches
    batches: list[Sequence[int]] = []
    for epoch in range(epochs):
        drawn = epoch_batches(lengths, batch_size, seed, epoch)
        window_size = size or len(drawn)
        for start in range(0, len(drawn), min(window_size, ALIKE)):
            alike = drawn[start : start + min(window_size, ALIKE)]
            for batch in sorted(alike, key=lambda batch: max(lengths[i] for i in batch)):
                if len(batch) < parts:
                    raise ConfigError(
                        f"Two versions of the weights on {parts} stages were asked for: a mini-batch has as many "
                        "micro-batches.",
                        f"An epoch's last mini-batch has {len(batch)} samples.",
                        "Choose another batch_size, or versions=stashing.",
                    )
                batches += cut_mini_batch(batch, parts)
        counts.append([parts * min(window_size, len(drawn) - start) for start in range(0, len(drawn), window_size)])
    start, before, all_windows = 0, None, []
    for epoch_counts in counts:
        steps: list[PlannedStep] = []
        for count in epoch_counts:
            step = PlannedStep.of(batches[start : start + count], lengths)
            start += count
            is_short = count < (ahead + 1) * parts  # then it does not fill an empty pipeline
            following = PlannedStep.of([] if is_short and before is None else batches[start : start + ahead], lengths)
            shape = WindowShape(
                sizes=step.shape.sizes, lengths=step.shape.lengths, ahead=following.shape, continues=before
            )
            steps.append(Window(samples=step.samples, shape=shape, ahead=following.samples))
            before = (shape if is_short else replace(shape, continues=None)) if following.samples else None
        all_windows.append(tuple(steps))
    return tuple(all_windows)


class WindowOptimizer:
    """An Optimizer: a FlatAdamW whose steps are windows.

    num_batches: number of mini-batches in an epoch.  size: see windows.
    """

    def __init__(self, inner: FlatAdamW, num_batches: int, size: int) -> None:
        self.inner, self._num_batches, self._size = inner, num_batches, size or num_batches

    @property
    def num_steps(self) -> int:
        """Return the number of finished windows."""
        epochs, batches = divmod(self.inner.num_steps, self._num_batches)
        return epochs * -(-self._num_batches // self._size) + -(-batches // self._size)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of parameters, gradients and moments (see Optimizer)."""
        return self.inner.state_bytes

    def state_vectors(self) -> tuple[Tensor, ...]:
        """Return all state that determines the next step (see Optimizer)."""
        return self.inner.state_vectors()

    def set_num_steps(self, num_steps: int) -> None:
        """Continue after this many windows."""
        epochs, windows = divmod(num_steps, -(-self._num_batches // self._size))
        self.inner.set_num_steps(epochs * self._num_batches + windows * self._size)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name (see Optimizer)."""
        return self.inner.named_tensors()


@dataclass(slots=True, eq=False)
class Version:
    """A version of a stage's trained weights, (total,).

    in_flight: mini-batches between their forward and backward pass that use it.
    """

    weights: Tensor
    in_flight: int = 0

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.weights.nbytes


@dataclass(slots=True, kw_only=True)
class StashingHandlers:
    """One window's operations on one rank.

    each: the operations of a mini-batch.  per_update: number of its micro-batches.

    kept: 0 if only mini-batches in flight need an older version; else the number of updates for which every version is
    stored.
    begins: whether the pipeline is empty at first.  Then `first`, the window's first version, arrives without content;
    it is kept while a mini-batch needs it.  Every other version is the content of the value that an operation reads.
    """

    each: BackpropagationHandlers
    begins: bool = True
    kept: int = 0
    per_update: int = 1
    first: Version | None = field(init=False)

    def __post_init__(self) -> None:
        self.first = Version(self.each.optimizer.parameters) if self.begins else None

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        handlers = {
            "F": self._forward,
            BEGIN: self._begin,
            END: self._score,
            "B": self._backward,
            AGAIN: self._again,
            f"{BEGIN}B": self._backward,
        }
        return self.each.table() | handlers | {f"{END}B": self._begin_backward, STEP: self._step}

    def _forward(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads).in_flight += 1
        return self._score(op, reads)

    def _begin(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads).in_flight += 1
        return self.each.table()[op.kind](op, reads)

    def _again(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads)
        return self.each.table()[op.kind](op, reads)

    def _score(self, op: Op, reads: Contents) -> Contents:
        first = op.microbatch // self.per_update * self.per_update
        size = sum(len(batch.sample_ids) for batch in self.each.batches[first : first + self.per_update])
        written = replace(self.each, total=size).table()[op.kind](op, reads)
        share = size / self.each.total  # a window's loss is the mean over its samples
        return tuple(
            result * share if value.name == "loss" else result for value, result in zip(op.writes, written, strict=True)
        )

    def _begin_backward(self, op: Op, reads: Contents) -> Contents:
        self._version(op, reads)
        return self.each.table()[op.kind](op, reads)

    def _backward(self, op: Op, reads: Contents) -> Contents:
        version = self._version(op, reads)
        if all(value.name != "gacc" for value in op.writes):  # a recomputed layer, but not the stage's first
            return self.each.table()[op.kind](op, reads)
        version.in_flight -= 1
        is_read_again = version.in_flight or (op.microbatch < (self.kept + 1) * self.per_update - 1 and self.kept)
        if version is self.first and version.weights is not self.each.optimizer.parameters and not is_read_again:
            self.first = None
        return self.each.table()[op.kind](op, reads)

    def _step(self, op: Op, reads: Contents) -> Contents:
        optimizer, newest = (
            self.each.optimizer,
            self._version(op, reads),
        )  # releases the backward pass's version before another is made
        if newest.in_flight or self.kept:
            optimizer.keep_version()
        elif newest is self.first:
            self.first = None
        optimizer.step()
        optimizer.compute_with(optimizer.parameters)
        return (Version(optimizer.parameters),)

    def _version(self, op: Op, reads: Contents) -> Version:
        """Set the stage to the version that an operation reads, and return it."""
        version: Version | None = named(op, reads, "weight")[0] or self.first
        assert version is not None, f"{op.label} reads the window's first version, which is gone"
        self.each.optimizer.compute_with(version.weights)
        return version
