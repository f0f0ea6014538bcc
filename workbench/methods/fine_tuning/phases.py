"""The single phase of a fine-tuning run: every epoch forward and back through a pipeline's stages.

Asynchronous 1F1B with weight stashing (Confidant, section 2.2; PipeDream, Narayanan et al., 2019): every mini-batch updates a stage's
weights as soon as its backward pass there is finished, and uses the same weight version in its backward pass as in its forward pass.
A step of the trainer is a window: consecutive mini-batches without a drain.  Between two windows the pipeline is empty, so all stages
have finished the same mini-batches: this is the state of checkpoints, backups and the next generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, ClassVar

from torch import Tensor

from workbench.core.cluster import Device
from workbench.core.division import Division
from workbench.core.plan import Stage
from workbench.core.schedule import STEP, Op
from workbench.methods.common.session import LOADING, RankResult, RankSession
from workbench.methods.fine_tuning.divided import divided_or_whole
from workbench.methods.fine_tuning.handlers import (
    BackpropagationHandlers,
    JaxStageCompute,
    Programs,
    SharedParameter,
    StageCompute,
    activation_of,
    shared_parameters,
)
from workbench.methods.training.handlers import PlannedStep, named
from workbench.methods.training.phases import Loaded, Phase, RankJob, StagePhase, make_optimizer
from workbench.models.cross_framework import require_jax
from workbench.models.loading import ModelFacts, import_family
from workbench.models.lora import require_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.executor import Handler
from workbench.runtime.flat_optimizer import FlatAdamW
from workbench.runtime.memory import read_memory
from workbench.schedules.tensor import BEGIN, END
from workbench.tasks.batching import epoch_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRankJob(RankJob):
    """The description of a fine-tuning run for a rank.

    config: of the technique.  facts: the model's shape.  drain_every: of an asynchronous pipeline (see windows).  divisions: see Programs.
    journal_bytes: copying a larger state after every step would cost more time than a crash of the program loses.
    """

    journal_bytes: ClassVar[float] = 32_000_000

    config: TechniqueConfig
    facts: ModelFacts
    drain_every: int = 0
    divisions: dict[int, Division] = field(default_factory=dict)

    @property
    def is_asynchronous(self) -> bool:
        """Return whether mini-batches follow each other without a drain."""
        return self.schedule == "asynchronous_1f1b"

    def planned_windows(self, epoch: int) -> tuple[PlannedStep, ...]:
        """Return an epoch's steps if they are windows."""
        return windows(self.split.lengths, self.plan.mini_batch_size, self.drain_every, seed=self.job.seed, epoch=epoch)

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters with copies on several stages."""
        return shared_parameters(self.facts, self.config.technique, self.plan)

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        programs = Programs(self.profile, self.cluster, self.plan, self.facts, self.shared, self.schedule, self.divisions)
        steps = self.planned_windows if self.is_asynchronous else self.planned_epoch
        return (Phase(epochs=range(self.job.epochs), steps=steps, program=programs.step),)

    def loaded(self, rank: int) -> Loaded | None:
        """Return a rank's stage as it is before the first step (see RankJob); None if the rank has no stage."""
        index = self.plan.stage_of(rank)
        if index is None:
            return None
        stage, steps = self.plan.stages[index], self.phases()[0].steps(0)
        model = TechniqueStage(self.load_backbone(stage.start, stage.stop), self.config)
        num_batches = sum(len(step.samples) for step in steps) if self.is_asynchronous else len(steps)
        optimizer = make_optimizer(self, model, num_batches)
        windowed = WindowOptimizer(optimizer, num_batches, self.drain_every) if self.is_asynchronous else optimizer
        return Loaded((stage.start, stage.stop), self._compute(rank, stage, model), windowed)

    def _compute(self, rank: int, stage: Stage, model: TechniqueStage) -> StageCompute:
        if self.cluster.devices[rank].framework == "torch":
            return StageCompute(model)
        sizes: set[tuple[int, int]] = set()
        for shape in {step.shape for epoch in range(self.job.epochs) for step in self.phases()[0].steps(epoch)}:
            shares = [stage.split(size)[stage.ranks.index(rank)] for size in shape.sizes]
            sizes |= {(end - first, length) for (first, end), length in zip(shares, shape.lengths, strict=True) if end > first}
        return JaxStageCompute(model, activation=activation_of(self.job.model), heads=self.facts.num_heads, sizes=sorted(sizes))

    def prepare_imports(self, device: Device) -> None:
        """Import the libraries of the model, the technique and the device's framework (see SessionJob)."""
        import_family(self.job.model)
        if device.framework == "jax":
            require_jax()
            import_module("workbench.models.jax_blocks").load_compiler()
        if self.config.technique == "lora":
            require_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with the technique's trainable modules."""

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        loaded = self.rank_job.loaded(self.session.rank)
        if loaded is not None:
            self.take(loaded)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def take(self, loaded: Loaded) -> bool:
        """Use a stage that is loaded already (see RankPhase)."""
        if self.index is None or loaded.layers != self.layers:
            return False
        self.compute, self.optimizer = loaded.compute, loaded.optimizer
        return True

    def hand_on(self) -> Loaded | None:
        """Return the stage (see RankPhase)."""
        return None if self.optimizer is None else Loaded(self.layers, self.compute, self.optimizer)

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        own = self.own(planned, epoch)
        if isinstance(self.optimizer, WindowOptimizer):
            division = self.rank_job.divisions.get(self.session.rank)
            each = divided_or_whole(division, **own | {"optimizer": self.optimizer.inner})
            return StashingHandlers(each=each).table()
        return BackpropagationHandlers(shared=self.rank_job.shared, **own).table()


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase as a rank does it."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)


