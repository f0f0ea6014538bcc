"""The one phase of a fine-tuning run: every epoch forward and back through a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.reporting import LOADING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers, Programs, SharedParameter, StageCompute, shared_parameters
from workbench.methods.fine_tuning.stashing import StashingHandlers, WindowOptimizer, windows
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import Phase, RankJob, StagePhase, make_optimizer
from workbench.models.loading import ModelFacts, import_family
from workbench.models.lora import require_peft
from workbench.models.techniques import TechniqueConfig, TechniqueStage
from workbench.runtime.executor import Handler
from workbench.runtime.memory import read_memory

JOURNAL_BYTES = 32_000_000
"""A stage with more parameters and moments than this is kept after every epoch only: to copy them after every step would cost more
time than a crash of the program loses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRankJob(RankJob):
    """All that a rank is told of a fine-tuning run.

    config: what is trained.  facts: the model's shape.  drain_every: of an asynchronous pipeline (see stashing.windows).
    """

    config: TechniqueConfig
    facts: ModelFacts
    drain_every: int = 0

    @property
    def is_asynchronous(self) -> bool:
        """Return whether mini-batches follow each other without a drain."""
        return self.schedule == "asynchronous_1f1b"

    def planned_windows(self, epoch: int) -> tuple[PlannedStep, ...]:
        """Return an epoch's steps if they are windows."""
        return windows(self.split.lengths, self.plan.mini_batch_size, self.drain_every, seed=self.job.seed, epoch=epoch)

    @property
    def shared(self) -> tuple[SharedParameter, ...]:
        """Return the trained parameters of which several stages hold copies."""
        return shared_parameters(self.facts, self.config.technique, self.plan)

    def phases(self) -> tuple[Phase, ...]:
        """Return the only phase (see RankJob)."""
        programs = Programs(self.profile, self.cluster, self.plan, self.facts, self.shared, self.schedule)
        steps = self.planned_windows if self.is_asynchronous else self.planned_epoch
        return (Phase(epochs=range(self.job.epochs), steps=steps, program=programs.step),)

    def prepare_imports(self) -> None:
        """Import what model and technique need (see SessionJob)."""
        import_family(self.job.model)
        if self.config.technique == "lora":
            require_peft()


class TechniquePhase(StagePhase[FineTuningRankJob]):
    """A stage's layers with what a technique trains in them."""

    journal_bytes = JOURNAL_BYTES

    def load(self, epoch: int) -> None:
        """Load the stage (see RankPhase)."""
        self.session.progress.phase(LOADING)
        if self.index is not None:
            stage = self.rank_job.plan.stages[self.index]
            model = TechniqueStage(self.rank_job.load_backbone(stage.start, stage.stop), self.rank_job.config)
            self.compute = StageCompute(model)
            num_batches = sum(len(step.samples) for step in self.phase.steps(0)) if self.rank_job.is_asynchronous else self.steps_per_epoch
            optimizer = make_optimizer(self.rank_job, model, num_batches)
            is_windowed = self.rank_job.is_asynchronous
            self.optimizer = WindowOptimizer(optimizer, num_batches, self.rank_job.drain_every) if is_windowed else optimizer
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def handlers(self, epoch: int, planned: PlannedStep) -> dict[str, Handler]:
        """Return the handlers of a step (see RankPhase)."""
        own = self.own(planned, epoch)
        if isinstance(self.optimizer, WindowOptimizer):
            return StashingHandlers(each=BackpropagationHandlers(shared=(), **own | {"optimizer": self.optimizer.inner})).table()
        return BackpropagationHandlers(shared=self.rank_job.shared, **own).table()


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase as a rank does it."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)
