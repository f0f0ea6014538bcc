"""The single phase of a fine-tuning run: every epoch forward and back through a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import ClassVar, Self

from workbench.core.cluster import Device
from workbench.core.plan import Stage
from workbench.core.virtual_workers import VersionRule, delay_of
from workbench.methods.common.rank_results import RankResult
from workbench.methods.common.session import RankSession
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
from workbench.methods.fine_tuning.stashing import StashingHandlers, Window, WindowOptimizer, all_parts, windows
from workbench.methods.training.handlers import PlannedStep, StepShape
from workbench.methods.training.phases import Loaded, Phase, RankJob
from workbench.methods.training.rank_phases import StagePhase, make_optimizer
from workbench.models.configuration import ModelFacts, import_family
from workbench.models.cross_framework import require_jax
from workbench.models.lora import import_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory
from workbench.runtime.snapshot import SMALL_BYTES
from workbench.schedules.division import Division
from workbench.schedules.tensor import stream_of


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

    def on_rank(self, rank: int) -> Self:
        """Return the job with what the device's stage reads: tokens in the first one, labels in the last (see RankJob).

        An encoder-decoder's stages read both.
        """
        if self.split.start_id is not None:
            return self
        index, every = self.plan.stage_of(rank), range(len(self.split))
        tokens, labels = (every if index == end else () for end in (0, len(self.plan.stages) - 1))
        return replace(self, split=self.split.seen(tokens=tokens, labels=labels))

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
        steps = self.planned_windows if self.is_asynchronous else self.planned_epoch
        return (Phase(epochs=range(self.job.epochs), steps=steps, program=self.programs.step),)

    @property
    def programs(self) -> Programs:
        """Return the programs of the steps."""
        settings = self.shared, self.schedule, self.divisions, self.versions, self.config.side_width
        return Programs(self.profile, self.cluster, self.plan, self.facts, *settings)

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
            import_module("workbench.methods.fine_tuning.jax_blocks").load_compiler()
        if self.config.technique == "lora":
            import_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with the technique's trainable modules."""

    _begun: tuple[
        tuple[int, ...], ...
    ] = ()  # the samples of the mini-batches whose forward passes the last window has begun

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        loaded = self.rank_job.loaded(self.session.rank)
        if loaded is not None:
            self.take(loaded)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def take(self, loaded: Loaded) -> bool:
        """Use a loaded stage (see RankPhase)."""
        is_taken = super().take(loaded)
        if is_taken:
            self.compute.folder = self.activations_folder
        return is_taken

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        if not isinstance(self.optimizer, WindowOptimizer):
            return BackpropagationHandlers(shared=self.rank_job.shared, **self.handler_fields(planned, epoch)).table()
        division, shape = self.rank_job.divisions.get(self.session.rank), self.shape(planned)
        arguments = self.handler_fields(all_parts(planned), epoch) | {
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
            num_versions=num_versions,
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