ALIKE = 32
"""Number of mini-batches that are sorted by length together."""


def windows(lengths: tuple[int, ...], batch_size: int, drain_every: int, *, seed: int, epoch: int) -> tuple[PlannedStep, ...]:
    """Return an epoch's windows; their parts are mini-batches.  lengths: tokens of each sample.  drain_every: 0 is once an epoch.

    Runs of mini-batches are sorted by length, because stages that compute mini-batches of unequal length at the same time wait for each
    other.
    """
    drawn = epoch_batches(lengths, batch_size, seed, epoch)
    size = drain_every or len(drawn)
    run = min(size, ALIKE)
    batches = [
        one for at in range(0, len(drawn), run) for one in sorted(drawn[at : at + run], key=lambda batch: max(lengths[i] for i in batch))
    ]
    return tuple(PlannedStep.of(batches[at : at + size], lengths) for at in range(0, len(batches), size))


class WindowOptimizer:
    """A FlatAdamW whose steps, for the trainer, are windows: an Optimizer.

    num_batches: mini-batches of an epoch.  drain_every: see windows.
    """

    def __init__(self, inner: FlatAdamW, num_batches: int, drain_every: int) -> None:
        self.inner, self._num_batches, self._size = inner, num_batches, drain_every or num_batches

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
        """Continue as after so many windows."""
        epochs, windows = divmod(num_steps, -(-self._num_batches // self._size))
        self.inner.set_num_steps(epochs * self._num_batches + windows * self._size)

    def named_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name (see Optimizer)."""
        return self.inner.named_tensors()

    def load_named_tensors(self, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Load parameters and moments by name, and the number of windows done (see Optimizer)."""
        self.inner.load_named_tensors(tensors, 0)
        self.set_num_steps(num_steps)


@dataclass(slots=True, eq=False)
class Version:
    """A version of a stage's trained weights, (total,).  in_flight: mini-batches between their forward and backward pass with it."""

    weights: Tensor
    in_flight: int = 0

    @property
    def nbytes(self) -> int:
        """Return its size in bytes."""
        return self.weights.nbytes


@dataclass(slots=True, kw_only=True)
class StashingHandlers:
    """One window's operations on one rank.  each: of a mini-batch.

    newest: version of the weights.  first: the window's first version, kept while a mini-batch needs it; it arrives without content.
    """

    each: BackpropagationHandlers
    newest: Version = field(init=False)
    first: Version | None = field(init=False)

    def __post_init__(self) -> None:
        self.newest = self.first = Version(self.each.optimizer.parameters)

    def table(self) -> dict[str, Handler]:
        """Return the handlers by operation kind."""
        own = {"F": self._forward, BEGIN: self._begin, END: self._score, "B": self._backward, f"{BEGIN}B": self._backward}
        return self.each.table() | own | {f"{END}B": self._begin_backward, STEP: self._step}

    def _forward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self._version(op, reads).in_flight += 1
        return self._score(op, reads)

    def _begin(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self._version(op, reads).in_flight += 1
        return self.each.table()[op.kind](op, reads)

    def _score(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        size = len(self.each.batches[op.microbatch].sample_ids)
        written = replace(self.each, total=size).table()[op.kind](op, reads)
        share = size / self.each.total  # a window's loss is the mean over its samples
        return tuple(one * share if value.name == "loss" else one for value, one in zip(op.writes, written, strict=True))

    def _begin_backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        self._version(op, reads)
        return self.each.table()[op.kind](op, reads)

    def _backward(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        version = self._version(op, reads)
        version.in_flight -= 1
        if version is self.first is not self.newest and not version.in_flight:
            self.first = None
        return self.each.table()[op.kind](op, reads)

    def _step(self, op: Op, reads: tuple[Any, ...]) -> tuple[Any, ...]:
        optimizer = self.each.optimizer
        optimizer.compute_with(optimizer.parameters)  # lets go of the version of the backward pass before there is another
        if self.newest.in_flight:
            optimizer.keep_version()
        optimizer.step()
        optimizer.compute_with(optimizer.parameters)
        self.newest = Version(optimizer.parameters)
        return (self.newest,)

    def _version(self, op: Op, reads: tuple[Any, ...]) -> Version:
        """Set the stage to the version that an operation reads, and return it."""
        version: Version | None = named(op, reads, "weight")[0] or self.first
        assert version is not None, f"{op.label} reads the window's first version, which is gone"
        self.each.optimizer.compute_with(version.weights)
        return version
