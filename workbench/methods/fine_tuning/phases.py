"""The one phase of a fine-tuning run: every epoch forward and back through a pipeline's stages."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.methods.common.reporting import LOADING
from workbench.methods.common.session import RankResult, RankSession
from workbench.methods.fine_tuning.handlers import BackpropagationHandlers, Programs, SharedParameter, StageCompute, shared_parameters
from workbench.methods.fine_tuning.stashing import StashingHandlers, WindowOptimizer, windows
from workbench.methods.training.handlers import PlannedStep
from workbench.methods.training.phases import Loaded, Phase, RankJob, StagePhase, make_optimizer
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

    def loaded(self, rank: int) -> Loaded | None:
        """Return a rank's stage as it is before the first step (see RankJob); None if it has none."""
        index = self.plan.stage_of(rank)
        if index is None:
            return None
        stage, steps = self.plan.stages[index], self.phases()[0].steps(0)
        model = TechniqueStage(self.load_backbone(stage.start, stage.stop), self.config)
        num_batches = sum(len(step.samples) for step in steps) if self.is_asynchronous else len(steps)
        optimizer = make_optimizer(self, model, num_batches)
        windowed = WindowOptimizer(optimizer, num_batches, self.drain_every) if self.is_asynchronous else optimizer
        return Loaded((stage.start, stage.stop), StageCompute(model), windowed)

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
        loaded = self.rank_job.loaded(self.session.rank)
        if loaded is not None:
            self.take(loaded)
        self.result.nbytes["private memory with the model"] = read_memory().anonymous_bytes

    def take(self, loaded: Loaded) -> bool:
        """Take a stage that is loaded (see RankPhase)."""
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
            return StashingHandlers(each=BackpropagationHandlers(shared=(), **own | {"optimizer": self.optimizer.inner})).table()
        return BackpropagationHandlers(shared=self.rank_job.shared, **own).table()


def phases_on(session: RankSession[FineTuningRankJob], result: RankResult) -> tuple[TechniquePhase, ...]:
    """Return the phase as a rank does it."""
    return (TechniquePhase(session, session.rank_job.phases()[0], result),)
